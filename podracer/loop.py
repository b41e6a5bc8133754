"""The loop around a compiled step: metrics one call late, evaluation, checkpoints, every end."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np

from podracer import drift
from podracer import mesh as mesh_lib
from podracer.checkpoint import Progress
from podracer.config import Config, Sizes
from podracer.curves import mean_and_interval
from podracer.episodes import Episodes
from podracer.errors import DivergedError
from podracer.metrics import Clock, Row
from podracer.rollout import EpisodeMetrics
from podracer.session import Session
from podracer.signals import Interrupted
from podracer.types import Weights


class CallMetrics(NamedTuple):
    """What one call of a step reports, K updates; on the device but for ``host``.

    Where several agents learn at once, they are the first axis.

    Attributes:
      losses: by name, ``[K]`` each; means over devices and gradient steps.
      episodes: ``[K]`` each, sums over the episodes that ended on all devices.
      host: more numbers, under the names they are logged by.
    """

    losses: dict[str, jax.Array]
    episodes: EpisodeMetrics
    host: Row | tuple[()] = ()


class Result(NamedTuple):
    """What a run returns.

    Attributes:
      weights: the trained ones, on the devices.
      metrics: every row of ``metrics.jsonl``.
      summary: the content of ``summary.json``.
    """

    weights: Weights
    metrics: list[Row]
    summary: dict[str, Any]


def check_finite(losses: dict[str, Any], first_update: int, sizes: Sizes) -> None:
    """Raises ``DivergedError`` with the steps of the first update that has a NaN or infinity.

    Args:
      losses: by name, ``[..., K]`` each.
      first_update: the number of the first of these K updates.
      sizes: of the run.
    """
    # These two follow whatever goes wrong in learning; other metrics are there to look at.
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


def _train_row(metrics: CallMetrics) -> Row:
    episodes, ret, length = (float(x.sum()) for x in metrics.episodes)
    row: Row = {f"loss/{name}": float(x.mean()) for name, x in metrics.losses.items()}
    row["train/episodes"] = round(episodes)
    if episodes:
        row["train/episode_return"] = ret / episodes
        row["train/episode_length"] = length / episodes
    return {**row, **dict(metrics.host)}


def _eval_row(episodes: Episodes) -> Row:
    return {
        "eval/episode_return": float(episodes.ret.mean()),
        "eval/episode_return_std": float(episodes.ret.std()),
        "eval/episode_length": float(episodes.length.mean()),
        "eval/episodes": int(episodes.ret.size),
        "eval/complete": int(episodes.complete.sum()),
    }


def _row(make: Callable[[Any], Row], metrics: Any, seeds: Sequence[int]) -> Row:
    """The row that is made of metrics; of several agents', the mean with its interval, and each."""
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


class _Log:
    """Turns what calls report into rows, one call late: the host waits while devices go on."""

    def __init__(
        self, seeds: Sequence[int], sizes: Sizes, session: Session, clock: Clock, update: int
    ):
        self._seeds, self._sizes, self._session, self._clock = seeds, sizes, session, clock
        self._unread: tuple[int, CallMetrics] | None = None
        self._step, self._seconds = update * sizes.steps_per_update, clock.training()

    def add(self, update: int, metrics: CallMetrics) -> None:
        """What the call that began with this update reports; writes down the one before it."""
        self.flush()
        self._unread = update, metrics

    def row(self) -> Row:
        """Waits for the metrics that were not read yet, and checks them."""
        assert self._unread is not None
        (update, metrics), sizes = self._unread, self._sizes
        self._unread, metrics = None, jax.device_get(metrics)
        check_finite(metrics.losses, update, sizes)
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
        """Writes down what was not read yet."""
        if self._unread is not None:
            self._session.write(self.row(), self._clock)


class _Meeting:
    """What is asked of a run between calls by a signal or a clock, alike in all processes.

    Several processes answer with what was known one call ago: so it travels while devices work.
    """

    def __init__(self, session: Session, mesh: jax.sharding.Mesh):
        self._session, self._mesh = session, mesh
        self._told: Callable[[], np.ndarray] | None = None

    def ask(self) -> tuple[int | None, bool]:
        """The signal that has come, if one has, and whether it is time to save."""
        session = self._session
        now = np.array([session.stop.number or 0, session.save_late()], np.float64)
        told = mesh_lib.tell_all(now, self._mesh)
        before, self._told = self._told, told
        known = told() if session.processes.count == 1 else before() if before else 0 * now[None]
        number, late = known.max(0)
        return int(number) or None, bool(late)

    def saved(self) -> None:
        """What was told before that is out of date; a signal will be told again."""
        self._told = None


class _Keeper:
    """Judges and saves a run, and ends it where it is asked to."""

    def __init__(
        self,
        evaluate: Callable[[Any], Episodes],
        check: Callable[[Weights, int], None],
        config: Config,
        sizes: Sizes,
        session: Session,
        clock: Clock,
        best: float | None,
    ):
        self._evaluate, self._check, self._best = evaluate, check, best
        self._config, self._sizes = config, sizes
        self._session, self._clock = session, clock

    def reached(self, update: int, doing: str) -> None:
        """Lets other processes know."""
        self._session.processes.reached(update * self._sizes.steps_per_update, doing)

    def judge(self, state: Any, update: int, row: Row) -> None:
        """Completes a row by an evaluation; the best one so far is saved."""
        stop, clock, seeds = self._session.stop, self._clock, self._config.seeds
        self.reached(update, "evaluating")
        # One of several processes can't leave the others alone in it.
        alone = self._session.processes.count == 1
        try:
            with stop.raising() if alone else nullcontext(), clock.measure("evaluation"):
                episodes = jax.device_get(self._evaluate(state))
        except Interrupted:
            self.end(state, update, pending=row)
        self._session.write({**row, **_row(_eval_row, episodes, seeds)}, clock)
        score = float(episodes.ret.mean())
        if self._best is None or score > self._best:
            self._best = score
            self.save(state, update, score)

    def save(
        self, state: Any, update: int, score: float | None = None, pending: Row | None = None
    ) -> None:
        """Saves the run while it goes on; metrics up to here have been written."""
        clock = self._clock
        self.reached(update, "saving")
        with clock.measure("checkpoint"):
            # What is saved is one device's.
            self._check(state.train.weights, update)
            progress = Progress(update, clock.total(), dict(clock.seconds), self._best, pending)
            self._session.save(state, progress, score)

    def save_last(self, state: Any, update: int, pending: Row | None = None) -> None:
        """Saves the run and waits for that."""
        self.save(state, update, pending=pending)
        self.reached(update, "waiting for the last checkpoint")
        self._session.finish_saving()

    def end(self, state: Any, update: int, pending: Row | None = None) -> NoReturn:
        """Saves the run and ends as it was asked to."""
        self.save_last(state, update, pending)
        self._session.say(f"stops after update {update:,}; the same command goes on from there")
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
    report: Callable[[Sequence[Row]], dict[str, Any]] = lambda _: {},
) -> Result:
    """Calls ``step`` until the run is over, or is asked to end.

    The metrics of one call are read while the next one runs, so that the devices never wait for the
    host; nothing moves to or from them but what is asked for (JAX's transfer guard). A state is
    saved only after its metrics were found to be finite.

    Args:
      state: with ``state.train`` a ``TrainState``; donated.
      progress: how far that state has come.
      step: one call, compiled.
      evaluate: judges the weights of a state, compiled.
      config: of the run.
      sizes: of the run.
      session: where rows and checkpoints go.
      clock: keeps what time went to; compiling is in it already.
      mesh: of the devices that learn.
      report: more for the summary, from all rows.

    Raises:
      DivergedError: a loss or gradient became NaN or infinite; what was written stays.
      DriftError: devices no longer hold the same weights.
      PreemptedError: SIGTERM came; the run has been saved.
      KeyboardInterrupt: SIGINT came; the run has been saved.
      SaveError: metrics or the last checkpoint could not be written.
    """
    log = _Log(config.seeds, sizes, session, clock, progress.update)
    check = drift.make_check(mesh)
    keeper = _Keeper(evaluate, check, config, sizes, session, clock, progress.best)
    meeting = _Meeting(session, mesh)
    with session.stop as stop, jax.transfer_guard("disallow"):
        if progress.pending is not None:
            keeper.judge(state, progress.update, progress.pending)
        for update in sizes.calls(progress.update):
            session.profile(state, update)
            keeper.reached(update, "training")
            state, metrics = step(state)
            log.add(update, metrics)
            done = update + sizes.updates_per_call
            if _due(config.hosts.drift_every, update, done):
                check(state.train.weights, done)
            if done >= sizes.num_updates or _due(config.evaluation.every, update, done):
                keeper.judge(state, done, log.row())
            number, late = meeting.ask()
            if number is not None:
                stop.number = number
                log.flush()
                keeper.end(state, done)
            if session.save_due(update, done) or late:
                log.flush()
                keeper.save(state, done)
                meeting.saved()
        keeper.save_last(state, sizes.last(progress.update))
        summary = {**_summary(session.rows[-1], config.seeds, clock), **report(session.rows)}
    session.finish(summary)
    return Result(state.train.weights, session.rows, summary)


def _summary(last: Row, seeds: Sequence[int], clock: Clock) -> dict[str, Any]:
    """What a run comes down to, all its starts together; steps are those of one agent."""
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


def _due(every: int, before: int, after: int) -> bool:
    """Whether another so many updates were completed; 0 counts none."""
    return every > 0 and after // every > before // every
