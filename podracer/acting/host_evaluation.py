"""Evaluation in host environments: the same number of episodes in each environment of a pool."""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import numpy as np

from podracer.acting import host_unroll
from podracer.acting.host_unroll import ActorState
from podracer.acting.statistics import Episodes, HostEpisodes
from podracer.acting.unroll import env_keys
from podracer.config import Config, EvaluationConfig
from podracer.config.sizes import cpu_cores
from podracer.envs import spaces
from podracer.types import Agent, Array, HostEnvironment, Pool, TimeStep, Weights


def pool_seeds(
    config: Config, env_ids: np.ndarray, generation: int, update: int = 0, num_hosts: int = 1
) -> list[int]:
    """Seeds of host environments; no two within a run are the same.

    The seeds of a run are consecutive numbers from a start that depends on the run's own seed and
    on the update at which it was started or resumed. Neighbouring run seeds therefore share none,
    and a resumed run does not repeat the games of an earlier start (up to a collision of random
    starts, whose probability is the number of seeds over 2^31).

    Args:
      config: the run's configuration.
      env_ids: global numbers of the environments; those of evaluation follow those of training.
      generation: how often the pool has been rebuilt.
      update: the update at which the run was started or resumed.
      num_hosts: hosts that evaluate, each of which may round its share of the episodes up.
    """
    total = config.environments + config.evaluation.episodes + num_hosts - 1
    start = int(np.random.SeedSequence([config.seed, update]).generate_state(1, np.uint64)[0])
    return [(start + generation * total + int(i)) % 2**31 for i in env_ids]


def make_host_evaluation(
    env: HostEnvironment,
    agent: Agent,
    config: Config,
    episode_ids: Sequence[int] | np.ndarray | None = None,
    num_hosts: int = 1,
) -> "HostEvaluation":
    """The evaluation of a run, with the seeds that the run specifies.

    Args:
      env: the environment.
      agent: the agent that acts.
      config: the run's configuration.
      episode_ids: the episodes to play here; None plays all.
      num_hosts: hosts that share the episodes.
    """
    settings = config.evaluation
    ids = np.arange(settings.episodes) if episode_ids is None else np.asarray(episode_ids)
    seeds = pool_seeds(config, config.environments + ids, 0, num_hosts=num_hosts)
    threads = config.sebulba.pool_threads or cpu_cores()
    # What fits into memory for training fits for an evaluation.
    most = max(config.num_envs // num_hosts, 1) if env.in_processes else len(ids)
    rounds = -(-len(ids) // most)
    places = -(-len(ids) // rounds)
    return HostEvaluation(
        env, agent, settings, lambda: env.make_pool(seeds[:places], threads), ids, places
    )


class HostEvaluation:
    """Plays one episode in each environment of a pool, and again until all have been played.

    The pool is built when it is first needed, and kept. A pool that fails is not rebuilt: unlike
    training, an evaluation can't leave out the lost steps.
    """

    def __init__(
        self,
        env: HostEnvironment,
        agent: Agent,
        config: EvaluationConfig,
        make_pool: Callable[[], Pool],
        episode_ids: np.ndarray,
        places: int,
    ):
        """``make_pool`` builds a pool of ``places`` environments for ``episode_ids``, ``[N]``."""
        self._config, self._make_pool = config, make_pool
        self._pool: Pool | None = None
        # The last round is filled up with episodes that do not count.
        self._episodes, rounds = len(episode_ids), -(-len(episode_ids) // places)
        self._rounds = np.resize(episode_ids.astype(np.int32), (rounds, places))

        def act(weights: Weights, state: ActorState, key: Array, count: Array):
            keys = env_keys(jax.random.fold_in(key, count), state.env_id, 1)[0]
            carry, action, _ = agent.act(
                weights, state.carry, state.timestep, keys, greedy=config.greedy
            )
            action = spaces.to_environment(action, env.spec.action)
            return state.replace(carry=carry), action

        def arrive(state: ActorState, arrival: TimeStep) -> ActorState:
            previous = state.timestep.observation
            return state.replace(timestep=host_unroll.host_arrive(env, previous, arrival))

        self._expected = host_unroll.transfer_shapes(env, places)
        self._start = jax.jit(partial(host_unroll.host_start, env, agent))
        self._arrive = jax.jit(arrive, donate_argnums=0)
        self._act = jax.jit(act, donate_argnums=1)

    def __call__(self, weights: Weights, key: Array, beat: Callable[[str], None]) -> Episodes:
        """Plays the episodes.

        Args:
          weights: the weights, on the device that computes the actions.
          key: random key of the evaluation, on that device.
          beat: called before each step with a description of it; it may raise.
        """
        beat("building its pool")
        self._pool = self._pool or self._make_pool()
        rounds = [self._play(self._pool, weights, key, ids, beat) for ids in self._rounds]
        return jax.tree.map(lambda *x: np.concatenate(x)[: self._episodes], *rounds)

    def _play(
        self,
        pool: Pool,
        weights: Weights,
        key: Array,
        episode_ids: np.ndarray,
        beat: Callable[[str], None],
    ) -> Episodes:
        """Plays one episode in each environment."""
        step = pool.reset()
        host_unroll.check_transfer(step.timestep, self._expected)
        device = key.device
        state = self._start(*jax.device_put((episode_ids, step.timestep), device))
        episodes = HostEpisodes(len(episode_ids))
        played = Episodes(*episodes.running, np.zeros(len(episode_ids), bool))
        for count in range(self._config.max_steps):
            state, action = self._act(weights, state, key, jax.device_put(np.int32(count), device))
            beat("stepping its pool")
            step = pool.step(np.asarray(action))
            host_unroll.check_transfer(step.timestep, self._expected)
            total, ended = episodes.add(step)
            played = Episodes(
                np.where(played.complete, played.ret, total.ret),
                np.where(played.complete, played.length, total.length),
                played.complete | ended,
            )
            if played.complete.all():
                break
            state = self._arrive(state, jax.device_put(step.timestep, device))
        return played

    def close(self) -> None:
        """Closes the pool."""
        if self._pool is not None:
            self._pool.close()
