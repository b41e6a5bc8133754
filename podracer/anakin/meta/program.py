"""The compiled program that learns an update rule: agents that live, and the gradient of the rule.

https://arxiv.org/abs/2007.08794. In each step of the rule, every agent learns for a
few updates, then acts with its new weights; the gradient of the policy loss on this last experience
goes back through the updates to the rule. Agents live on from step to step, but gradients are cut.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct

from podracer.acting.statistics import Episodes, EpisodeSums
from podracer.config import Config
from podracer.config.sizes import Sizes, make_meta_sizes
from podracer.distributed import mesh as mesh_lib
from podracer.learning import learner
from podracer.learning.optimizer import make_optimizer
from podracer.training import builder, lifetimes, memory
from podracer.training.lifetimes import Lives, Member
from podracer.training.memory import StateMemory
from podracer.training.rows import CallMetrics
from podracer.types import Agent, Array, ArrayTree, Device, TrainState, Weights

# Folded into the key of an agent's step of the rule, for each use of it.
LIVE, VALIDATE, BIRTH = range(3)
# The share of a lifetime whose episodes say what an agent has learned in the end.
LAST = 0.2


class MetaState(struct.PyTreeNode):
    """All state of a run that learns a rule, which is what a checkpoint holds.

    Attributes:
      train: the rule, in place of an agent's parameters, and its optimizer.
      source: ``()``: nothing is kept of an agent's experience.
      key: the run's random key.
      members: the agents, which are the first axis, spread over devices.
    """

    train: TrainState
    source: ArrayTree
    key: Array
    members: Member


class MetaProgram(NamedTuple):
    """The jitted functions of a run.

    Attributes:
      init: ``(key) -> MetaState``.
      step: ``(MetaState) -> (MetaState, CallMetrics)``, ``updates_per_call`` steps of the rule. The
        state is donated.
      evaluate: ``(MetaState) -> Episodes``: the mean return at the end of its life, for each of
        ``evaluation.episodes`` agents in worlds of their own, the same in all evaluations.
      agent: the agent that the rule is learned for.
      sizes: the numbers that follow from the configuration; an update is a step of the rule.
      mesh: the mesh over all devices.
      state: shapes and shardings of the state.
    """

    init: jax.stages.Wrapped
    step: jax.stages.Wrapped
    evaluate: jax.stages.Wrapped
    agent: Agent
    sizes: Sizes
    mesh: jax.sharding.Mesh
    state: MetaState

    @property
    def devices(self) -> list[Device]:
        """The devices of the mesh."""
        return list(self.mesh.devices.flat)

    @property
    def memory(self) -> StateMemory:
        """The memory of the state."""
        return memory.measure(self.agent.source, self.state, self.mesh)

    @property
    def layout(self) -> dict[str, str]:
        """What runs on which devices, in words."""
        device, agents = self.devices[0], self.state.members.age.shape[0]
        return {
            "devices": f"{self.mesh.size} x {device.device_kind} ({device.platform})",
            "agents": f"{agents:,} = {self.mesh.size} x {agents // self.mesh.size:,}",
            "environments": f"{self.sizes.num_envs:,}, for each agent",
        }


def make_objective(lives: Lives, rule_loss: Callable[..., Any], updates: int):
    """``(rule, member, key) -> (objective, (member, losses, episodes))`` of one agent.

    Args:
      lives: how agents live.
      rule_loss: ``(params, experienced, losses) -> lpg.RuleLoss``.
      updates: updates that the gradient goes through.
    """

    def objective(rule: ArrayTree, member: Member, key: Array):
        live_key, validation_key = (jax.random.fold_in(key, i) for i in (LIVE, VALIDATE))
        member, (losses, episodes) = lifetimes.live(lives, member, rule, live_key, updates)
        member, last = lives.act(member, validation_key)
        losses = jax.tree.map(jnp.mean, losses)
        validation = rule_loss(member.train.weights.params, last, losses)
        episodes = jax.tree.map(lambda x, y: x.sum() + y, episodes, last.episodes)
        return validation.total, (member, {**losses, "validation": validation.policy}, episodes)

    return objective


def make_gradient(objective: Callable[..., Any], max_norm: float) -> Callable[..., Any]:
    """``(rule, members, keys) -> (gradient, clipped, values)``; agents are the first axis of
    ``members``, ``keys`` and ``values``.

    The gradient is the mean over agents, each clipped by its own norm: where the updates of one
    have become chaotic, its gradient is large and says nothing, and must not outweigh the others.
    ``clipped`` is the share of agents for which this made a difference.

    Args:
      objective: see ``make_objective``; its values of each agent are returned.
      max_norm: the largest norm of an agent's gradient.
    """
    of_each = jax.vmap(jax.value_and_grad(objective, has_aux=True), in_axes=(None, 0, 0))

    def gradient(rule: ArrayTree, members: Member, keys: Array):
        values, grads = of_each(rule, members, keys)
        total, clipped = optax.per_example_global_norm_clip(grads, max_norm)
        agents = len(keys)
        return jax.tree.map(lambda x: x / agents, total), clipped / agents, values

    return gradient


def make_step(
    lives: Lives,
    rule_loss: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    config: Config,
    sizes: Sizes,
) -> Callable[[MetaState], tuple[MetaState, CallMetrics]]:
    """``(MetaState) -> (MetaState, CallMetrics)`` as each device runs it, for its own agents."""
    settings = config.lpg
    objective = make_objective(lives, rule_loss, settings.updates)
    gradient = make_gradient(objective, settings.max_grad_norm)

    def renewed(member: Member, key: Array) -> Member:
        """A new agent in place of one whose life has ended."""
        new = lives.born(jax.random.fold_in(key, BIRTH))
        return jax.tree.map(partial(jnp.where, member.age >= settings.lifetime), new, member)

    def one_step(state: MetaState, _: None) -> tuple[MetaState, tuple[Any, EpisodeSums]]:
        train = state.train
        key = builder.update_keys(state.key, train.step)[0]
        own = mesh_lib.own_agents(jnp.arange(settings.agents))
        keys = jax.vmap(partial(jax.random.fold_in, key))(own)
        members = jax.vmap(renewed)(state.members, keys)
        rule = train.weights.params
        grads, clipped, (each, aux) = gradient(rule, members, keys)
        members, losses, episodes = aux
        # Each device has as many agents, so the mean of their means is that of all.
        one = jax.tree.map(lambda x: x[None], (grads, clipped))
        grads, clipped = jax.tree.map(lambda x: x.mean(0), mesh_lib.gather_agents(one))
        updates, opt_state = optimizer.update(grads, train.opt_state, rule)
        weights = train.weights.replace(params=optax.apply_updates(rule, updates))
        train = train.replace(weights=weights, opt_state=opt_state, step=train.step + 1)
        seen = mesh_lib.gather_agents((each, losses, episodes, members.age))
        of_rule = {"grad_norm": optax.tree.norm(grads), "agents/clipped": clipped}
        metrics = _metrics(seen, of_rule, settings.lifetime)
        return state.replace(train=train, members=members), metrics

    def step(state: MetaState) -> tuple[MetaState, CallMetrics]:
        state, (losses, episodes) = jax.lax.scan(one_step, state, length=sizes.updates_per_call)
        return state, CallMetrics(learner.Metrics(losses, {}), episodes)

    return step


def _metrics(
    seen: Any, of_rule: dict[str, Array], lifetime: int
) -> tuple[dict[str, Array], EpisodeSums]:
    """The metrics of a step of the rule, of what all agents have seen in it."""
    each, losses, episodes, age = seen
    late = age > (1 - LAST) * lifetime
    last = (late * episodes.ret).sum() / jnp.maximum((late * episodes.episodes).sum(), 1.0)
    means = jax.tree.map(jnp.mean, losses)
    # The agents' own gradients and losses are another thing than the rule's.
    means = {f"agents/{name}": x for name, x in means.items() if name != "validation"}
    found = {"total": each.mean(), "validation": losses["validation"].mean(), **of_rule}
    episodes = jax.tree.map(jnp.sum, episodes)
    return {**found, **means, "agents/last_return": last}, episodes


def make_evaluate(lives: Lives, config: Config) -> Callable[[MetaState], Episodes]:
    """``(MetaState) -> Episodes``, see ``MetaProgram``."""
    lifetime = config.lpg.lifetime
    last = max(1, round(LAST * lifetime))

    def evaluate(state: MetaState) -> Episodes:
        key = jax.random.fold_in(state.key, builder.EVALUATION)
        keys = jax.random.split(key, config.evaluation.episodes)
        lived = lifetimes.whole_lives(lives, state.train.weights.params, keys, lifetime)
        count, total, length = (x[:, -last:].sum(1) for x in lived)
        some = jnp.maximum(count, 1.0)
        return Episodes(total / some, length / some, count > 0)

    return evaluate


def make_program(config: Config, num_devices: int, mesh: jax.sharding.Mesh) -> MetaProgram:
    """Builds a run's program.

    Args:
      config: the run's configuration.
      num_devices: number of devices, which divides the number of agents.
      mesh: the mesh over all devices, each of which is a group.
    """
    kind = lifetimes.make_learned(config)
    agent, lives = kind.agent, kind.lives
    settings, sizes = config.lpg, make_meta_sizes(config, num_devices)
    # The gradient is clipped agent by agent, see ``make_gradient``.
    rates = {"learning_rate": settings.learning_rate, "max_grad_norm": 0.0}
    optimizer = make_optimizer(
        dataclasses.replace(config.optimization, optimizer="adam", **rates), agent
    )

    def init(key: Array) -> MetaState:
        params = kind.init(jax.random.fold_in(key, builder.WEIGHTS))
        train = TrainState(Weights(params, ()), (), optimizer.init(params), jnp.int32(0))
        own = mesh_lib.own_agents(jnp.arange(settings.agents))
        env_key = jax.random.fold_in(key, builder.ENVIRONMENTS)
        keys = jax.vmap(partial(jax.random.fold_in, env_key))(own)
        # As if they had been born one after another: there are agents of all ages at any time.
        steps = settings.lifetime // settings.updates
        age = own * steps // settings.agents * settings.updates
        members = jax.vmap(lives.born)(keys).replace(age=age)
        return MetaState(train, (), key, members)

    rest: Any = mesh_lib.REPLICATED
    agents: Any = mesh_lib.AGENTS
    specs: Any = MetaState(rest, rest, rest, agents)
    step = make_step(lives, kind.rule_loss, optimizer, config, sizes)
    jitted_init = jax.jit(mesh_lib.per_device(init, mesh, mesh_lib.REPLICATED, specs))
    return MetaProgram(
        init=jitted_init,
        step=jax.jit(
            mesh_lib.per_device(step, mesh, (specs,), (specs, mesh_lib.REPLICATED)),
            donate_argnums=0,
        ),
        evaluate=jax.jit(
            mesh_lib.per_device(make_evaluate(lives, config), mesh, (specs,), mesh_lib.REPLICATED)
        ),
        agent=agent,
        sizes=sizes,
        mesh=mesh,
        state=mesh_lib.sharded_shapes(
            jax.eval_shape(jitted_init, jax.random.key(config.seed)), mesh, specs
        ),
    )
