"""Groups that average, on the devices: see ``learning.averaging``."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from podracer.anakin.state import AnakinState, Start
from podracer.config import AveragingConfig
from podracer.distributed import mesh as mesh_lib
from podracer.learning import averaging
from podracer.learning.averaging import Groups, mean_of_living
from podracer.learning.learner import Metrics
from podracer.training.rows import CallMetrics
from podracer.types import Array

Step = Callable[[AnakinState], tuple[AnakinState, CallMetrics]]


def init_groups(
    init: Callable[[Start, Array], AnakinState], config: AveragingConfig
) -> Callable[[Start], AnakinState]:
    """The initial state as each device has it: groups of their own environments, and weights that
    all groups share.

    Args:
      init: ``(start, group) -> AnakinState`` of one group.
      config: how groups average.
    """
    optimizer = averaging.make_outer(config.outer_rate, config.outer_momentum)

    def init_own(start: Start) -> AnakinState:
        own = mesh_lib.own_agents(jnp.arange(config.groups))
        # One after another, as several agents are.
        groups = jax.lax.map(partial(init, start), own)
        shared, key = jax.tree.map(lambda x: x[0], (groups.train, groups.key))
        return groups.replace(
            train=shared.replace(opt_state=groups.train.opt_state),
            key=key,
            outer=optimizer.init(shared.weights.params),
        )

    return init_own


def average_groups(step: Step, config: AveragingConfig, averages: int) -> Step:
    """The step of one call as each device runs it.

    Args:
      step: the step of the groups of a device between two averages; they are the first axis of
        state and metrics.
      config: how groups average.
      averages: number of averages of a call.
    """
    optimizer = averaging.make_outer(config.outer_rate, config.outer_momentum)

    def begin(state: AnakinState) -> AnakinState:
        """The groups of this device, all of which begin with the average."""
        own = state.rollout.env_id.shape[0]
        rest = state.train.replace(opt_state=())
        rest, key = jax.tree.map(lambda x: jnp.broadcast_to(x, (own, *x.shape)), (rest, state.key))
        train = rest.replace(opt_state=state.train.opt_state)
        return state.replace(train=train, key=key, alive=jnp.full(own, True), outer=())

    def one_average(state: AnakinState, _: None) -> tuple[AnakinState, CallMetrics]:
        groups, metrics = step(begin(state))
        arrived = Groups(groups.train.weights, groups.train.target, groups.alive)
        found = averaging.average(
            optimizer, state.train.weights, state.outer, arrived, mesh_lib.sum_groups
        )
        train = groups.train.replace(
            weights=found.weights, target=found.target, step=groups.train.step[0]
        )
        state = state.replace(
            train=train, rollout=groups.rollout, source=groups.source, outer=found.opt_state
        )
        metrics = _of_all(metrics, config.groups)
        return state, metrics._replace(averages={**metrics.averages, **found.metrics})

    def step_all(state: AnakinState) -> tuple[AnakinState, CallMetrics]:
        state, metrics = jax.lax.scan(one_average, state, length=averages)
        updates = metrics._replace(averages=())
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), updates)
        return state, flat._replace(averages=metrics.averages)

    return step_all


def _of_all(metrics: CallMetrics, groups: int) -> CallMetrics:
    """The metrics of updates of all groups, ``[K]`` each, of those of the groups of a device,
    ``[groups, K]``: means over the groups that have not diverged, and sums of episodes."""

    def mean(learner: Metrics, alive: Array) -> Metrics:
        return mean_of_living(learner, alive, mesh_lib.sum_groups)

    learner = jax.vmap(mean, in_axes=1)(metrics.learner, metrics.alive)
    alive = metrics.alive[:, -1].astype(jnp.float32)
    sums = jax.tree.map(lambda x: x.sum(0), (metrics.episodes, alive))
    episodes, alive = mesh_lib.sum_groups(sums)
    averages = {"averaging/alive": alive / groups}
    return metrics._replace(learner=learner, episodes=episodes, alive=(), averages=averages)
