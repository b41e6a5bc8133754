"""The learner of every agent.

prepare -> epochs x minibatches of (gradient -> mean over devices -> optax) -> target network.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import optax

from podracer.errors import ConfigError
from podracer.learning.optimizer import LearnerConfig
from podracer.types import Agent, Array, ArrayTree, Mean, Params, TrainState, Trajectory

Metrics = dict[str, Array]
Update = Callable[[TrainState, Trajectory, Array], tuple[TrainState, Metrics]]


def shuffle(key: Array, items: int, minibatches: int, device_index: Array | int) -> Array:
    """Deals items out to minibatches: ``[minibatches, items / minibatches]`` indices.

    The shuffle is stratified: of each group of ``minibatches`` neighbouring items, one goes to each
    minibatch, drawn with a key that depends on the group's *global* number. A minibatch over all
    devices therefore holds the same items however they are spread over devices, which is not true
    of a permutation of each device's items, and is spread evenly over time and environments. No
    sort of the whole batch is needed; it would take a quarter of an update on a CPU (see
    benchmarks/README.md).

    Args:
      key: random key, the same on all devices.
      items: number of items on this device, a multiple of ``minibatches``.
      minibatches: number of minibatches.
      device_index: number of this device; the items of device 0 come first.
    """
    groups = items // minibatches
    ids = device_index * groups + jnp.arange(groups)
    bits = jax.vmap(lambda i: jax.random.bits(jax.random.fold_in(key, i), (minibatches,)))(ids)
    order = jnp.argsort(bits, axis=1)
    return (jnp.arange(groups)[:, None] * minibatches + order).T


# The train state, and whether a loss has asked to skip the rest of this update.
Progress = tuple[TrainState, Array]
GradientStep = Callable[[Progress, ArrayTree, Array], tuple[Progress, Metrics]]


def _make_gradient_step(
    agent: Agent,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    all_mean: Mean,
) -> GradientStep:
    """``(progress, batch, key) -> (progress, metrics)``: one step of the optimizer."""

    def gradient_step(progress: Progress, batch: ArrayTree, key: Array) -> tuple[Progress, Metrics]:
        train_state, stopped = progress
        params = train_state.weights.params
        grads, aux = jax.grad(agent.loss, has_aux=True)(params, train_state, batch, key)
        grads, metrics, stop = all_mean((grads, aux.metrics, aux.stop))
        metrics = {**metrics, "grad_norm": optax.tree.norm(grads)}
        updates, opt_state = optimizer.update(grads, train_state.opt_state, params)
        updates = optax.tree.scale(schedule(train_state.step), updates)
        new = (optax.apply_updates(params, updates), opt_state)
        if not isinstance(stop, tuple):
            stopped = stopped | (stop > 0)
            old = (params, train_state.opt_state)
            new = jax.tree.map(lambda o, n: jnp.where(stopped, o, n), old, new)
            metrics["stopped"] = stopped.astype(jnp.float32)
        weights = train_state.weights.replace(params=new[0])
        return (train_state.replace(weights=weights, opt_state=new[1]), stopped), metrics

    return gradient_step


def _epoch(
    gradient_step: GradientStep,
    batch: ArrayTree,
    minibatches: int,
    device_index: Array | int,
    progress: Progress,
    key: Array,
) -> tuple[Progress, Metrics]:
    """One pass over a batch; metrics are ``[minibatches]``."""
    shuffle_key, loss_key = jax.random.split(key)
    if minibatches == 1:
        progress, metrics = gradient_step(progress, batch, loss_key)
        return progress, jax.tree.map(lambda x: x[None], metrics)
    items = jax.tree.leaves(batch)[0].shape[0]
    order = shuffle(shuffle_key, items, minibatches, device_index)

    def minibatch(progress: Progress, x: tuple[Array, Array]) -> tuple[Progress, Metrics]:
        indices, key = x
        return gradient_step(progress, jax.tree.map(lambda x: x[indices], batch), key)

    return jax.lax.scan(minibatch, progress, (order, jax.random.split(loss_key, minibatches)))


def make_update(
    agent: Agent,
    optimizer: optax.GradientTransformation,
    config: LearnerConfig,
    *,
    schedule: optax.Schedule,
    all_mean: Mean,
    device_index: Callable[[], Array | int],
    update_target: Callable[[Params, Params, Array], Params] = lambda new, old, step: old,
) -> Update:
    """The function that learns from one trajectory.

    Args:
      agent: the algorithm.
      optimizer: the optimizer, from ``optimizer.make_optimizer``.
      config: settings of the learner.
      schedule: ``(update) -> factor``, by which the learning rate is multiplied.
      all_mean: the mean of a tree over devices; called once per gradient step, with gradients and
        metrics together.
      device_index: ``() ->`` the number of this device.
      update_target: ``(params, target, step) -> target``, such as optax's ``incremental_update`` or
        ``periodic_update``; agents without a target keep their ``()``.

    Returns:
      ``(train_state, trajectory, key) -> (train_state, metrics)``; metrics are means over gradient
      steps. ``key`` must be the same on all devices.
    """

    gradient_step = _make_gradient_step(agent, optimizer, schedule, all_mean)

    def update(
        train_state: TrainState, trajectory: Trajectory, key: Array
    ) -> tuple[TrainState, Metrics]:
        batch, stats = agent.prepare(train_state, trajectory)
        items, minibatches = jax.tree.leaves(batch)[0].shape[0], config.num_minibatches
        if items % minibatches:
            raise ConfigError(
                f"num_minibatches={minibatches} does not divide the {items} items a device learns "
                "from (items are transitions, or whole environments for recurrent networks and "
                "V-trace)"
            )

        epoch = partial(_epoch, gradient_step, batch, minibatches, device_index())
        keys = jax.random.split(key, config.num_epochs)
        (train_state, _), metrics = jax.lax.scan(epoch, (train_state, jnp.bool_(False)), keys)
        step = train_state.step + 1
        params = train_state.weights.params
        train_state = train_state.replace(
            weights=train_state.weights.replace(stats=stats),
            target=update_target(params, train_state.target, step),
            step=step,
        )
        return train_state, jax.tree.map(jnp.mean, metrics)

    return update
