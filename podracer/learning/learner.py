"""The learner of every agent: one loop over gradient steps, wherever their batches come from.

add the trajectory to the source -> gradient steps of (sample -> gradient -> mean over devices ->
optax -> target network -> priorities).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct

from podracer.types import Agent, Array, ArrayTree, Devices, LossAux, TrainState, Trajectory
from podracer.xla_cpu.raveling import ravel

# ``jax.random.split`` folds small numbers into a key, and sources may split the key of an update.
# The keys of its gradient steps come from a number that no split reaches.
STEPS_SALT = 2**32 - 1

Losses = dict[str, Array]


class Metrics(NamedTuple):
    """The metrics of an update, ``[]`` float32 each.

    Attributes:
      losses: means over gradient steps, of loss, batches and gradients; zeros in an update without
        gradient steps.
      source: of the source, after the update.
      learned: 1 if the update had gradient steps, else 0; ``()`` if all updates have them.
    """

    losses: Losses
    source: dict[str, Array]
    learned: Array | tuple[()] = ()


Update = Callable[[TrainState, ArrayTree, Trajectory, Array], tuple[TrainState, ArrayTree, Metrics]]


class Progress(struct.PyTreeNode):
    """What changes from one gradient step of an update to the next.

    Attributes:
      train_state: the learner's state.
      source: the source's state during the update.
      stopped: ``[]`` bool, whether a loss has asked to skip the rest of the update.
    """

    train_state: TrainState
    source: ArrayTree
    stopped: Array


GradientStep = Callable[[Progress, Array, Array], tuple[Progress, Losses]]


def _make_gradient_step(
    agent: Agent,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    devices: Devices,
) -> GradientStep:
    """``(progress, key, i) -> (progress, losses)``: gradient step ``i`` of an update."""

    def gradient_step(progress: Progress, key: Array, i: Array) -> tuple[Progress, Losses]:
        train_state, stopped = progress.train_state, progress.stopped
        sample_key, loss_key = jax.random.split(key)
        batch, ticket, sampled = agent.source.sample(progress.source, train_state, sample_key, i)
        params = train_state.weights.params
        aux: LossAux
        grads, aux = jax.grad(agent.loss, has_aux=True)(params, train_state, batch, loss_key)
        grads, metrics, stop = devices.mean((grads, {**aux.metrics, **sampled}, aux.stop))
        # Of one vector, as the optimizer's, so that the compiler computes it once for both.
        metrics = {**metrics, "grad_norm": optax.tree.norm(ravel(grads)[0])}
        updates, opt_state = optimizer.update(grads, train_state.opt_state, params)
        updates = optax.tree.scale(schedule(train_state.step), updates)
        new = (optax.apply_updates(params, updates), opt_state)
        if not isinstance(stop, tuple):
            stopped = stopped | (stop > 0)
            old = (params, train_state.opt_state)
            new = jax.tree.map(lambda o, n: jnp.where(stopped, o, n), old, new)
            metrics["stopped"] = stopped.astype(jnp.float32)
        target = train_state.target
        if agent.target is not None:
            number = train_state.step * agent.source.steps + i + 1
            target = agent.target.update(target, new[0], metrics, number)
        weights = train_state.weights.replace(params=new[0])
        train_state = train_state.replace(weights=weights, opt_state=new[1], target=target)
        source = agent.source.update(progress.source, ticket, aux.priorities)
        return Progress(train_state, source, stopped), metrics

    return gradient_step


def make_update(
    agent: Agent,
    optimizer: optax.GradientTransformation,
    *,
    schedule: optax.Schedule,
    devices: Devices,
) -> Update:
    """The function that learns from one more trajectory.

    Args:
      agent: the algorithm.
      optimizer: the optimizer, from ``optimizer.make_optimizer``.
      schedule: ``(update) -> factor``, by which the learning rate is multiplied.
      devices: the devices that learn; ``mean`` is called once per gradient step, with gradients and
        metrics together.

    Returns:
      ``(train_state, source state, trajectory, key) -> (train_state, source state, metrics)``.
      ``key`` must be the same on all devices.
    """
    gradient_step = _make_gradient_step(agent, optimizer, schedule, devices)
    source = agent.source

    def learn(progress: Progress, key: Array) -> tuple[Progress, Losses]:
        steps_key = jax.random.fold_in(key, STEPS_SALT)

        def step(progress: Progress, i: Array) -> tuple[Progress, Losses]:
            return gradient_step(progress, jax.random.fold_in(steps_key, i), i)

        progress, losses = jax.lax.scan(step, progress, jnp.arange(source.steps))
        return progress, jax.tree.map(jnp.mean, losses)

    def wait(progress: Progress, key: Array) -> tuple[Progress, Losses]:
        """No gradient steps, whose losses are reported as zeros."""
        _, shapes = jax.eval_shape(learn, progress, key)
        return progress, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def update(
        train_state: TrainState, state: ArrayTree, trajectory: Trajectory, key: Array
    ) -> tuple[TrainState, ArrayTree, Metrics]:
        added, stats = source.add(state, train_state, trajectory, key)
        progress, learned = Progress(train_state, added, jnp.bool_(False)), ()
        if source.ready is None:
            progress, losses = learn(progress, key)
        else:
            ready = source.ready(added)
            progress, losses = jax.lax.cond(ready, learn, wait, progress, key)
            learned = ready.astype(jnp.float32)
        state, own = source.finish(progress.source)
        train_state = progress.train_state
        train_state = train_state.replace(
            weights=train_state.weights.replace(stats=stats), step=train_state.step + 1
        )
        return train_state, state, Metrics(losses, own, learned)

    return update
