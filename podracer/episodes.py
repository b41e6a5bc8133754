"""Judging a policy: a fixed number of whole episodes, with a cap on their length."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from podracer import mesh as mesh_lib
from podracer import returns, rollout
from podracer.config import EvaluationConfig
from podracer.envs import spaces
from podracer.rollout import HostState, RolloutState
from podracer.types import Agent, Array, Environment, HostEnvironment, Pool, TimeStep, Weights


class Episodes(NamedTuple):
    """What became of each episode, ``[episodes]``; of capped ones, up to the cap.

    Attributes:
      ret: undiscounted return.
      length: steps.
      complete: bool, the episode came to its end.
    """

    ret: Any
    length: Any
    complete: Any


class Playing(struct.PyTreeNode):
    """One episode of each of B environments, under way.

    Attributes:
      count: ``[]`` int32, steps taken.
      now: where environments and agent are.
      done: what became of the episodes so far.
    """

    count: Array
    now: RolloutState
    done: Episodes


def begin(env: Environment, agent: Agent, key: Array, ids: Array) -> Playing:
    """The first observations of environments ``ids [B]``."""
    zeros = jnp.zeros(ids.shape)
    nothing = Episodes(zeros, zeros, jnp.zeros(ids.shape, bool))
    now = rollout.init(env, agent, jax.random.fold_in(key, 0), ids)
    return Playing(jnp.int32(0), now, nothing)


def running(config: EvaluationConfig, playing: Playing) -> Array:
    """Whether there is more to play.

    One step more than the cap is taken: that an episode was truncated shows one step later, where
    the next one begins. Nothing else of that step counts.
    """
    return (playing.count <= config.max_steps) & ~playing.done.complete.all()


def advance(
    env: Environment,
    agent: Agent,
    config: EvaluationConfig,
    weights: Weights,
    key: Array,
    playing: Playing,
) -> Playing:
    """Takes one step in every environment."""
    count, now, done = playing.count, playing.now, playing.done
    act_key, env_key = rollout.env_keys(jax.random.fold_in(key, count + 1), now.env_id, 2)
    carry, action, _ = agent.act(weights, now.carry, now.timestep, act_key, greedy=config.greedy)
    env_state, timestep = jax.vmap(env.step)(env_key, now.env_state, action)
    episode, total, ended = returns.track(now.episode, timestep)
    now = RolloutState(now.env_id, env_state, timestep, carry, episode)
    late = count == config.max_steps
    done = Episodes(
        jnp.where(done.complete | late, done.ret, total.ret),
        jnp.where(done.complete | late, done.length, total.length),
        done.complete | (ended & (~late | (timestep.discount == 1))),
    )
    return Playing(count + 1, now, done)


def play(
    env: Environment,
    agent: Agent,
    weights: Weights,
    key: Array,
    ids: Array,
    config: EvaluationConfig,
) -> Episodes:
    """One episode of each environment ``ids [B]``, all at once, until the last one is over."""
    step = partial(advance, env, agent, config, weights, key)
    return jax.lax.while_loop(partial(running, config), step, begin(env, agent, key, ids)).done


def make_evaluate(
    env: Environment, agent: Agent, mesh: jax.sharding.Mesh, config: EvaluationConfig
) -> Callable[[Weights, Array], Episodes]:
    """``(weights, key) -> Episodes``, to be jitted; episodes are spread over all devices."""
    per_device = -(-config.episodes // mesh.size)

    def local(weights: Weights, key: Array) -> Episodes:
        ids = mesh_lib.device_index() * per_device + jnp.arange(per_device)
        return mesh_lib.all_gather(play(env, agent, weights, key, ids, config))

    replicated = mesh_lib.REPLICATED
    spread = mesh_lib.per_device(local, mesh, (replicated, replicated), replicated)

    def evaluate(weights: Weights, key: Array) -> Episodes:
        return jax.tree.map(lambda x: x[: config.episodes], spread(weights, key))

    return evaluate


class HostEvaluation:
    """Evaluation on environments of the host: one episode of each environment of a pool.

    The pool is built when it is first needed, and kept. One that fails is not rebuilt: an
    evaluation has nothing to cut.
    """

    def __init__(
        self,
        env: HostEnvironment,
        agent: Agent,
        config: EvaluationConfig,
        make_pool: Callable[[], Pool],
        ids: np.ndarray | None = None,
    ):
        """``make_pool`` builds a pool of the episodes ``ids``; of all, if none are named."""
        self._config, self._make_pool = config, make_pool
        self._pool: Pool | None = None
        self._ids = np.arange(config.episodes, dtype=np.int32) if ids is None else ids

        def act(weights: Weights, state: HostState, key: Array, count: Array):
            keys = rollout.env_keys(jax.random.fold_in(key, count), state.env_id, 1)[0]
            carry, action, _ = agent.act(
                weights, state.carry, state.timestep, keys, greedy=config.greedy
            )
            action = spaces.to_environment(action, env.spec.action)
            return state.replace(carry=carry), action

        def arrive(state: HostState, sent: TimeStep) -> HostState:
            before = state.timestep.observation
            return state.replace(timestep=rollout.host_arrive(env, before, sent))

        self._expected = rollout.sent_shapes(env, len(self._ids))
        self._start = jax.jit(partial(rollout.host_start, env, agent))
        self._arrive = jax.jit(arrive, donate_argnums=0)
        self._act = jax.jit(act, donate_argnums=1)

    def __call__(self, weights: Weights, key: Array, beat: Callable[[str], None]) -> Episodes:
        """Plays.

        Args:
          weights: on the device to act on.
          key: on that device.
          beat: told what is done next; it may raise.
        """
        beat("building its pool")
        self._pool = self._pool or self._make_pool()
        step = self._pool.reset()
        rollout.check_sent(step.timestep, self._expected)
        device = key.device
        state = self._start(*jax.device_put((self._ids, step.timestep), device))
        ret = np.zeros(len(self._ids))
        length = np.zeros(len(self._ids))
        complete = np.zeros(len(self._ids), bool)
        for count in range(self._config.max_steps):
            state, action = self._act(weights, state, key, jax.device_put(np.int32(count), device))
            beat("stepping its pool")
            step = self._pool.step(np.asarray(action))
            rollout.check_sent(step.timestep, self._expected)
            ret += np.where(complete, 0, step.score)
            length += ~complete & ~step.timestep.first
            complete |= step.over
            if complete.all():
                break
            state = self._arrive(state, jax.device_put(step.timestep, device))
        return Episodes(ret, length, complete)

    def close(self) -> None:
        """Lets go of the pool."""
        if self._pool is not None:
            self._pool.close()
