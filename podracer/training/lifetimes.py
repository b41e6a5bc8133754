"""Lives of agents in worlds of their own, in which an update rule is learned and evaluated."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from podracer.acting import unroll
from podracer.acting.statistics import EpisodeSums
from podracer.acting.unroll import RolloutState
from podracer.agents import lpg
from podracer.config import Config
from podracer.envs import grid_worlds
from podracer.envs.grid_worlds import Family, World
from podracer.errors import ConfigError
from podracer.learning.learner import Losses, make_update
from podracer.learning.optimizer import make_optimizer, make_schedule
from podracer.training import builder
from podracer.types import Agent, Array, ArrayTree, Devices, Params, TrainState, Trajectory


class Member(struct.PyTreeNode):
    """An agent and its world.

    Attributes:
      train: what it has learned, without the rule that it learns by.
      rollout: its environments.
      world: the world that all of them are copies of.
      values: ``[states]``, see ``lpg.learn_values``.
      age: ``[]`` int32, updates that it has lived for.
    """

    train: TrainState
    rollout: RolloutState
    world: World
    values: Array
    age: Array


class Experienced(NamedTuple):
    """What an update learns from.

    Attributes:
      trajectory: the experience.
      advantage: ``[T, B]``, of its actions.
      episodes: sums over the episodes that ended in it.
    """

    trajectory: Trajectory
    advantage: Array
    episodes: EpisodeSums


class Lives(NamedTuple):
    """How agents live, as functions.

    Attributes:
      born: ``(key) -> Member``, a new agent in a new world. All agents begin with the same weights,
        which hardly prefer an action.
      act: ``(member, key) -> (member, experience)``, an unroll, from which values are learned.
      update: ``(member, rule, experience, key) -> (member, losses)``.
    """

    born: Callable[[Array], Member]
    act: Callable[[Member, Array], tuple[Member, Experienced]]
    update: Callable[[Member, ArrayTree, Experienced, Array], tuple[Member, Losses]]


def make_lives(config: Config, family: Family, agent: Agent) -> Lives:
    """How an agent learns and acts in the worlds of a family.

    Args:
      config: the run's configuration; ``num_envs`` and the optimizer are those of each agent.
      family: the worlds.
      agent: the agent, whose observations are those of the family.
    """
    optimizer = make_optimizer(config.optimization, agent)
    schedule = make_schedule(
        config.optimization, config.lpg.lifetime, config.gradient_steps.transitions
    )
    learn = make_update(agent, optimizer, schedule=schedule, devices=Devices())

    def born(key: Array) -> Member:
        world_key, env_key = jax.random.split(key)
        world = family.draw(world_key)
        weights = agent.init(jax.random.key(builder.WEIGHTS))
        train = TrainState(weights, (), optimizer.init(weights.params), jnp.int32(0))
        envs = unroll.reset(family.environment(world), agent, env_key, jnp.arange(config.num_envs))
        return Member(train, envs, world, jnp.zeros(family.states), jnp.int32(0))

    def act(member: Member, key: Array) -> tuple[Member, Experienced]:
        # The gradient of what an agent meets is that of ``lpg.rule_loss``, not of its simulation.
        envs, trajectory, episodes = unroll.unroll(
            family.environment(member.world),
            agent,
            jax.lax.stop_gradient(member.train.weights),
            member.rollout,
            key,
            config.unroll_length,
        )
        values, advantage = lpg.learn_values(member.values, trajectory, config.settings, config.lpg)
        member = member.replace(rollout=envs, values=values)
        return member, Experienced(trajectory, advantage, episodes)

    def update(
        member: Member, rule: ArrayTree, experienced: Experienced, key: Array
    ) -> tuple[Member, Losses]:
        train = member.train.replace(target=rule)
        train, _, metrics = learn(train, (), experienced.trajectory, key)
        train = train.replace(target=member.train.target)
        return member.replace(train=train, age=member.age + 1), metrics.losses

    return Lives(born, act, update)


def live(
    lives: Lives, member: Member, rule: ArrayTree, key: Array, updates: int
) -> tuple[Member, tuple[Losses, EpisodeSums]]:
    """Lets an agent live for some updates; metrics of each, ``[updates]``.

    Args:
      lives: how it lives.
      member: the agent.
      rule: the rule that it learns by, ``()`` for an agent with a rule of its own.
      key: random key of these updates.
      updates: their number.
    """

    def one(member: Member, i: Array) -> tuple[Member, tuple[Losses, EpisodeSums]]:
        act_key, update_key = jax.random.split(jax.random.fold_in(key, i))
        member, experienced = lives.act(member, act_key)
        member, losses = lives.update(member, rule, experienced, update_key)
        return member, (losses, experienced.episodes)

    return jax.lax.scan(one, member, jnp.arange(updates))


def whole_lives(lives: Lives, rule: ArrayTree, keys: Array, lifetime: int) -> EpisodeSums:
    """The episodes of agents over their lives, ``[agents, lifetime]``: one for each key."""

    def whole(key: Array) -> EpisodeSums:
        born_key, life_key = jax.random.split(key)
        _, (_, episodes) = live(lives, lives.born(born_key), rule, life_key, lifetime)
        return episodes

    return jax.vmap(whole)(keys)


# Settings without a meaning where a rule is learned.
UNUSED = (
    "env_params",
    "observed",
    "num_seeds",
    "sweep",
    "agents_at_once",
    "averaging",
    "stagger",
    "normalize_observations",
    "normalize_rewards",
)


class Learned(NamedTuple):
    """What it takes to learn a rule.

    Attributes:
      agent: the agent that learns by it.
      lives: how it lives.
      init: ``(key) ->`` the parameters of a rule.
      rule_loss: ``(params, experience, losses) -> lpg.RuleLoss``, see ``lpg.rule_loss``.
    """

    agent: Agent
    lives: Lives
    init: Callable[[Array], Params]
    rule_loss: Callable[[Params, Experienced, Losses], lpg.RuleLoss]


def make_learned(config: Config) -> Learned:
    """What it takes to learn the rule of a config.

    Raises:
      ConfigError: the environment is not a family of grid worlds, or a setting has no meaning here.
    """
    family, default = make_family(config), Config()
    changed = [name for name in UNUSED if getattr(config, name) != getattr(default, name)]
    if changed:
        raise ConfigError(
            f"{', '.join(changed)}: not for learning an update rule, whose agents act in grid "
            "worlds as they are; leave them at their defaults"
        )
    agent = lpg.make(family.spec, config.settings, config.lpg, Devices())
    network = lpg.make_network(family.spec, config.settings, config.lpg)

    def rule_loss(params: Params, experienced: Experienced, losses: Losses) -> lpg.RuleLoss:
        return lpg.rule_loss(
            network, params, experienced.trajectory, experienced.advantage, losses, config.lpg
        )

    lives = make_lives(config, family, agent)
    return Learned(agent, lives, lpg.make_rule(config.lpg).init, rule_loss)


def make_family(config: Config) -> Family:
    """The worlds that agents of a config live in.

    Raises:
      ConfigError: the environment is not a family of grid worlds.
    """
    suite, _, name = config.env.partition(":")
    if suite != "grid":
        raise ConfigError(
            f"env={config.env!r}: update rules are learned in grid worlds, such as 'grid:5x5'"
        )
    return grid_worlds.parse(name, config.env_kwargs)
