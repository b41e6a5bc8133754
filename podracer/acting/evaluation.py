"""Evaluation in environments written in JAX: a fixed number of whole episodes, capped in length."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct

from podracer.acting import unroll
from podracer.acting.statistics import Episodes, track
from podracer.acting.unroll import RolloutState
from podracer.config import EvaluationConfig
from podracer.distributed import mesh as mesh_lib
from podracer.types import Agent, Array, Environment, Weights


class EvaluationState(struct.PyTreeNode):
    """One unfinished episode in each of B environments.

    Attributes:
      count: ``[]`` int32, steps taken.
      rollout: the environments and the agent's carry.
      played: the outcome of each episode so far.
    """

    count: Array
    rollout: RolloutState
    played: Episodes


def begin(env: Environment, agent: Agent, key: Array, ids: Array) -> EvaluationState:
    """Begins an episode in each of the environments ``ids [B]``."""
    zeros = jnp.zeros(ids.shape)
    nothing = Episodes(zeros, zeros, jnp.zeros(ids.shape, bool))
    rollout = unroll.reset(env, agent, jax.random.fold_in(key, 0), ids)
    return EvaluationState(jnp.int32(0), rollout, nothing)


def running(config: EvaluationConfig, state: EvaluationState) -> Array:
    """Whether an episode is unfinished.

    One step more than the cap is taken: an episode that is truncated at the cap shows this one step
    later, where the next episode begins. Nothing else of that step counts.
    """
    return (state.count <= config.max_steps) & ~state.played.complete.all()


def advance(
    env: Environment,
    agent: Agent,
    config: EvaluationConfig,
    weights: Weights,
    key: Array,
    state: EvaluationState,
) -> EvaluationState:
    """Takes one step in every environment."""
    count, now, played = state.count, state.rollout, state.played
    act_key, env_key = unroll.env_keys(jax.random.fold_in(key, count + 1), now.env_id, 2)
    carry, action, _ = agent.act(weights, now.carry, now.timestep, act_key, greedy=config.greedy)
    env_state, timestep = jax.vmap(env.step)(env_key, now.env_state, action)
    episode, total, ended = track(now.episode, timestep)
    rollout = RolloutState(now.env_id, env_state, timestep, carry, episode)
    late = count == config.max_steps
    played = Episodes(
        jnp.where(played.complete | late, played.ret, total.ret),
        jnp.where(played.complete | late, played.length, total.length),
        played.complete | (ended & (~late | (timestep.discount == 1))),
    )
    return EvaluationState(count + 1, rollout, played)


def play(
    env: Environment,
    agent: Agent,
    weights: Weights,
    key: Array,
    ids: Array,
    config: EvaluationConfig,
) -> Episodes:
    """Plays one episode in each environment ``ids [B]``, until all have ended or are capped."""
    step = partial(advance, env, agent, config, weights, key)
    return jax.lax.while_loop(partial(running, config), step, begin(env, agent, key, ids)).played


def make_evaluation(
    env: Environment, agent: Agent, num_devices: int, config: EvaluationConfig
) -> Callable[[Weights, Array], Episodes]:
    """``(weights, key) -> Episodes`` as each of ``num_devices`` devices runs it: each plays a share
    of the episodes, and gets all of them."""
    env = env.evaluation or env
    share = -(-config.episodes // num_devices)

    def evaluate(weights: Weights, key: Array) -> Episodes:
        ids = mesh_lib.device_index() * share + jnp.arange(share)
        played = mesh_lib.all_gather(play(env, agent, weights, key, ids, config))
        return jax.tree.map(lambda x: x[: config.episodes], played)

    return evaluate
