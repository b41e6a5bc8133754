"""How gradients become weights: the optimizer, its learning rate and their settings."""

import dataclasses
from collections.abc import Hashable

import jax.numpy as jnp
import optax

from podracer.errors import ConfigError, unknown
from podracer.learning.scalars import is_on
from podracer.types import Agent, ArrayTree
from podracer.xla_cpu.raveling import ravel

OPTIMIZERS = ("adam", "rmsprop", "sgd")


# For each rule, the exponent of the ratio of the batch to the reference batch.
BATCH_RULES = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Settings of the optimizer.

    Attributes:
      optimizer: "adam", "rmsprop" (with epsilon inside the root, as in TensorFlow and IMPALA) or
        "sgd", without momentum.
      learning_rate: learning rate before ``batch_rule``, ``warmup`` and ``anneal``.
      anneal: whether the learning rate falls linearly to 0 over the run: from the first update on,
        even if that one has no gradient steps, or after the warm-up.
      warmup: number of updates, counted from the first one with gradient steps, over which the
        learning rate rises linearly.
      batch_rule: how the learning rate depends on the batch, that is, the transitions of a gradient
        step over all devices: not at all ("none"), or in proportion to the ratio of the batch to
        ``reference_batch`` ("linear", Goyal et al. 2017, https://arxiv.org/abs/1706.02677) or to
        the square root of that ratio ("sqrt", Malladi et al. 2022,
        https://arxiv.org/abs/2205.10287).
      reference_batch: the batch that ``learning_rate`` was tuned for; must be 0 if ``batch_rule``
        is "none".
      epsilon: the optimizer's epsilon, which prevents a division by zero; "sgd" has none.
      max_grad_norm: gradients whose global norm exceeds this one are scaled down to it, separately
        for each group of parameters; 0 turns clipping off.
    """

    optimizer: str
    learning_rate: float
    anneal: bool
    warmup: int
    batch_rule: str
    reference_batch: int
    epsilon: float
    max_grad_norm: float

    def __post_init__(self):
        if self.optimizer not in OPTIMIZERS:
            raise unknown("optimizer", self.optimizer, OPTIMIZERS)
        if self.batch_rule not in BATCH_RULES:
            raise unknown("batch_rule", self.batch_rule, BATCH_RULES)
        if self.warmup < 0:
            raise ConfigError(f"warmup must not be negative, got {self.warmup}")
        if (self.batch_rule != "none") != (self.reference_batch > 0):
            raise ConfigError(
                "reference_batch must be positive if batch_rule is 'linear' or 'sqrt', and 0 if it "
                f"is 'none'; got {self.reference_batch} and {self.batch_rule!r}"
            )
        if self.learning_rate <= 0 or self.epsilon <= 0 or self.max_grad_norm < 0:
            raise ConfigError(
                "learning_rate and epsilon must be positive and max_grad_norm not negative, got "
                f"{self.learning_rate}, {self.epsilon} and {self.max_grad_norm}"
            )


def make_optimizer(config: OptimizerConfig, agent: Agent) -> optax.GradientTransformation:
    """Gradient clipping, then the optimizer's rule, for each group of the agent's parameters.

    Each works on one flat vector of all parameters of its group. A small network has many small
    arrays, and an operation for each would cost more than its arithmetic.
    """
    if agent.labels is None:
        return _make_group(config, 1.0)
    groups: dict[Hashable, optax.GradientTransformation] = {
        name: _make_group(config, factor) for name, factor in agent.rates
    }
    return optax.partition(groups, agent.labels)


def _make_group(config: OptimizerConfig, factor: float) -> optax.GradientTransformation:
    """The optimizer of one group; ``factor`` multiplies the learning rate."""
    rate = config.learning_rate * factor
    if config.optimizer == "adam":
        scale = optax.adam(rate, eps=config.epsilon)
    elif config.optimizer == "sgd":
        scale = optax.sgd(rate)
    else:
        scale = optax.rmsprop(rate, decay=0.99, eps=config.epsilon, eps_in_sqrt=True)
    norm = config.max_grad_norm
    clip = optax.clip_by_global_norm(norm) if is_on(norm) else optax.identity()
    return _flattened(optax.chain(clip, scale))


def _flattened(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """``optax.flatten``, fast on CPUs."""

    def init(params: ArrayTree) -> ArrayTree:
        return inner.init(ravel(params)[0])

    def update(
        updates: ArrayTree, state: ArrayTree, params: ArrayTree | None = None
    ) -> tuple[ArrayTree, ArrayTree]:
        vector, unravel = ravel(updates)
        new, state = inner.update(vector, state, None if params is None else ravel(params)[0])
        return unravel(jnp.asarray(new)), state

    return optax.GradientTransformation(init, update)


def make_schedule(
    config: OptimizerConfig, num_updates: int, batch: int, begin: int = 0
) -> optax.Schedule:
    """The factor of the learning rate in update n, see ``OptimizerConfig``.

    It depends on the number of the *update*: an optimizer's own count does not advance where a loss
    asks to skip gradient steps.

    Args:
      config: settings of the optimizer.
      num_updates: number of updates of the run.
      batch: transitions of a gradient step, over all devices.
      begin: number of updates before the first one with gradient steps.
    """
    factor = (batch / (config.reference_batch or batch)) ** BATCH_RULES[config.batch_rule]
    end = begin + config.warmup if config.warmup else 0
    fall = (
        optax.linear_schedule(factor, 0.0, max(1, num_updates - end))
        if config.anneal
        else optax.constant_schedule(factor)
    )
    if not config.warmup:
        return fall
    # The rate of an update is the one at its end, so that the first update learns, too.
    step = factor / config.warmup
    rise = optax.linear_schedule(step, factor, max(1, config.warmup - 1), transition_begin=begin)
    return optax.join_schedules([rise, fall], [end])
