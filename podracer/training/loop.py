"""The training loop around a compiled step: metrics, evaluations, checkpoints, and stopping."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np

from podracer.acting.policy import Policy
from podracer.acting.statistics import Episodes
from podracer.config import Config
from podracer.config.members import Member
from podracer.config.sizes import Sizes
from podracer.distributed import drift
from podracer.distributed import mesh as mesh_lib
from podracer.distributed.signals import Interrupted
from podracer.monitoring.metrics import Clock
from podracer.storage.checkpoint import Progress
from podracer.training import rows
from podracer.training.rows import CallMetrics
from podracer.training.session import Session
from podracer.types import Row, Weights


class Result(NamedTuple):
    """The result of a run.

    Attributes:
      weights: the trained weights, on the devices.
      metrics: every row of ``metrics.jsonl``; in other processes than the first one, of earlier
        starts only the last row.
      summary: the content of ``summary.json``.
      policy: the trained policy, ``action = policy(observation)``; with several agents, the
        first one's. Nothing is compiled before it is called.
    """

    weights: Weights
    metrics: list[Row]
    summary: dict[str, Any]
    policy: Policy


class _RowLog:
    """Turns the metrics of calls into rows one call late, so that devices never wait for the
    host."""

    def __init__(
        self, members: Sequence[Member], sizes: Sizes, session: Session, clock: Clock, update: int
    ):
        self._members, self._sizes, self._session, self._clock = members, sizes, session, clock
        self._unread: tuple[int, CallMetrics] | None = None
        self._step, self._seconds = update * sizes.steps_per_update, clock.training()

    def add(self, update: int, metrics: CallMetrics) -> None:
        """Adds the metrics of the call that began with this update, and writes the row of the
        previous call."""
        self.flush()
        self._unread = update, metrics

    def row(self) -> Row:
        """Waits for the metrics that were added last, checks them, and makes a row of them."""
        assert self._unread is not None
        (update, metrics), sizes = self._unread, self._sizes
        self._unread, metrics = None, jax.device_get(metrics)
        if len(self._members) > 1:
            rows.check_alive(metrics.alive, update, sizes)
        else:
            rows.check_finite(metrics.learner.losses, update, sizes)
        step = (update + sizes.updates_per_call) * sizes.steps_per_update
        seconds = self._clock.training()
        rate = (step - self._step) / max(seconds - self._seconds, 1e-9)
        self._step, self._seconds = step, seconds
        return {
            "step": step,
            "wall_time": self._clock.total(),
            "time/steps_per_second": rate * len(self._members),
            **rows.of_agents(rows.of_training, metrics._replace(selected=()), self._members),
            **rows.of_selection(metrics.selected, self._members),
        }

    def flush(self) -> None:
        """Writes the row of the metrics that were added last."""
        if self._unread is not None:
            self._session.write(self.row(), self._clock)


class _StopConsensus:
    """Makes the processes agree on when to stop and save, as signals and clocks request it.

    Several processes act on what they knew one call ago, because it is exchanged while the devices
    compute.
    """

    def __init__(self, session: Session, mesh: jax.sharding.Mesh):
        self._session, self._mesh = session, mesh
        self._gather: Callable[[], np.ndarray] | None = None

    def decide(self) -> tuple[int | None, bool]:
        """The signal that has arrived, or None, and whether a checkpoint is overdue; the same in
        all processes."""
        session = self._session
        own = np.array([session.stop.number or 0, session.save_overdue()], np.float64)
        gather = mesh_lib.process_all_gather(own, self._mesh)
        before, self._gather = self._gather, gather
        if session.processes.count == 1:
            before = gather
        number, overdue = before().max(0) if before else (0, False)
        return int(number) or None, bool(overdue)

    def forget(self) -> None:
        """Drops what was exchanged before a checkpoint; a signal will be exchanged again."""
        self._gather = None


class _Hooks:
    """What happens between calls: evaluations, checkpoints, and the end of a run that must stop."""

    def __init__(
        self,
        log: _RowLog,
        evaluate: Callable[[Any], Episodes],
        mesh: jax.sharding.Mesh,
        config: Config,
        sizes: Sizes,
        session: Session,
        clock: Clock,
    ):
        self._log, self._evaluate = log, evaluate
        self.check_drift = drift.make_check(mesh, several=sizes.num_agents > 1)
        self._config, self._sizes = config, sizes
        self._session, self._clock = session, clock

    def reached(self, update: int, doing: str) -> None:
        """Tells the other processes what this one does now."""
        self._session.processes.begin(update * self._sizes.steps_per_update, doing)

    def evaluate(self, state: Any, update: int, row: Row) -> None:
        """Adds an evaluation to a row and writes it; saves the weights if they are the best."""
        stop, clock, session = self._session.stop, self._clock, self._session
        self.reached(update, "evaluating")
        # With several processes, none can abandon an evaluation that the others continue.
        alone = session.processes.count == 1
        try:
            with stop.raising() if alone else nullcontext(), clock.measure("evaluation"):
                episodes = jax.device_get(self._evaluate(state))
        except Interrupted:
            self.stop(state, update, pending=row)
        except Exception:
            # The next start evaluates first.
            if alone:
                self.save_last(state, update, pending=row)
            raise
        session.write(
            {**row, **rows.of_agents(rows.of_evaluation, episodes, self._config.members)}, clock
        )
        returns = episodes.ret.mean(-1)
        # Of a sweep, the weights that are kept are those with which its best agent was best.
        score = float(rows.comparable(returns).max() if self._config.sweep else returns.mean())
        with clock.measure("checkpoint"):
            improves = session.improves(score)
        if improves:
            self.save(state, update, score)

    def save(
        self, state: Any, update: int, score: float | None = None, pending: Row | None = None
    ) -> None:
        """Writes the rows up to this update, and saves the run while training continues."""
        self._log.flush()
        clock = self._clock
        self.reached(update, "saving")
        with clock.measure("checkpoint"):
            # A checkpoint holds the weights of one device.
            self.check_drift(state.train.weights, update)
            progress = Progress(update, clock.total(), dict(clock.seconds), pending=pending)
            self._session.save(state, progress, score)

    def save_last(self, state: Any, update: int, pending: Row | None = None) -> None:
        """Saves the run and waits until the checkpoint is complete."""
        self.save(state, update, pending=pending)
        self.reached(update, "waiting for the last checkpoint")
        self._session.finish_saving()

    def stop(self, state: Any, update: int, pending: Row | None = None) -> NoReturn:
        """Saves the run and ends it with the error of the signal that has arrived."""
        self.save_last(state, update, pending)
        raise self._session.stop.error(update)


def run(
    state: Any,
    progress: Progress,
    *,
    step: Callable[[Any], tuple[Any, CallMetrics]],
    evaluate: Callable[[Any], Episodes],
    config: Config,
    sizes: Sizes,
    session: Session,
    clock: Clock,
    mesh: jax.sharding.Mesh,
    make_policy: Callable[[Weights, Row], Policy],
    report: Callable[[Sequence[Row]], dict[str, Any]] = lambda _: {},
) -> Result:
    """Calls ``step`` until the run is finished or a signal asks it to stop.

    The metrics of a call are read while the next one runs, and a state is saved only after they
    were found to be finite. JAX's transfer guard rejects implicit transfers (docs/accelerators.md).

    Args:
      state: the state to train from, whose ``train`` is a ``TrainState``; it is donated.
      progress: the run's progress at this state.
      step: one call, compiled; may raise ``Interrupted`` before its first update.
      evaluate: plays the evaluation episodes with the weights of a state, compiled.
      config, sizes: the run's configuration and sizes.
      session: writes rows and checkpoints.
      clock: measures what time is spent on; it already contains the time of compilation.
      mesh: the devices that learn.
      make_policy: makes the policy from the trained weights and the last row of metrics.
      report: further values of the summary, from all rows.

    Raises:
      DivergedError: a loss or gradient became NaN or infinite; written files are kept.
      DriftError: devices no longer hold the same weights.
      PreemptedError, KeyboardInterrupt: SIGTERM or SIGINT arrived, and the run was saved.
      DisplacedError: the workdir belongs to another run now.
      SaveError, TransientError: metrics or the last checkpoint could not be written.
      Exception: of an evaluation; the run was saved, if it has one process only.
    """
    log = _RowLog(config.members, sizes, session, clock, progress.update)
    hooks = _Hooks(log, evaluate, mesh, config, sizes, session, clock)
    consensus = _StopConsensus(session, mesh)
    with session.stop as stop, jax.transfer_guard("disallow"):
        if progress.pending is not None:
            hooks.evaluate(state, progress.update, progress.pending)
        for update in sizes.calls(progress.update):
            session.profile(state, update)
            hooks.reached(update, "training")
            try:
                state, metrics = step(state)
            except Interrupted:
                hooks.stop(state, update)
            log.add(update, metrics)
            done = update + sizes.updates_per_call
            if _is_due(config.hosts.drift_every, update, done):
                hooks.check_drift(state.train.weights, done)
            if done >= sizes.num_updates or _is_due(config.evaluation.every, update, done):
                hooks.evaluate(state, done, log.row())
            number, overdue = consensus.decide()
            if number is not None:
                stop.number = number
                hooks.stop(state, done)
            if overdue or _is_due(config.checkpoint.every, update, done):
                hooks.save(state, done)
                consensus.forget()
        hooks.save_last(state, sizes.last(progress.update))
        summary = session.agree(lambda x: rows.summarize_run(x[-1], config, clock) | report(x))
    session.finish(summary)
    whole = mesh_lib.replicate(state.train.weights, mesh)
    return Result(whole, session.rows, summary, make_policy(whole, session.rows[-1]))


def _is_due(every: int, before: int, after: int) -> bool:
    """Whether updates ``before`` to ``after`` complete a multiple of ``every``; never if it is
    0."""
    return every > 0 and after // every > before // every
