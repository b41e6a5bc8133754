"""Learned policy gradient (LPG), https://arxiv.org/abs/2007.08794: an agent whose update rule is a
network, and the objective by which that network is learned.

An agent has a policy and predicts a distribution over categories that mean nothing at first. From
its experience, a rule says by how much the log-probability of each action should rise, and what
should have been predicted. The loss reads the rule in place of a target network, so learning with a
given rule and differentiating through that learning call the same functions.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from podracer.agents import actor_critic, returns, unrolls
from podracer.agents.settings import Settings
from podracer.errors import ConfigError
from podracer.learning import rollout
from podracer.nets import actor_critic as nets
from podracer.nets.heads import CategoricalHead
from podracer.nets.update_rule import Experience, UpdateRule, make_update_rule
from podracer.types import (
    Agent,
    Array,
    ArrayTree,
    Devices,
    Discrete,
    LossAux,
    Params,
    Spec,
    TimeStep,
    TrainState,
    Trajectory,
)


@dataclasses.dataclass(frozen=True)
class Config:
    """Learning an update rule (``python -m podracer.anakin.meta``); other commands ignore it.

    Attributes:
      predictions: number of categories that agents predict; 30 in the paper.
      units: units of the rule's LSTM; 256 in the paper.
      embedding: units of the layer that embeds predictions.
      prediction_cost: weight of the predictions in an agent's loss.
      agents: number of agents that live at the same time, each in a world of its own.
      lifetime: updates after which an agent is replaced by a new one in another world.
      updates: updates of each agent between two steps of the rule, through which the rule's
        gradient goes.
      learning_rate: of the rule, by adam.
      max_grad_norm: largest norm of an agent's share in the rule's gradient; a larger one is scaled
        down before the mean over agents. The default is close to the usual norm, which grows a
        hundredfold where the updates of an agent become chaotic.
      lambda_: lambda of the advantages (GAE) in the rule's objective.
      value_rate: how far the values in the rule's objective move to their targets in an update.
      policy_entropy: weight of the entropy of agents' policies in the rule's objective.
      prediction_entropy: likewise, of their predictions.
      policy_penalty: weight of the squared changes that the rule demands of policies.
    """

    predictions: int = 8
    units: int = 32
    embedding: int = 16
    prediction_cost: float = 0.5
    agents: int = 32
    lifetime: int = 100
    updates: int = 5
    learning_rate: float = 1e-3
    max_grad_norm: float = 0.1
    lambda_: float = 0.95
    value_rate: float = 0.5
    policy_entropy: float = 0.01
    prediction_entropy: float = 0.001
    policy_penalty: float = 0.02

    def __post_init__(self):
        sizes = ("predictions", "units", "embedding", "agents", "lifetime", "updates")
        for key in (*sizes, "learning_rate", "max_grad_norm"):
            if getattr(self, key) <= 0:
                raise ConfigError(f"lpg.{key} must be positive, got {getattr(self, key)}")
        if self.lifetime % self.updates:
            raise ConfigError(
                f"lpg.lifetime={self.lifetime} must be a multiple of lpg.updates={self.updates}: "
                "agents are replaced between two steps of the rule"
            )


def make_rule(config: Config) -> UpdateRule:
    """The rule as functions of its parameters."""
    return make_update_rule(config.predictions, config.units, config.embedding)


def make_network(spec: Spec, settings: Settings, config: Config) -> nets.Network:
    """Policy and predictions: the logits of the categories take the place of values."""
    if not isinstance(spec.action, Discrete):
        raise ConfigError(
            "a learned update rule reads the probabilities of actions, so they must be discrete, "
            f"but this environment has {spec.action}"
        )

    def head(size: int, **kwargs: Any) -> CategoricalHead:
        return CategoricalHead(size, Discrete(config.predictions), **kwargs)

    return nets.make_network(spec, settings.network, head)


def experience(timestep: TimeStep, log_prob: Array, log_y: Array, gamma: float) -> Experience:
    """What a rule knows of transitions. Where one is cut (see ``returns``), so is the rule's memory
    of what follows.

    Args:
      timestep: ``[T+1, B]``.
      log_prob: ``[T, B]``, log-probabilities of the actions.
      log_y: ``[T+1, B, m]``, log-probabilities of the predicted categories.
      gamma: the agent's discount factor.
    """
    valid = returns.valid(timestep)
    cut_next = jnp.concatenate([~valid[1:], jnp.zeros_like(valid[:1])])
    return Experience(
        jnp.where(valid, timestep.reward[1:], 0.0),
        timestep.discount[1:],
        jnp.asarray(gamma, jnp.float32),
        jnp.exp(log_prob),
        jnp.exp(log_y),
        timestep.first[1:] | cut_next,
    )


def make(spec: Spec, settings: Settings, config: Config, devices: Devices) -> Agent:
    """An agent that learns by the rule whose parameters take the place of its target network.

    Losses are means over batch and time, as in V-trace.

    Args:
      spec: observation and action spaces.
      settings: settings of every agent.
      config: settings of the rule.
      devices: the devices that learn.

    Raises:
      ConfigError: actions are continuous.
    """
    rule, network = make_rule(config), make_network(spec, settings, config)
    init, initial_carry, act = actor_critic.make_functions(spec, network, settings)
    preprocess = unrolls.make_preprocess(settings, devices.mean)

    def prepare(train_state: TrainState, trajectory: Trajectory) -> tuple[ArrayTree, ArrayTree]:
        trajectory, stats = preprocess(train_state, trajectory)
        steps = (trajectory.timestep, trajectory.action)
        return (trajectory.carry.network, unrolls.time_major(steps)), stats

    def loss(
        params: Params, train_state: TrainState, batch: ArrayTree, key: Array
    ) -> tuple[Array, LossAux]:
        del key
        carry, steps = batch
        timestep, action = unrolls.time_major(steps)

        def predict(params: Params) -> tuple[Any, Array, Array]:
            _, policy, logits = network.apply(params, carry, timestep.observation, timestep.first)
            distribution = network.distribution(policy[:-1])
            log_prob = jnp.asarray(distribution.log_prob(action))
            return distribution, log_prob, jax.nn.log_softmax(logits)

        distribution, log_prob, log_y = predict(params)
        valid = returns.valid(timestep)
        # The rule says where an agent should go; the agent does not change what the rule says. But
        # earlier updates do: ``stop_gradient`` would hide that from the gradient of the rule, which
        # would then never learn what should be predicted.
        _, old_log_prob, old_log_y = predict(train_state.weights.params)
        known = experience(timestep, old_log_prob, old_log_y, settings.discount)
        change, target = rule.apply(train_state.target, known)
        y = jnp.exp(log_y[:-1])
        kl = (y * (log_y[:-1] - jax.nn.log_softmax(target))).sum(-1)
        means = {
            name: (valid * x).mean()
            for name, x in {
                "policy": -change * log_prob,
                "prediction": kl,
                "entropy": distribution.entropy(),
                "prediction_entropy": -(y * log_y[:-1]).sum(-1),
                "change": change**2,
            }.items()
        }
        total = means["policy"] + config.prediction_cost * means["prediction"]
        return total, LossAux({"total": total, **means})

    source = rollout.make_source(prepare, settings.rollout, devices)
    return Agent(init, initial_carry, act, source, loss)


class RuleLoss(struct.PyTreeNode):
    """The rule's objective for an agent, ``[]`` each.

    Attributes:
      total: to be minimised.
      policy: the loss of the policy gradient, whose gradient estimates minus that of the return.
    """

    total: Array
    policy: Array


def rule_loss(
    network: nets.Network,
    weights: Params,
    trajectory: Trajectory,
    advantage: Array,
    learned: dict[str, Array],
    config: Config,
) -> RuleLoss:
    """The rule's loss, given the updates that led to an agent's weights: the policy gradient of
    what the agent does with them, with the paper's regularisers.

    Args:
      network: of the agent.
      weights: its parameters after the updates, as a function of the rule.
      trajectory: experience with these weights.
      advantage: ``[T, B]``, of its actions, 0 where invalid.
      learned: the metrics of the updates.
      config: settings of the rule.
    """
    timestep = trajectory.timestep
    _, policy, _ = network.apply(
        weights, trajectory.carry.network, timestep.observation, timestep.first
    )
    log_prob = network.distribution(policy[:-1]).log_prob(trajectory.action)
    loss = -(jax.lax.stop_gradient(advantage) * log_prob).mean()
    total = (
        loss
        - config.policy_entropy * learned["entropy"]
        - config.prediction_entropy * learned["prediction_entropy"]
        + config.policy_penalty * learned["change"]
    )
    return RuleLoss(total, loss)


def learn_values(
    values: Array, trajectory: Trajectory, settings: Settings, config: Config
) -> tuple[Array, Array]:
    """Learns the values in the rule's objective, one for each state: observations are one-hot.

    Args:
      values: ``[states]``.
      trajectory: experience of the agent.
      settings: settings of every agent.
      config: settings of the rule.

    Returns:
      The new values, and the advantages ``[T, B]`` by the old ones, 0 where invalid.
    """
    timestep = trajectory.timestep
    target = returns.gae(
        timestep, timestep.observation @ values, discount=settings.discount, lambda_=config.lambda_
    )
    seen = timestep.observation[:-1] * target.valid[..., None]
    error = (seen * target.advantage[..., None]).sum((0, 1)) / jnp.maximum(seen.sum((0, 1)), 1.0)
    return values + config.value_rate * error, target.valid * target.advantage
