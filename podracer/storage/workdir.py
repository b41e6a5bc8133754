"""The files in a run's folder: how they are read back, and which process holds and writes them.

A run is its workdir, and the same command resumes it. A second process must therefore never write
to a workdir that is in use, an incomplete file must never pass for a complete one, and nothing that
an earlier start has written may be lost.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import IO, TYPE_CHECKING, Any, TypeVar

from etils import epath

from podracer.errors import ERRORS, ConfigError, SaveError
from podracer.storage import bucket, retry
from podracer.storage.bucket import LOCK, Mirror

if TYPE_CHECKING:
    # Importing it imports JAX, which takes a second, and reading a run's files needs none.
    from podracer.types import Row

T = TypeVar("T")

METRICS, CONFIG, SUMMARY = "metrics.jsonl", "config.json", "summary.json"
CHECKPOINTS = "checkpoints"
LEARNING_CURVE = "learning_curve.png"
# Suffix that is added to the name of a file that can't be read when a run is resumed.
DAMAGED = ".damaged"
# Errors of file systems without locks, such as some Lustre and NFS mounts.
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


def read_config(workdir: epath.PathLike) -> dict[str, Any]:
    """The content of ``config.json``.

    Raises:
      ConfigError: the folder does not hold a run, or the file is damaged.
      TransientError: it can't be read at present.
    """
    path = bucket.locate(workdir)
    try:
        return _parse_config(bucket.read(path / CONFIG), path / CONFIG)
    except FileNotFoundError as error:
        what = f"it has no {CONFIG}" if path.is_dir() else "there is no such folder"
        inside = f"; it contains runs, specify {path}/*" if any(path.glob(f"*/{CONFIG}")) else ""
        raise ConfigError(f"{str(path)!r} is not a run: {what}{inside}") from error
    except NotADirectoryError as error:
        raise ConfigError(f"{str(path)!r} is a file, not a run; specify its folder") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(
            f"{path / CONFIG} is damaged: {error}; resuming the run writes it again"
        ) from error


def read_run(workdir: epath.PathLike) -> dict[str, Any]:
    """As ``read_config``, of a run that has rows and weights of its own.

    Raises:
      ConfigError: also if the folder holds the runs of agents that were trained in turn.
    """
    content = read_config(workdir)
    if members := content.get("members"):
        raise ConfigError(
            f"{str(workdir)!r} holds the runs of {len(members)} agents in turn; specify one of "
            f"them, such as {workdir}/{members[0]}"
        )
    return content


def _parse_config(text: str, path: epath.Path) -> dict[str, Any]:
    content = json.loads(text)
    if not (isinstance(content, dict) and {"config", "sizes"} <= content.keys()):
        raise ConfigError(f"{path} was not written by a run: no 'config' or 'sizes'")
    return content


def read_rows(workdir: epath.PathLike) -> list[Row]:
    """The rows of ``metrics.jsonl``; null becomes NaN again.

    A last line without its end is left out: the run was killed while it wrote, or is writing now.

    Raises:
      ConfigError: there is no row yet, or a line is damaged.
      TransientError: it can't be read at present.
    """
    path = bucket.locate(workdir) / METRICS
    if not bucket.exists(path):
        raise ConfigError(f"{str(workdir)!r} has no {METRICS}")
    rows, damage = _parse_rows(bucket.read(path, errors="replace"))
    if damage:
        raise ConfigError(f"{path} is damaged: {damage[0]}")
    if not rows:
        raise ConfigError(f"{path} has no rows; has the run just begun?")
    return rows


def _parse_rows(text: str) -> tuple[list[Row], list[str]]:
    """The rows of a text's complete lines, and what is wrong with the others."""
    *lines, _ = text.split("\n")
    rows, damage = [], []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            damage.append(f"line {number} is not JSON")
            continue
        if not (isinstance(row, dict) and {"step", "wall_time"} <= row.keys()):
            damage.append(f"line {number} lacks 'step' or 'wall_time'")
            continue
        rows.append({name: math.nan if x is None else x for name, x in row.items()})
    return rows, damage


def writer(content: Mapping[str, Any]) -> str | None:
    """The version of podracer that wrote a ``config.json``; None if it does not say."""
    return content.get("versions", {}).get("podracer")


class Workdir:
    """A run's folder, held by this process until it is closed.

    Attributes:
      path: the folder.
      local: the folder that files are written to: ``path`` itself, or one that is copied into a
        bucket.
      config: the config of the run found there, with its architecture; None if there was none, or
        if it could not be read.
      wrote: the version of podracer that wrote that config; None if it is not known.
      rows: all rows of metrics, those found there and those written since.
    """

    def __init__(self, path: epath.PathLike, *, restart: bool, log: Callable[[str], None]):
        """Makes and locks the folder.

        Args:
          path: the folder, which may be in a bucket.
          restart: move an existing run aside.
          log: called with a line of text: where a run was moved to, or what goes wrong without
            ending the run.

        Raises:
          ConfigError: the folder can't be used, or its run is still running.
          TransientError: the folder can't be used at present.
        """
        self.path, self._log = bucket.resolve(path), log
        self._dumped: dict[str, str] = {}
        with ExitStack() as on_error:
            self._mirror = Mirror(self.path, log) if bucket.holds(self.path) else None
            if self._mirror is not None:
                on_error.callback(self._mirror.close)
            self.local = self.path if self._mirror is None else epath.Path(self._mirror.local)
            self._lock = on_error.enter_context(self._writing(lambda: _lock(self.local, log)))
            if restart:
                self.hold()
            if restart and self._reading(lambda: bucket.exists(self.path / CONFIG)):
                log(f"the earlier run in {self.path} was moved to {self._move_aside()}")
            if self._mirror is not None:
                self._reading(self._mirror.fetch)
            self.wrote: str | None = None
            self.config = self._read_config()
            self.rows = self._read_rows()
            self._metrics = self._writing(lambda: _open_metrics(self.local))
            on_error.pop_all()

    def _writing(self, function: Callable[[], T]) -> T:
        return _usable(f"workdir {str(self.path)!r} is not writable", function, self._log)

    def _reading(self, function: Callable[[], T]) -> T:
        return _usable(f"workdir {str(self.path)!r} can't be read", function, self._log)

    def hold(self) -> None:
        """Takes over a workdir in a bucket from a process that may still be running; a local
        workdir is locked already. Raises ``ConfigError`` or ``TransientError`` if it can't be
        written to."""
        if self._mirror is not None:
            self._writing(self._mirror.hold)

    def make_folder(self, folder: str) -> None:
        """Makes a folder for files that are written later, which a bucket does not need. Raises
        ``ConfigError`` or ``TransientError`` if it can't be written to."""
        path = self.path / folder

        def make() -> None:
            path.mkdir(exist_ok=True)
            tempfile.TemporaryFile(dir=path).close()

        if self._mirror is None:
            _usable(f"workdir {str(path)!r} is not writable", make, self._log)

    def _move_aside(self) -> epath.Path:
        if str(self.path) == os.getcwd():
            raise ConfigError(
                f"workdir {str(self.path)!r} is the current directory, which can't be moved "
                "aside; specify another with --workdir"
            )
        number = 1
        while bucket.exists(aside := self.path.with_name(f"{self.path.name}.{number}")):
            number += 1
        bucket.move(self.path, aside, last=CONFIG)
        if self._mirror is None:
            self._lock.close()
            self._lock = self._writing(lambda: _lock(self.path, self._log))
        return aside

    def _read_config(self) -> dict[str, Any] | None:
        """The config of the run found here. A damaged config, as a power failure may leave it, is
        set aside, so that the run's checkpoints can still be used."""
        path = self.local / CONFIG
        if not self._reading(lambda: bucket.exists(path)):
            return None
        try:
            content = _parse_config(bucket.read(path), self.path / CONFIG)
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            if not self._reading(lambda: bucket.exists(self.path / CHECKPOINTS)):
                raise ConfigError(
                    f"{self.path / CONFIG} is damaged ({error}), and there is no checkpoint beside "
                    "it; delete it, or specify another --workdir"
                ) from error
            path.replace(path.with_name(CONFIG + DAMAGED))
            self._log(
                f"{self.path / CONFIG} is damaged ({error}) and was renamed to {CONFIG + DAMAGED}; "
                "the run is resumed with the settings of this command, which can't be compared "
                "with its previous settings"
            )
            return None
        self.wrote = writer(content)
        return {"architecture": content["architecture"], **content["config"]}

    def _read_rows(self) -> list[Row]:
        """The rows found here. Damaged lines are left out, and the file is kept under another
        name."""
        path = self.local / METRICS
        if not self._reading(lambda: bucket.exists(path)):
            return []
        rows, damage = _parse_rows(bucket.read(path, errors="replace"))
        if damage:
            path.replace(path.with_name(METRICS + DAMAGED))
            self._writing(lambda: bucket.write(path, "".join(map(_line, rows))))
            self._log(
                f"{self.path / METRICS} is damaged ({damage[0]}; {len(damage):,} lines in all) and "
                f"was renamed to {METRICS + DAMAGED}; the run is resumed with the other rows"
            )
        return rows

    def keep(self, step: int) -> None:
        """Drops the rows after this step: they will be written again."""
        self.rows = [row for row in self.rows if row["step"] <= step]
        with self._saving(METRICS):
            self._rewrite()

    def _rewrite(self) -> None:
        self._metrics.close()
        bucket.write(self.local / METRICS, "".join(map(_line, self.rows)))
        self._metrics = _open_metrics(self.local)

    @contextmanager
    def _saving(self, name: str) -> Iterator[None]:
        """Turns storage errors inside into ``TransientError`` or ``SaveError``."""
        try:
            yield
        except Exception as error:
            if isinstance(error, ERRORS) or retry.fault(error) is None:
                raise
            what = f"{self.path / name} can't be written"
            raise retry.final_error(what, error, SaveError) from error

    def append(self, row: Row) -> None:
        """Adds a row of metrics.

        Raises:
          SaveError: it can't be written.
          TransientError: it can't be written at present.
          DisplacedError: the workdir belongs to another run now.
        """
        self.rows.append(row)
        with self._saving(METRICS):
            self._metrics.write(_line(row))
            self._metrics.flush()
        if self._mirror is not None:
            self._mirror.copy_if_due()

    def dump(self, name: str, content: Mapping[str, Any]) -> None:
        """Writes a JSON file, whole or not at all. Raises errors as ``append`` does."""
        self._dumped[name] = json.dumps(content, indent=2, default=str, allow_nan=False) + "\n"
        with self._saving(name):
            bucket.write(self.local / name, self._dumped[name])
            if self._mirror is not None:
                self._mirror.copy()

    def sync(self) -> bool:
        """Makes everything written so far durable; writes it again if the folder was deleted.

        Returns:
          Whether it had to be written again.

        Raises:
          SaveError: it can't be written.
          TransientError: it can't be written at present.
          DisplacedError: the workdir belongs to another run now.
        """
        with self._saving(METRICS):
            os.fsync(self._metrics.fileno())
            if self._mirror is not None:
                return self._mirror.copy()
            if bucket.exists(self.path / METRICS):
                return False
            self._lock.close()
            self._lock = _lock(self.path, self._log)
            for name, text in self._dumped.items():
                bucket.write(self.path / name, text)
            self._rewrite()
            return True

    def close(self) -> None:
        """Releases the folder."""
        self._metrics.close()
        self._lock.close()
        if self._mirror is not None:
            self._mirror.close()


def _usable(what: str, function: Callable[[], T], log: Callable[[str], None]) -> T:
    """Calls a function with retries; a path that is missing or of the wrong kind becomes a
    ``ConfigError``."""
    advice = "; specify another with --workdir"
    try:
        return retry.call(what, function, log, advice)
    except OSError as error:
        raise ConfigError(f"{what}: {retry.reason(error)}{advice}") from error


def _lock(path: epath.Path, log: Callable[[str], None]) -> IO[Any]:
    """Makes a folder and locks it until the returned file is closed.

    Raises:
      ConfigError: another process has locked it.
    """
    path.mkdir(parents=True, exist_ok=True)
    file = (path / LOCK).open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise ConfigError(
            f"workdir {str(path)!r} belongs to a run that is still running; specify another with "
            "--workdir"
        ) from error
    except OSError as error:
        if error.errno not in NO_LOCKS:
            file.close()
            raise
        log(
            f"the file system of {path} has no locks ({error.strerror}): nothing prevents a second "
            "run from writing to this workdir"
        )
    return file


def _open_metrics(path: epath.Path) -> IO[Any]:
    return open(path / METRICS, "a")


def _line(row: Row) -> str:
    """A row as a line of JSON, which has neither NaN nor infinity: they become null."""
    finite = {name: x if math.isfinite(x) else None for name, x in row.items()}
    return json.dumps(finite, allow_nan=False) + "\n"
