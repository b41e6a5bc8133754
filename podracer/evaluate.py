"""Judging a policy: a fixed number of whole episodes, with a cap on their length."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from podracer import mesh as mesh_lib
from podracer import returns, rollout
from podracer.config import EvaluationConfig
from podracer.types import Agent, Array, Environment, Weights


class Episodes(NamedTuple):
    """What became of each episode, ``[episodes]``; of capped ones, up to the cap.

    Attributes:
      ret: undiscounted return.
      length: steps.
      complete: bool, the episode came to its end.
    """

    ret: Array
    length: Array
    complete: Array


def play(
    env: Environment,
    agent: Agent,
    weights: Weights,
    key: Array,
    ids: Array,
    config: EvaluationConfig,
) -> Episodes:
    """One episode of each environment ``ids [B]``, all at once, until the last one is over."""

    def running(state: tuple) -> Array:
        step, _, episodes = state
        return (step < config.max_steps) & ~episodes.complete.all()

    def step(state: tuple) -> tuple:
        count, now, done = state
        act_key, env_key = rollout.env_keys(jax.random.fold_in(key, count + 1), ids, 2)
        carry, action, _ = agent.act(
            weights, now.carry, now.timestep, act_key, greedy=config.greedy
        )
        env_state, timestep = jax.vmap(env.step)(env_key, now.env_state, action)
        episode, total, ended = returns.track(now.episode, timestep)
        now = rollout.RolloutState(ids, env_state, timestep, carry, episode)
        done = Episodes(
            jnp.where(done.complete, done.ret, total.ret),
            jnp.where(done.complete, done.length, total.length),
            done.complete | ended,
        )
        return count + 1, now, done

    start = rollout.init(env, agent, jax.random.fold_in(key, 0), ids)
    zeros = jnp.zeros(ids.shape)
    nothing = Episodes(zeros, zeros, jnp.zeros(ids.shape, bool))
    return jax.lax.while_loop(running, step, (jnp.int32(0), start, nothing))[2]


def make_evaluate(
    env: Environment, agent: Agent, mesh: jax.sharding.Mesh, config: EvaluationConfig
) -> Callable[[Weights, Array], Episodes]:
    """``(weights, key) -> Episodes``, to be jitted; episodes are spread over all devices.

    A next-step autoreset begins an episode that has been truncated one step late: ``returns.track``
    counts no such step.
    """
    per_device = -(-config.episodes // mesh.size)

    def local(weights: Weights, key: Array) -> Episodes:
        ids = mesh_lib.device_index() * per_device + jnp.arange(per_device)
        return mesh_lib.all_gather(play(env, agent, weights, key, ids, config))

    replicated = mesh_lib.REPLICATED
    spread = mesh_lib.per_device(local, mesh, (replicated, replicated), replicated)

    def evaluate(weights: Weights, key: Array) -> Episodes:
        return jax.tree.map(lambda x: x[: config.episodes], spread(weights, key))

    return evaluate
