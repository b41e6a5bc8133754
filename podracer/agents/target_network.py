"""Target networks: older or averaged copies of the parameters."""

from collections.abc import Callable

import jax
import optax

from podracer.types import Array, Params


def periodic(period: int, rate: float = 1.0) -> Callable[[Params, Params, Array], Params]:
    """``Agent.target``: at every ``period``-th gradient step, moves the target towards the
    parameters; a rate of 1 copies them."""

    def target(params: Params, target: Params, step: Array) -> Params:
        def move() -> Params:
            return params if rate == 1 else optax.incremental_update(params, target, rate)

        return jax.lax.cond(step % period == 0, move, lambda: target)

    return target
