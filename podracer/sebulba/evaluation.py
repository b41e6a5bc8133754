"""Evaluation on the first actor device, in a thread of its own, where a hang is noticed."""

from collections.abc import Callable
from functools import partial

import jax
import numpy as np

from podracer.acting.host_evaluation import make_host_evaluation
from podracer.acting.statistics import Episodes
from podracer.distributed import mesh as mesh_lib
from podracer.sebulba.program import SebulbaState
from podracer.sebulba.setup import SebulbaSetup
from podracer.sebulba.threads import Supervisor, WorkerThread
from podracer.training import builder


class EvaluationThread:
    """Plays this host's share of the evaluation episodes; called by the training loop."""

    def __init__(self, setup: SebulbaSetup, supervisor: Supervisor, heartbeat: Callable[[], None]):
        """Starts the thread.

        Args:
          setup: setup of the run.
          supervisor: watches the thread.
          heartbeat: called before each step of the environments.
        """
        self._setup, self._supervisor, self._heartbeat = setup, supervisor, heartbeat
        self._hosts = jax.process_count()
        share = -(-setup.config.evaluation.episodes // self._hosts)
        first = jax.process_index() * share
        self._play = make_host_evaluation(
            setup.env,
            setup.components.agent,
            setup.config,
            np.arange(first, first + share),
            self._hosts,
        )
        self._make_key = jax.jit(builder.evaluation_key)
        self._worker = WorkerThread(supervisor, "evaluation", self._play.close)

    def __call__(self, state: SebulbaState) -> Episodes:
        """Plays whole episodes with the state's weights.

        Returns:
          The episodes of all hosts.
        """
        key = self._make_key(state.key, state.train.step)
        local = mesh_lib.local((state.train.weights, key))
        weights, key = jax.device_put(local, self._setup.split.actors[0])
        own = self._worker.call("playing", partial(self._play, weights, key, self._beat))
        numbers = np.concatenate(own).astype(np.float64)
        gathered = mesh_lib.process_all_gather(numbers, self._setup.mesh)()
        # From [hosts, 3 * share] to [3, hosts * share].
        ret, length, complete = gathered.reshape(self._hosts, 3, -1).swapaxes(0, 1).reshape(3, -1)
        episodes = Episodes(ret, length, complete.astype(bool))
        # Shares are rounded up.
        return jax.tree.map(lambda x: x[: self._setup.config.evaluation.episodes], episodes)

    def _beat(self, activity: str) -> None:
        self._heartbeat()
        self._supervisor.beat(activity)
