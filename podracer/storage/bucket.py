"""Paths of workdirs, in folders and in buckets of Google Cloud Storage (``gs://bucket/run``).

Objects in a bucket can't be appended to, locked or renamed. A run therefore writes its files into a
local folder, and a ``Mirror`` copies what has changed into the bucket: before each checkpoint, at
the end, and from time to time so that progress can be followed. Orbax writes checkpoints directly.
"""

import errno
import logging
import os
import pathlib
import shutil
import socket
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import fsspec
import fsspec.config
from etils import epath

from podracer.errors import ConfigError, DisplacedError, missing_extra
from podracer.storage import retry

# Names the process that holds a workdir; a file of this name is never copied.
LOCK = "lock"
# The time between two copies that only show progress: at least this many seconds, and at least this
# many times the duration of the last copy.
COPY_S, COPY_TIMES = 30.0, 20.0


def locate(path: epath.PathLike) -> epath.Path:
    """The path of a workdir, in a folder or a bucket.

    Raises:
      ConfigError: it is in neither, or the packages that access a bucket are not installed.
    """
    text = os.fspath(path)
    scheme, separator, rest = text.partition(":/")
    if not separator or "/" in scheme:
        return epath.Path(path)
    # pathlib.Path turns gs:// into gs:/.
    bucket, _, folder = rest.strip("/").partition("/")
    if scheme != "gs" or not bucket or not folder:
        raise ConfigError(
            f"workdir {text!r} must be a folder or gs://BUCKET/FOLDER; no other store is supported"
        )
    # Imported only to check that they are installed. Type checkers do not find google.cloud, a
    # namespace that several packages share.
    try:
        import gcsfs  # noqa: F401
        import google.cloud.storage  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise missing_extra("gcs", f"workdir {text!r}") from error
    # Otherwise a process that lists a folder never sees what others write there afterwards.
    fsspec.config.conf.setdefault("gcs", {}).setdefault("use_listings_cache", False)
    logging.getLogger("gcsfs").addFilter(_is_not_raised)
    return epath.Path(f"gs://{bucket}/{folder}")


def _is_not_raised(record: logging.LogRecord) -> bool:
    """Whether gcsfs only logs this. It logs the traceback of each request that fails, and raises
    the error as well, which is retried and reported in one line."""
    return record.module != "retry"


def resolve(path: epath.PathLike) -> epath.Path:
    """The absolute path of a workdir. Raises ``ConfigError`` as ``locate`` does."""
    path = locate(path)
    return path if holds(path) else path.resolve()


def holds(path: epath.PathLike) -> bool:
    """Whether a path, of ``locate``, is in a bucket."""
    return os.fspath(path).startswith("gs://")


def exists(path: epath.Path) -> bool:
    """Whether a file or folder exists. Unlike ``Path.exists``, which answers no after any error,
    this raises errors that leave the question open."""
    if holds(path):
        return path.exists()
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def read(path: epath.Path, errors: str = "strict") -> str:
    """A file's text.

    Args:
      path: the file.
      errors: how bytes that are not UTF-8 are handled, as in ``bytes.decode``.

    Raises:
      ConfigError: permission to read it is missing.
      TransientError: it can't be read at present.
      OSError: there is no such file.
      UnicodeDecodeError: it is not valid text.
    """
    return retry.call(f"{path} can't be read", path.read_bytes).decode(errors=errors)


def write(path: epath.Path, text: str) -> None:
    """Writes a file so that a reader finds either its old content or the new one, even after a
    power failure. Storage errors are raised unchanged."""
    if holds(path):
        path.write_text(text)
        return
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    _sync_folder(path.parent)


def _sync_folder(path: epath.Path) -> None:
    """Makes the names of files durable, on file systems that support it."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
    finally:
        os.close(folder)


def move(source: epath.Path, target: epath.Path, last: str = "") -> None:
    """Renames a folder. In a bucket its objects are copied first and deleted afterwards.

    Args:
      source: the folder.
      target: its new name; must not exist.
      last: file of the folder that is deleted last.

    Raises:
      ConfigError: permission to move it is missing.
      TransientError: it can't be moved at present.
    """

    def rename() -> None:
        if holds(source):
            _move_objects(source, target, last)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            source.rename(target)

    retry.call(f"{source} can't be moved to {target}", rename)


def _move_objects(source: epath.Path, target: epath.Path, last: str) -> None:
    files = _file_system()
    folder = str(source).removeprefix("gs://")
    names = [name.removeprefix(folder) for name in files.find(folder)]
    names = [name for name in names if name != f"/{LOCK}"]
    files.copy([folder + name for name in names], [f"{target}{name}" for name in names])
    for group in ([x for x in names if x != f"/{last}"], [f"/{last}"]):
        if found := [folder + name for name in group if name in names]:
            files.rm(found)


class Mirror:
    """A local folder whose new files are copied into a workdir in a bucket.

    The process that started last holds the workdir. A process that held it before notices this when
    it copies next, and ends. A run that was killed can therefore be resumed immediately, and two
    processes never write for long.

    Methods raise the storage errors of the store's client library, see ``retry``.

    Attributes:
      local: the folder.
    """

    def __init__(self, path: epath.Path, log: Callable[[str], None]):
        """Makes the local folder.

        Args:
          path: path of the workdir.
          log: called with a line of text if something goes wrong without ending the run.
        """
        self._path, self._log = path, log
        self._holder = f"{socket.gethostname()}, process {os.getpid()} ({uuid.uuid4().hex})"
        self._held = False
        self._copied: dict[str, tuple[int, int]] = {}
        self._due = 0.0
        self.local = pathlib.Path(tempfile.mkdtemp(prefix="podracer-")) / path.name
        self.local.mkdir()

    def hold(self) -> None:
        """Takes the workdir over from the process that holds it, if there is one."""
        if self._held:
            return
        from google.cloud import storage  # pyright: ignore[reportAttributeAccessIssue]

        # Orbax does this for each checkpoint. It needs a permission that writing does not need.
        storage.Client().get_bucket(self._path.parts[2])
        before = self._read_lock()
        self._write_lock()
        self._held = True
        if before not in (None, self._holder):
            self._log(f"{self._path} was held by {before}, which will end if it is still running")

    def _read_lock(self) -> str | None:
        try:
            return self._files.cat_file(f"{self._path}/{LOCK}").decode()
        except FileNotFoundError:
            return None

    def _write_lock(self) -> None:
        self._files.pipe_file(f"{self._path}/{LOCK}", self._holder.encode())

    @property
    def _files(self) -> Any:
        return _file_system()

    def fetch(self) -> None:
        """Copies the files, but not the folders, of the workdir into the local folder."""
        try:
            entries = self._files.ls(str(self._path), detail=True)
        except FileNotFoundError:
            return
        for entry in entries:
            name = entry["name"].rpartition("/")[2]
            if entry["type"] == "file" and name != LOCK:
                self._files.get_file(entry["name"], str(self.local / name))
                self._copied[name] = self._stamp(name)

    def _stamp(self, name: str) -> tuple[int, int]:
        """A file's size and modification time."""
        stat = (self.local / name).stat()
        return stat.st_size, stat.st_mtime_ns

    def _new(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """The names and stamps of files that have changed since they were copied."""
        for file in sorted(self.local.rglob("*")):
            name = str(file.relative_to(self.local))
            if file.is_file() and not file.is_symlink() and name != LOCK:
                stamp = self._stamp(name)
                if self._copied.get(name) != stamp:
                    yield name, stamp

    def copy(self) -> bool:
        """Copies new and changed files into the bucket.

        Returns:
          Whether the workdir had been deleted, so that everything was copied.

        Raises:
          DisplacedError: another process holds the workdir now.
        """
        start = time.monotonic()
        try:
            holder = self._read_lock()
            if holder not in (None, self._holder):
                raise DisplacedError(f"{self._path} now belongs to another run, that of {holder}")
            if holder is None:
                self._copied.clear()
                self._write_lock()
            for name, stamp in self._new():
                self._files.put_file(str(self.local / name), f"{self._path}/{name}")
                self._copied[name] = stamp
        finally:
            now = time.monotonic()
            self._due = now + max(COPY_S, COPY_TIMES * (now - start))
        return holder is None

    def copy_if_due(self) -> None:
        """Copies if the last copy is old enough, so that progress can be followed. Raises
        ``DisplacedError`` as ``copy`` does; a storage error is logged."""
        if time.monotonic() < self._due:
            return
        try:
            self.copy()
        except Exception as error:
            if retry.fault(error) is None:
                raise
            self._log(f"{self._path} is not up to date, training continues: {retry.reason(error)}")

    def close(self) -> None:
        """Copies for the last time and releases the workdir, if it is held. Files that can't be
        copied stay in the local folder, which is logged."""
        try:
            if self._held:
                self.copy()
                self._files.rm_file(f"{self._path}/{LOCK}")
        except Exception as error:
            # Any error, because the run has ended and these files exist nowhere else.
            self._log(f"files that {self._path} lacks are in {self.local}: {retry.reason(error)}")
        else:
            shutil.rmtree(self.local.parent)


def _file_system() -> Any:
    return fsspec.filesystem("gcs")
