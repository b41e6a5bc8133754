"""The one learner: it knows no algorithm, only an ``Agent``.

prepare -> epochs x minibatches of (gradient -> mean over devices -> optax) -> target.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import optax

from podracer.errors import ConfigError, unknown
from podracer.types import Agent, Array, ArrayTree, Mean, Params, TrainState, Trajectory

OPTIMIZERS = ("adam", "rmsprop")
# Powers of a batch's ratio to the one that a learning rate is meant for.
BATCH_RULES = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}
Metrics = dict[str, Array]
Update = Callable[[TrainState, Trajectory, Array], tuple[TrainState, Metrics]]


@dataclasses.dataclass(frozen=True)
class LearnerConfig:
    """How gradients become weights.

    Attributes:
      optimizer: "adam" or "rmsprop" (with epsilon inside the root, as in TensorFlow and IMPALA).
      learning_rate: of the first gradient step.
      anneal: the learning rate falls linearly to 0 over the run; else it is constant.
      warmup: updates in which it first rises linearly from 0; it falls from there on.
      batch_rule: how it follows from the transitions of a gradient step, over all devices: "none",
        "linear" or "sqrt" in their ratio to ``reference_batch`` (Goyal et al. 2017,
        https://arxiv.org/abs/1706.02677; Malladi et al. 2022, https://arxiv.org/abs/2205.10287).
      reference_batch: transitions of a gradient step that ``learning_rate`` is meant for; 0 with
        the rule "none" alone.
      epsilon: of the optimizer.
      max_grad_norm: gradients are scaled down to this global norm; 0 turns it off.
      num_epochs: passes over a rollout.
      num_minibatches: gradient steps a pass.
    """

    optimizer: str
    learning_rate: float
    anneal: bool
    warmup: int
    batch_rule: str
    reference_batch: int
    epsilon: float
    max_grad_norm: float
    num_epochs: int
    num_minibatches: int

    def __post_init__(self):
        if self.optimizer not in OPTIMIZERS:
            raise unknown("optimizer", self.optimizer, OPTIMIZERS)
        if self.batch_rule not in BATCH_RULES:
            raise unknown("batch_rule", self.batch_rule, BATCH_RULES)
        if self.warmup < 0 or (self.batch_rule != "none") != (self.reference_batch > 0):
            raise ConfigError(
                "warmup must not be negative, and reference_batch must be positive with a "
                "batch_rule and 0 without, got "
                f"{self.warmup}, {self.reference_batch} and {self.batch_rule!r}"
            )
        if min(self.num_epochs, self.num_minibatches) <= 0:
            raise ConfigError(
                "num_epochs and num_minibatches must be positive, got "
                f"{self.num_epochs} and {self.num_minibatches}"
            )
        if self.learning_rate <= 0 or self.epsilon <= 0 or self.max_grad_norm < 0:
            raise ConfigError(
                "learning_rate and epsilon must be positive and max_grad_norm not negative, got "
                f"{self.learning_rate}, {self.epsilon} and {self.max_grad_norm}"
            )


def make_optimizer(config: LearnerConfig) -> optax.GradientTransformation:
    """Clip, then adam or rmsprop, on one flat vector of all parameters.

    Flat, because a small network has many small arrays, and an operation for each costs more than
    its arithmetic.
    """
    rate = config.learning_rate
    if config.optimizer == "adam":
        scale = optax.adam(rate, eps=config.epsilon)
    else:
        scale = optax.rmsprop(rate, decay=0.99, eps=config.epsilon, eps_in_sqrt=True)
    norm = config.max_grad_norm
    clip = optax.clip_by_global_norm(norm) if norm else optax.identity()
    return optax.flatten(optax.chain(clip, scale))


def shuffle(key: Array, items: int, minibatches: int, device_index: Array | int) -> Array:
    """Which items make up which minibatch: ``[minibatches, items / minibatches]`` indices.

    The shuffle is stratified: of every run of ``minibatches`` neighbouring items, one goes to each
    minibatch, drawn by a key that depends on the run's *global* number. So a minibatch over all
    devices holds the same items however they are spread, which a permutation of each device's items
    would not; it is even over time and environments; and it costs no sort of the whole batch, which
    takes a quarter of an update on a CPU (see benchmarks/README.md).

    Args:
      key: the same on all devices.
      items: on this device, a multiple of ``minibatches``.
      minibatches: how many.
      device_index: where this device's items stand among all.
    """
    runs = items // minibatches
    ids = device_index * runs + jnp.arange(runs)
    bits = jax.vmap(lambda i: jax.random.bits(jax.random.fold_in(key, i), (minibatches,)))(ids)
    order = jnp.argsort(bits, axis=1)
    return (jnp.arange(runs)[:, None] * minibatches + order).T


def make_schedule(config: LearnerConfig, num_updates: int, batch: int) -> optax.Schedule:
    """What the learning rate is multiplied by in update n, see ``LearnerConfig``.

    By the number of the *update*: an optimizer's own count stands still where a loss asks to skip
    gradient steps.

    Args:
      config: of the learner.
      num_updates: of the run.
      batch: transitions of a gradient step, over all devices.
    """
    factor = (batch / (config.reference_batch or batch)) ** BATCH_RULES[config.batch_rule]
    fall = (
        optax.linear_schedule(factor, 0.0, max(1, num_updates - config.warmup))
        if config.anneal
        else optax.constant_schedule(factor)
    )
    if not config.warmup:
        return fall
    # The first update learns already: it is the end of a step that has begun at 0.
    step = factor / config.warmup
    rise = optax.linear_schedule(step, factor, max(1, config.warmup - 1))
    return optax.join_schedules([rise, fall], [config.warmup])


# Train state, and whether a loss has asked to skip the rest of this update.
Progress = tuple[TrainState, Array]
GradientStep = Callable[[Progress, ArrayTree, Array], tuple[Progress, Metrics]]


def _make_gradient_step(
    agent: Agent,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    all_mean: Mean,
) -> GradientStep:
    """``(progress, batch, key) -> (progress, metrics)``, one step of the optimizer."""

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
      agent: what to learn.
      optimizer: as ``make_optimizer`` makes it.
      config: epochs and minibatches.
      schedule: ``(update) -> factor`` of the learning rate.
      all_mean: the mean of a tree over devices; called once a gradient step, with gradients and
        metrics together.
      device_index: this device's number.
      update_target: ``(params, target, step) -> target``, as optax's ``incremental_update`` and
        ``periodic_update`` do it; agents without a target keep their ``()``.

    Returns:
      ``(train_state, trajectory, key) -> (train_state, metrics)``; metrics are means over gradient
      steps. ``key`` is the same on all devices.
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
