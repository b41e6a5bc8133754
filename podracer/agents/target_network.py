"""Target networks: older or averaged copies of the parameters."""

import jax
import optax

from podracer.types import Array, Params, Target


def periodic(period: int, rate: float = 1.0) -> Target:
    """Moves the target towards the parameters at every ``period``-th gradient step; a rate of 1
    copies them."""

    def update(target: Params, params: Params, metrics: dict[str, Array], step: Array) -> Params:
        del metrics

        def move() -> Params:
            whole = isinstance(rate, float) and rate == 1
            return params if whole else optax.incremental_update(params, target, rate)

        return jax.lax.cond(step % period == 0, move, lambda: target)

    return Target(lambda params: params, update)
