"""The training loop around a compiled step: metrics, evaluations, checkpoints, and stopping."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np

from podracer.acting.policy import Policy
from podracer.acting.statistics import Episodes, EpisodeSums, summarize
from podracer.config import Config, Sizes
from podracer.distributed import drift
from podracer.distributed import mesh as mesh_lib
from podracer.distributed.signals import Interrupted
from podracer.errors import DivergedError
from podracer.learning import learner
from podracer.monitoring.curves import mean_and_interval
from podracer.monitoring.metrics import Clock
from podracer.storage.checkpoint import Progress
from podracer.training.session import Session
from podracer.types import Row, Weights


class CallMetrics(NamedTuple):
    """The metrics of one call of a step, which is K updates; on the device except for ``host``.

    If several agents learn at once, they are the first axis.

    Attributes:
      learner: see ``learning.learner.Metrics``, ``[K]`` each.
      episodes: sums, ``[K]`` each, over the episodes that ended on all devices.
      host: further numbers, by the names under which they are logged.
    """

    learner: learner.Metrics
    episodes: EpisodeSums
    host: Row | tuple[()] = ()


class Result(NamedTuple):
    """The result of a run.

    Attributes:
      weights: the trained weights, on the devices.
      metrics: every row of ``metrics.jsonl``.
      summary: the content of ``summary.json``.
      policy: the trained policy, ``action = policy(observation)``; with several agents, the
        first one's. Nothing is compiled before it is called.
    """

    weights: Weights
    metrics: list[Row]
    summary: dict[str, Any]
    policy: Policy


def check_finite(losses: dict[str, Any], first_update: int, sizes: Sizes) -> None:
    """Raises ``DivergedError`` with the steps of the first update that has a NaN or infinity.

    Args:
      losses: losses by name, ``[..., K]`` each.
      first_update: the number of the first of these K updates.
      sizes: the run's sizes.
    """
    # Any NaN or infinity in learning appears in these two.
    bad = {
        name: ~np.isfinite(losses[name]).reshape(-1, losses[name].shape[-1]).all(0)
        for name in ("total", "grad_norm")
    }
    worst = np.logical_or.reduce(list(bad.values()))
    if not worst.any():
        return
    update = int(worst.argmax())
    start = (first_update + update) * sizes.steps_per_update
    names = sorted(name for name, x in bad.items() if x[update])
    raise DivergedError(
        f"{', '.join(names)} became NaN or infinite between environment steps {start:,} and "
        f"{start + sizes.steps_per_update:,} (update {first_update + update}); a lower "
        "learning_rate or max_grad_norm, or normalize_observations, may help"
    )


def _learner_row(metrics: learner.Metrics) -> Row:
    """Means over updates; those of losses over the updates that had gradient steps."""
    row: Row = {name: float(x.mean()) for name, x in metrics.source.items()}
    learned = 1.0
    if not isinstance(metrics.learned, tuple):
        row["train/learned"] = learned = float(metrics.learned.mean())
    if learned:
        # A name with a slash has its own group, such as "replay/age".
        row |= {
            name if "/" in name else f"loss/{name}": float(x.mean()) / learned
            for name, x in metrics.losses.items()
        }
    return row


def _train_row(metrics: CallMetrics) -> Row:
    episodes, ret, length = (float(x.sum()) for x in metrics.episodes)
    row = {**_learner_row(metrics.learner), "train/episodes": round(episodes)}
    if episodes:
        row["train/episode_return"] = ret / episodes
        row["train/episode_length"] = length / episodes
    return {**row, **dict(metrics.host)}


def _eval_row(episodes: Episodes) -> Row:
    statistics = summarize(episodes)
    return {
        "eval/episode_return": statistics["return_mean"],
        "eval/episode_return_std": statistics["return_std"],
        "eval/episode_length": statistics["length_mean"],
        "eval/episodes": statistics["episodes"],
        "eval/complete": statistics["complete"],
    }


def _row(make: Callable[[Any], Row], metrics: Any, seeds: Sequence[int]) -> Row:
    """The row of an agent's metrics; for several agents, the mean with its confidence interval, and
    the row of each."""
    if len(seeds) == 1:
        return make(metrics)
    rows = [make(jax.tree.map(lambda x, i=i: x[i], metrics)) for i in range(len(seeds))]
    row: Row = {}
    for name in dict.fromkeys(name for each in rows for name in each):
        values = np.array([each[name] for each in rows if name in each])
        mean, interval = mean_and_interval(values)
        row[name] = float(mean)
        if name.endswith("episode_return") and interval is not None:
            row[f"{name}_interval"] = float(interval)
    for seed, each in zip(seeds, rows, strict=True):
        row |= {f"seed_{seed}/{name}": x for name, x in each.items()}
    return row


class _RowLog:
    """Turns the metrics of calls into rows one call late, so that devices never wait for the
    host."""

    def __init__(
        self, seeds: Sequence[int], sizes: Sizes, session: Session, clock: Clock, update: int
    ):
        self._seeds, self._sizes, self._session, self._clock = seeds, sizes, session, clock
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
        check_finite(metrics.learner.losses, update, sizes)
        step = (update + sizes.updates_per_call) * sizes.steps_per_update
        seconds = self._clock.training()
        rate = (step - self._step) / max(seconds - self._seconds, 1e-9)
        self._step, self._seconds = step, seconds
        return {
            "step": step,
            "wall_time": self._clock.total(),
            "time/steps_per_second": rate * len(self._seeds),
            **_row(_train_row, metrics, self._seeds),
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
        self._log, self._evaluate, self.check_drift = log, evaluate, drift.make_check(mesh)
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
        session.write({**row, **_row(_eval_row, episodes, self._config.seeds)}, clock)
        score = float(episodes.ret.mean())
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
        self._session.log(f"stopped after update {update:,}; the same command resumes the run")
        raise self._session.stop.error()


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
    make_policy: Callable[[Weights], Policy],
    report: Callable[[Sequence[Row]], dict[str, Any]] = lambda _: {},
) -> Result:
    """Calls ``step`` until the run is finished or a signal asks it to stop.

    The metrics of a call are read while the next one runs, so that devices never wait for the host.
    JAX's transfer guard rejects every implicit transfer between host and devices (see
    docs/accelerators.md). A state is saved only after its metrics were found to be finite.

    Args:
      state: the state to train from, whose ``train`` is a ``TrainState``; it is donated.
      progress: the run's progress at this state.
      step: one call, compiled; may raise ``Interrupted`` before its first update.
      evaluate: plays the evaluation episodes with the weights of a state, compiled.
      config, sizes: the run's configuration and sizes.
      session: writes rows and checkpoints.
      clock: measures what time is spent on; it already contains the time of compilation.
      mesh: the devices that learn.
      make_policy: makes the policy from the trained weights.
      report: computes further values for the summary from all rows.

    Raises:
      DivergedError: a loss or gradient became NaN or infinite; written files are kept.
      DriftError: devices no longer hold the same weights.
      PreemptedError, KeyboardInterrupt: SIGTERM or SIGINT arrived, and the run was saved.
      DisplacedError: the workdir belongs to another run now.
      SaveError: metrics or the last checkpoint could not be written.
      TransientError: as ``SaveError``, for a reason that may be temporary.
    """
    log = _RowLog(config.seeds, sizes, session, clock, progress.update)
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
        summary = {**_summary(session.rows[-1], config.seeds, clock), **report(session.rows)}
    session.finish(summary)
    return Result(state.train.weights, session.rows, summary, make_policy(state.train.weights))


def _summary(last: Row, seeds: Sequence[int], clock: Clock) -> dict[str, Any]:
    """The summary of a run over all its starts; steps are those of one agent."""
    starting = sum(clock.seconds.get(what, 0.0) for what in ("setup", "compile"))
    return {
        "env_steps": last["step"],
        "wall_seconds": clock.total(),
        "compile_seconds": clock.seconds["compile"],
        "steps_per_second": last["step"] * len(seeds) / (clock.total() - starting),
        "eval_return_mean": last["eval/episode_return"],
        "eval_return_std": last["eval/episode_return_std"],
        "eval_episodes": round(last["eval/episodes"]),
        "eval_complete": last["eval/complete"],
        "seed": seeds[0],
        "num_seeds": len(seeds),
        "seconds": {**clock.seconds, "training": clock.training()},
    }


def _is_due(every: int, before: int, after: int) -> bool:
    """Whether updates ``before`` to ``after`` complete a multiple of ``every``; never if it is
    0."""
    return every > 0 and after // every > before // every
