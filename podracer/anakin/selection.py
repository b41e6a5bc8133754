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
    config: SelectionConfig, distributions: Mapping[str, Distribution], num_updates: int
) -> Callable[[AnakinState], tuple[AnakinState, Selected]]:
    """``(state) -> (state, selected)`` as each device runs it after a call, for the agents of its
    group.

    Agents copy weights, optimizer and target network of others, but keep their environments, replay
    and random key.

    Args:
      config: how agents are selected.
      distributions: what their settings were drawn from, by dotted name.
      num_updates: number of updates of the run. None are selected after the last one, when they
        would be reported with returns that others have earned.
    """

    def mean_of_best(scores: Array, settings: dict[str, Array]) -> dict[str, Array]:
        """The weighted mean of the settings of the best agents, on their scales."""
        weights = selection.recombine(scores, config.share)
        means = {name: weights @ distributions[name].position(x) for name, x in settings.items()}
        return {name: jnp.asarray(distributions[name].at(x)) for name, x in means.items()}

    def changed(settings: dict[str, Array], key: Array) -> dict[str, Array]:
        """New settings of one agent, from those of another one or the mean."""
        keys = jax.random.split(key, len(settings))
        return {
            name: selection.explore(distributions[name], x, keys[i], config.step, config.resample)
            for i, (name, x) in enumerate(settings.items())
        }

    def copy(parents: Array, mean: dict[str, Array], state: AnakinState) -> AnakinState:
        own = mesh_lib.own_agents(jnp.arange(parents.size))
        mine = parents[own]
        whole = mesh_lib.gather_agents((state.train, state.settings, state.alive))
        train, settings, alive = jax.tree.map(lambda x: x[mine], whole)
        keys = jax.vmap(builder.selection_key)(state.key, state.train.step)
        # The agents of a sweep have the same seed, but each one explores for itself.
        keys = jax.vmap(jax.random.fold_in)(keys, own)
        changes = mine != own
        if config.rule == "evolution":
            settings = jax.tree.map(lambda x: jnp.full(own.shape, x), mean)
            changes = jnp.full(own.shape, True)
        new = jax.vmap(changed)(settings, keys)
        settings = jax.tree.map(partial(jnp.where, changes), new, settings)
        scores = selection.no_scores(state.train.step)
        return state.replace(train=train, settings=settings, alive=alive, scores=scores)

    def select(state: AnakinState) -> tuple[AnakinState, Selected]:
        whole = mesh_lib.gather_agents((state.scores, state.alive, state.settings))
        scores, alive, settings = whole
        updates = state.train.step[0]
        due = selection.is_due(scores, alive, updates, config.every) & (updates < num_updates)
        # One that has diverged is the worst.
        means = jnp.where(alive, scores.mean, -jnp.inf)
        parents, mean = selection.parents(means, config.share), mean_of_best(means, settings)
        state = jax.lax.cond(due, partial(copy, parents, mean), lambda x: x, state)
        own = mesh_lib.own_agents(jnp.where(due, parents, jnp.arange(parents.size)))
        due, mean = jax.tree.map(lambda x: jnp.full(own.shape, x), (due, mean))
        return state, Selected(due, own, state.settings, mean)

    return select
