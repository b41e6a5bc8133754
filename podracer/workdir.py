"""The files in a run's folder: how they are read back, and who holds and writes them.

A run is its workdir: what is there is continued, so a second process must never write to it, a
half-written file never be taken for whole, and nothing that a run has left be lost.
"""

import fcntl
import importlib.metadata
import json
import math
import os
import platform
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import IO, Any

from etils import epath

from podracer import bucket
from podracer.bucket import LOCK, Mirror
from podracer.errors import ConfigError, SaveError
from podracer.metrics import Row

METRICS, CONFIG, SUMMARY = "metrics.jsonl", "config.json", "summary.json"
LEARNING_CURVE = "learning_curve.png"
PACKAGES = (
    "jax", "jaxlib", "flax", "optax", "rlax", "distrax", "chex", "gymnax", "envpool", "gymnasium",
    "orbax-checkpoint", "numpy",
)  # fmt: skip
# What a run that goes on may not change: it would be another run, or its state would not fit.
FIXED = (
    "architecture", "env", "env_kwargs", "env_params", "agent", "seed", "num_seeds",
    "num_envs", "unroll_length", "network", "optimizer", "normalize_observations",
    "normalize_rewards",
)  # fmt: skip


def read_config(workdir: epath.PathLike) -> dict[str, Any]:
    """The content of ``config.json``.

    Raises:
      ConfigError: the folder is no run.
    """
    path = bucket.locate(workdir)
    try:
        content = json.loads(bucket.read(path / CONFIG))
        if not (isinstance(content, dict) and {"config", "sizes"} <= content.keys()):
            raise ConfigError(f"{path / CONFIG} was not written by a run: no 'config' or 'sizes'")
    except FileNotFoundError as error:
        what = f"it has no {CONFIG}" if path.is_dir() else "there is no such folder"
        inside = f"; it holds runs, give {path}/*" if any(path.glob(f"*/{CONFIG}")) else ""
        raise ConfigError(f"{str(path)!r} is no run: {what}{inside}") from error
    except NotADirectoryError as error:
        raise ConfigError(f"{str(path)!r} is no run but a file; give its folder") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path / CONFIG} is damaged: {error}") from error
    return content


def read_rows(workdir: epath.PathLike) -> list[Row]:
    """The rows of ``metrics.jsonl``, null being NaN again.

    A last line without its end is left out: the run was killed while it wrote, or writes now.

    Raises:
      ConfigError: there is no row yet, or a line is none.
    """
    path = bucket.locate(workdir) / METRICS
    if not path.exists():
        raise ConfigError(f"{str(workdir)!r} has no {METRICS}")
    rows = parse_rows(path)
    if not rows:
        raise ConfigError(f"{path} has no rows; has the run just begun?")
    return rows


def parse_rows(path: epath.Path) -> list[Row]:
    """The rows of a file, as far as they are whole. Raises ``ConfigError`` if a line is none."""
    *lines, _ = bucket.read(path).split("\n")
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path} is damaged: line {number} is no JSON") from error
        if not (isinstance(row, dict) and {"step", "wall_time"} <= row.keys()):
            raise ConfigError(f"{path} is damaged: line {number} lacks 'step' or 'wall_time'")
        rows.append({name: math.nan if x is None else x for name, x in row.items()})
    return rows


def versions() -> dict[str, str]:
    """Of Python, podracer and what matters to it, as far as installed."""
    found = {"python": platform.python_version()}
    for package in ("podracer", *PACKAGES):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A config's values by their dotted keys, as JSON gives them back."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = list(value) if isinstance(value, tuple) else value
    return flat


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ, with both; None where there is none."""
    before, after = flatten(old), flatten(new)
    keys = sorted(before.keys() | after.keys())
    return {k: (before.get(k), after.get(k)) for k in keys if before.get(k) != after.get(k)}


def check_same_run(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What a run that goes on does differently, one line for each value.

    Args:
      old: the config it was begun with.
      new: the config it is to go on with.

    Raises:
      ConfigError: a value differs that may not.
    """
    lines = []
    for key, (before, after) in differences(old, new).items():
        if key.partition(".")[0] in FIXED:
            raise ConfigError(
                f"the run in the workdir has {key}={before!r}, not {after!r}: it can't go on as "
                "another; give another --workdir, or --restart to begin anew and move it aside"
            )
        lines.append(f"{key} was {before!r} and is now {after!r}")
    return lines


class Workdir:
    """A run's folder, held by this process until it is closed.

    Attributes:
      path: of the folder.
      local: where files are written: this folder, or one that is copied into a bucket.
      config: of the run that was found there, with its architecture; None where there was none.
      rows: of metrics, those found and those written since.
    """

    def __init__(self, path: epath.PathLike, *, restart: bool, say: Callable[[str], None]):
        """Makes and locks the folder.

        Args:
          path: of the folder, which may be in a bucket.
          restart: a run that is there moves aside.
          say: is told where to, and of what goes wrong without ending the run.

        Raises:
          ConfigError: the folder can't be written to, or its run is still going on.
        """
        self.path = bucket.resolve(path)
        self._dumped: dict[str, str] = {}
        with _writable(path), bucket.reachable(self.path), ExitStack() as on_error:
            self._mirror = Mirror(self.path, say) if bucket.holds(self.path) else None
            if self._mirror is not None:
                on_error.callback(self._mirror.close)
            self.local = self.path if self._mirror is None else epath.Path(self._mirror.local)
            self.local.mkdir(parents=True, exist_ok=True)
            self._lock = on_error.enter_context(_lock(self.local))
            if restart:
                self.hold()
            if restart and (self.path / CONFIG).exists():
                say(f"the earlier run in {self.path} is now {self._move_aside()}")
            if self._mirror is not None:
                self._mirror.fetch()
            there = (self.local / CONFIG).exists()
            content = read_config(self.path) if there else {}
            self.config = (
                {"architecture": content["architecture"], **content["config"]} if there else None
            )
            there = (self.local / METRICS).exists()
            self.rows = parse_rows(self.path / METRICS) if there else []
            self._metrics = _open_metrics(self.local)
            on_error.pop_all()

    def hold(self) -> None:
        """Takes a workdir in a bucket over from a process that may still run; in a folder that was
        refused already. Raises ``ConfigError`` if it can't be written to."""
        if self._mirror is not None:
            with _writable(self.path):
                self._mirror.hold()

    def make(self, folder: str) -> None:
        """Makes a folder that others write to later, which a bucket needs not. Raises
        ``ConfigError`` if they can't."""
        if self._mirror is None:
            path = self.path / folder
            with _writable(path):
                path.mkdir(exist_ok=True)
                tempfile.TemporaryFile(dir=path).close()

    def _move_aside(self) -> epath.Path:
        if str(self.path) == os.getcwd():
            raise ConfigError(
                f"workdir {str(self.path)!r} is the current directory, which can't be moved "
                "aside; give another by --workdir"
            )
        number = 1
        while (aside := self.path.with_name(f"{self.path.name}.{number}")).exists():
            number += 1
        bucket.move(self.path, aside, last=CONFIG)
        if self._mirror is None:
            self.path.mkdir()
            self._lock.close()
            self._lock = _lock(self.path)
        return aside

    def keep(self, step: int) -> None:
        """Drops the rows after this step: they will be written again."""
        self.rows = [row for row in self.rows if row["step"] <= step]
        self._rewrite()

    def _rewrite(self) -> None:
        self._metrics.close()
        _write(self.local / METRICS, "".join(map(_line, self.rows)))
        self._metrics = _open_metrics(self.local)

    def append(self, row: Row) -> None:
        """One row of metrics more. Raises ``SaveError`` if it can't be written."""
        self.rows.append(row)
        try:
            self._metrics.write(_line(row))
            self._metrics.flush()
        except OSError as error:
            raise SaveError(f"{self.path / METRICS} can't be written: {error.strerror}") from error
        if self._mirror is not None:
            self._mirror.copy_if_due()

    def dump(self, name: str, content: Mapping[str, Any]) -> None:
        """Writes a JSON file, whole or not at all. Raises ``SaveError`` if it can't be written."""
        self._dumped[name] = json.dumps(content, indent=2, default=str, allow_nan=False) + "\n"
        try:
            _write(self.local / name, self._dumped[name])
            if self._mirror is not None:
                self._mirror.copy()
        except OSError as error:
            raise SaveError(f"{self.path / name} can't be written: {error.strerror}") from error

    def sync(self) -> bool:
        """Sees to it that all that was written is there, even if the folder has been deleted.

        Returns:
          Whether it had to be written anew.

        Raises:
          SaveError: the bucket can't be written to, or the workdir belongs to another run.
        """
        os.fsync(self._metrics.fileno())
        if self._mirror is not None:
            try:
                return self._mirror.copy()
            except OSError as error:
                raise SaveError(f"{self.path} can't be written: {error.strerror}") from error
        if (self.path / METRICS).exists():
            return False
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock.close()
        self._lock = _lock(self.path)
        for name, text in self._dumped.items():
            _write(self.path / name, text)
        self._rewrite()
        return True

    def close(self) -> None:
        """Lets go of the folder."""
        self._metrics.close()
        self._lock.close()
        if self._mirror is not None:
            self._mirror.close()


@contextmanager
def _writable(path: epath.PathLike) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"workdir {str(path)!r} is not writable: {error.strerror or error}; give another by "
            "--workdir"
        ) from error


def _lock(path: epath.Path) -> IO[Any]:
    """Holds a workdir until the file is closed; raises ``ConfigError`` if another process does."""
    file = (path / LOCK).open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise ConfigError(
            f"workdir {str(path)!r} belongs to a run that is going on; give another by --workdir"
        ) from error
    return file


def _write(path: epath.Path, text: str) -> None:
    """Writes a file under another name first, so that it is never there by half."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    temporary.replace(path)


def _open_metrics(path: epath.Path) -> IO[Any]:
    return (path / METRICS).open("a")


def _line(row: Row) -> str:
    """A row as JSON, which has no word for NaN or infinity: they are null."""
    finite = {name: x if math.isfinite(x) else None for name, x in row.items()}
    return json.dumps(finite, allow_nan=False) + "\n"
