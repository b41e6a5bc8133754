"""Runs that average: each is a group of its own, and all exchange weights through a folder.

After every call of its step, a run writes its weights there, and continues from the average of
these and of what the other runs have written last, see ``learning.averaging``. No run waits for
another one: a slow run contributes less often, one that has finished no more, and one that was
stopped is ignored after a while. When it is started again, it continues from the average of the
others.
"""

import contextlib
import os
import pathlib
import time
import uuid
import zipfile
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from podracer.config import Config
from podracer.distributed.checksum import named_arrays
from podracer.errors import ConfigError, SaveError
from podracer.learning import averaging
from podracer.learning.averaging import Groups
from podracer.storage import retry
from podracer.training.rows import CallMetrics
from podracer.types import ArrayTree, TrainState

FIRST = "first.npz"
# The name of an array in each file: the process that has written it.
WRITER = "writer"
Step = Callable[[Any], tuple[Any, CallMetrics]]


def _shared(train: TrainState) -> ArrayTree:
    """What runs exchange, on the host."""
    return jax.device_get((train.weights, train.target))


def _with(train: TrainState, shared: ArrayTree) -> TrainState:
    """The state with what was exchanged, placed on the devices of what it replaces."""
    weights, target = jax.tree.map(
        lambda x, old: jax.device_put(x, old.sharding),
        jax.device_get(shared),
        (train.weights, train.target),
    )
    return train.replace(weights=weights, target=target)


def _load(path: pathlib.Path) -> dict[str, np.ndarray]:
    """The arrays of a file.

    Raises:
      ConfigError: the file is something else.
    """
    try:
        with np.load(path) as file:
            arrays = dict(file)
    except (TypeError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{path} holds no weights: {error}") from error
    if WRITER not in arrays:
        raise ConfigError(f"{path} holds no weights of a run: it has no array {WRITER}")
    return arrays


class Exchange:
    """A run's part in an average of runs; without a folder, it has none."""

    def __init__(self, config: Config, num_processes: int):
        """Reads and writes nothing yet.

        Raises:
          ConfigError: the run can't average with others.
        """
        settings = config.averaging
        self._timeout_s, self._folder = settings.timeout_s, pathlib.Path(settings.folder)
        self.on = settings.folder != ""
        if self.on and num_processes > 1:
            raise ConfigError(
                f"averaging.folder={settings.folder} averages runs of one process each, and this "
                f"run has {num_processes}"
            )
        self._seed, self._name = config.seed, f"seed_{config.seed}.npz"
        self._writer, self._has_written = uuid.uuid4().hex, False
        optimizer = averaging.make_outer(settings.outer_rate, settings.outer_momentum)
        self._init = jax.jit(optimizer.init)
        self._average = jax.jit(partial(averaging.average, optimizer))
        self._before: Any = None
        self._opt_state: Any = None

    def join(self, state: Any, update: int) -> Any:
        """The state from which a run begins or resumes: with the average of the others' weights, if
        there are any. Runs that begin together all start from the initial weights of one of them.

        Args:
          state: initial or restored, whose ``train`` is a ``TrainState``.
          update: number of updates done.
        """
        if not self.on:
            return state
        self._folder.mkdir(parents=True, exist_ok=True)
        own = _shared(state.train)
        others = self._others(own)
        if not others and update == 0:
            others = [self._first(own)]
        if others:
            own = jax.tree.map(lambda *x: np.mean(x, axis=0, dtype=x[0].dtype), *others)
        train = _with(state.train, own)
        self._before, self._opt_state = own[0], self._init(train.weights.params)
        return state.replace(train=train)

    def wrap(self, step: Step, publish: Callable[[Any], None] = lambda state: None) -> Step:
        """The step with an average after it.

        Args:
          step: one call.
          publish: called with the state after an average.
        """
        if not self.on:
            return step

        def averaging_step(state: Any) -> tuple[Any, CallMetrics]:
            state, metrics = step(state)
            train, averages = self._exchange(state.train)
            state = state.replace(train=train)
            publish(state)
            return state, metrics._replace(averages=averages)

        return averaging_step

    def leave(self) -> None:
        """Takes the weights of a run that has finished out of the others' averages."""
        if self.on:
            path = self._folder / self._name
            retry.call(f"{path} can't be removed", partial(path.unlink, missing_ok=True))

    def _exchange(self, train: TrainState) -> tuple[TrainState, dict[str, Any]]:
        own = _shared(train)
        # The loop ends a run that has diverged; until then, its weights are not written.
        if all(np.isfinite(x).all() for x in jax.tree.leaves(own)):
            self._check_writer()
            self._write(self._name, own)
            self._has_written = True
        others = self._others(own)
        weights, target = jax.tree.map(lambda *x: np.stack(x), own, *others)
        alive = np.ones(1 + len(others), bool)
        given = jax.device_put((self._before, self._opt_state, (weights, target, alive)))
        before, opt_state, groups = given
        found = self._average(before, opt_state, Groups(*groups))
        self._before, self._opt_state = jax.device_get((found.weights, found.opt_state))
        averages = {**jax.device_get(found.metrics), "averaging/runs": np.int32(1 + len(others))}
        return _with(train, (found.weights, found.target)), averages

    def _check_writer(self) -> None:
        """Checks that no other process writes this run's file.

        Raises:
          ConfigError: one does, which can only be a run with the same seed.
        """
        path = self._folder / self._name
        if not self._has_written or not path.exists():
            return
        if retry.call(f"{path} can't be read", partial(_load, path))[WRITER] != self._writer:
            raise ConfigError(
                f"averaging.folder: another run with seed={self._seed} writes {path}; runs that "
                "average need different seeds"
            )

    def _others(self, like: ArrayTree) -> list[ArrayTree]:
        """What the other runs have written, if it is new enough."""
        found = []
        for path in sorted(self._folder.glob("seed_*.npz")):
            # Somebody may be emptying the folder.
            with contextlib.suppress(FileNotFoundError):
                fresh = time.time() - path.stat().st_mtime <= self._timeout_s
                if fresh and path.name != self._name:
                    read = partial(self._read, path, like)
                    # A network file system may fail if the other run has just replaced the file.
                    found.append(retry.call(f"{path} can't be read", read))
        return found

    def _first(self, own: ArrayTree) -> ArrayTree:
        """The weights that all runs begin with: those of the run that is the first to write any."""
        if not (self._folder / FIRST).exists():
            temporary = self._write(f".{FIRST}.{self._name}", own)
            try:
                os.link(temporary, self._folder / FIRST)
            except FileExistsError:
                pass  # Another run was the first.
            except OSError as error:
                raise SaveError(
                    f"averaging.folder: {self._folder / FIRST} can't be made: {error}; the folder "
                    "has to be on a file system with hard links"
                ) from error
            finally:
                temporary.unlink()
        return self._read(self._folder / FIRST, own)

    def _write(self, name: str, tree: ArrayTree) -> pathlib.Path:
        """Writes arrays atomically: no other run ever sees a part of the file."""
        path, temporary = self._folder / name, self._folder / f".{name}.writing"
        arrays: dict[str, Any] = {**dict(named_arrays(tree)), WRITER: np.array(self._writer)}
        try:
            with temporary.open("wb") as file:
                np.savez(file, **arrays)
                file.flush()
                # Else a machine that fails could leave an empty file, which would end other runs.
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError as error:
            raise SaveError(f"averaging.folder: {path} can't be written: {error}") from error
        return path

    def _read(self, path: pathlib.Path, like: ArrayTree) -> ArrayTree:
        """The arrays of a file, as a tree like ``like``.

        Raises:
          ConfigError: they are those of another network, or not those of a run.
        """
        arrays = _load(path)
        arrays.pop(WRITER)
        expected = {name: x.shape for name, x in named_arrays(like).items()}
        if {name: x.shape for name, x in arrays.items()} != expected:
            raise ConfigError(
                f"{path} holds the weights of another network; runs that average need the same "
                "environment, agent and network, and a folder of their own: averaging.folder"
            )
        return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in expected])
