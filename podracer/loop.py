"""The loop around a compiled step: evaluation, metrics one call late, the stop at NaN, the end."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from podracer.config import Config, Sizes
from podracer.episodes import Episodes
from podracer.errors import DivergedError
from podracer.metrics import Clock, Row, Writer
from podracer.rollout import EpisodeMetrics
from podracer.types import Weights


class CallMetrics(NamedTuple):
    """What one call of a step reports, K updates; on the device but for ``host``.

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
      losses: by name, ``[K]`` each.
      first_update: the number of the first of these K updates.
      sizes: of the run.
    """
    # These two follow whatever goes wrong in learning; other metrics are there to look at.
    bad = {name: ~np.isfinite(losses[name]) for name in ("total", "grad_norm")}
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


class _Log:
    """Turns what calls report into rows, one after the other."""

    def __init__(self, sizes: Sizes, writer: Writer, clock: Clock):
        self.rows: list[Row] = []
        self._sizes, self._writer, self._clock = sizes, writer, clock
        self._step, self._seconds = 0, clock.training()

    def read(self, call: int, metrics: CallMetrics, evaluation: Row) -> None:
        """Waits for the metrics of a call, checks them and writes them down."""
        sizes, metrics = self._sizes, jax.device_get(metrics)
        check_finite(metrics.losses, call * sizes.updates_per_call, sizes)
        step = (call + 1) * sizes.updates_per_call * sizes.steps_per_update
        seconds = self._clock.training()
        row: Row = {
            "step": step,
            "wall_time": self._clock.total(),
            "time/steps_per_second": (step - self._step) / max(seconds - self._seconds, 1e-9),
            **_train_row(metrics),
            **evaluation,
        }
        self._step, self._seconds = step, seconds
        self.rows.append(row)
        self._writer.write(row)

    def summary(self, seed: int, after_compile: float) -> dict[str, Any]:
        """What a run comes down to; ``after_compile`` is the clock's total when it began."""
        clock, steps, last = self._clock, self._sizes.total_steps, self.rows[-1]
        return {
            "env_steps": steps,
            "wall_seconds": clock.total(),
            "compile_seconds": clock.seconds["compile"],
            "steps_per_second": steps / (clock.total() - after_compile),
            "eval_return_mean": last["eval/episode_return"],
            "eval_return_std": last["eval/episode_return_std"],
            "eval_episodes": last["eval/episodes"],
            "eval_complete": last["eval/complete"],
            "seed": seed,
            "seconds": {**clock.seconds, "training": clock.training()},
        }


def run(
    state: Any,
    *,
    step: Callable[[Any], tuple[Any, CallMetrics]],
    evaluate: Callable[[Any], Episodes],
    config: Config,
    sizes: Sizes,
    writer: Writer,
    clock: Clock,
    report: Callable[[], dict[str, Any]] = dict,
) -> Result:
    """Calls ``step`` until the run is over.

    The metrics of one call are read while the next one runs, so that the devices never wait for the
    host; nothing moves to or from them but what is asked for (JAX's transfer guard).

    Args:
      state: with ``state.train`` a ``TrainState``; donated.
      step: one call, compiled.
      evaluate: judges the weights of a state, compiled.
      config: of the run.
      sizes: of the run.
      writer: where rows go.
      clock: keeps what time went to; compiling is in it already.
      report: more for the summary, asked for at the end.

    Raises:
      DivergedError: a loss or gradient became NaN or infinite; what was written stays.
    """
    after_compile = clock.total()
    log = _Log(sizes, writer, clock)
    with writer, jax.transfer_guard("disallow"):
        unread = None
        for call in range(sizes.num_calls):
            state, metrics = step(state)
            if unread is not None:
                log.read(*unread)
            unread = (call, metrics, {})
            if _evaluation_due(call, config, sizes):
                jax.block_until_ready(metrics)
                with clock.measure("evaluation"):
                    row = _eval_row(jax.device_get(evaluate(state)))
                log.read(call, metrics, row)
                unread = None
        summary = {**log.summary(config.seed, after_compile), **report()}
    writer.finish(summary)
    return Result(state.train.weights, log.rows, summary)


def _evaluation_due(call: int, config: Config, sizes: Sizes) -> bool:
    """After the last call, and after each that completes another ``evaluation.every`` updates."""
    if call + 1 == sizes.num_calls:
        return True
    every = config.evaluation.every
    before, after = (n * sizes.updates_per_call for n in (call, call + 1))
    return every > 0 and after // every > before // every
