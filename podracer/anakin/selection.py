"""Selection among the agents of a run, on the devices: see ``learning.selection``."""

from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp

from podracer.anakin.state import AnakinState
from podracer.config import SelectionConfig
from podracer.distributed import mesh as mesh_lib
from podracer.learning import selection
from podracer.learning.selection import Distribution
from podracer.training import builder
from podracer.training.rows import Selected
from podracer.types import Array


def make_select(
    config: SelectionConfig, distributions: Mapping[str, Distribution]
) -> Callable[[AnakinState], tuple[AnakinState, Selected]]:
    """``(state) -> (state, selected)`` as each device runs it after a call, for the agents of its
    group.

    Agents copy weights, optimizer and target network of others, but keep their environments, replay
    and random key.

    Args:
      config: how agents are selected.
      distributions: what their settings were drawn from, by dotted name.
    """

    def changed(settings: dict[str, Array], key: Array) -> dict[str, Array]:
        """The settings of one agent that has copied another one."""
        keys = jax.random.split(key, len(settings))
        return {
            name: selection.explore(distributions[name], x, keys[i], config.step, config.resample)
            for i, (name, x) in enumerate(settings.items())
        }

    def copy(parents: Array, state: AnakinState) -> AnakinState:
        own = mesh_lib.own_agents(jnp.arange(parents.size))
        mine = parents[own]
        whole = mesh_lib.gather_agents((state.train, state.settings, state.alive))
        train, settings, alive = jax.tree.map(lambda x: x[mine], whole)
        keys = jax.vmap(builder.selection_key)(state.key, state.train.step)
        # The agents of a sweep have the same seed, but each one explores for itself.
        keys = jax.vmap(jax.random.fold_in)(keys, own)
        copied, new = mine != own, jax.vmap(changed)(settings, keys)
        settings = jax.tree.map(partial(jnp.where, copied), new, settings)
        scores = selection.no_scores(state.train.step)
        return state.replace(train=train, settings=settings, alive=alive, scores=scores)

    def select(state: AnakinState) -> tuple[AnakinState, Selected]:
        scores, alive = mesh_lib.gather_agents((state.scores, state.alive))
        due = selection.is_due(scores, alive, state.train.step[0], config.every)
        # One that has diverged is the worst.
        parents = selection.parents(jnp.where(alive, scores.mean, -jnp.inf), config.share)
        state = jax.lax.cond(due, partial(copy, parents), lambda x: x, state)
        own = mesh_lib.own_agents(jnp.where(due, parents, jnp.arange(parents.size)))
        return state, Selected(jnp.broadcast_to(due, own.shape), own, state.settings)

    return select
