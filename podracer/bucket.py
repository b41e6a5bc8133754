"""Workdirs in a bucket of Google Cloud Storage, ``gs://bucket/run``: what is different there.

Objects can't be appended to, locked or renamed. So a run writes its files into a local folder, and
what is new is copied into the bucket: before each checkpoint, at the end, and now and then for
those who look on. Checkpoints go there without this, by Orbax.
"""

import contextlib
import errno
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

from podracer.errors import ConfigError, SaveError

# Holds a workdir; a file of this name is never copied.
LOCK = "lock"
# Between two copies for those who look on: at least so long, and so many times what the last took.
COPY_S, COPY_TIMES = 30.0, 20.0


def locate(path: epath.PathLike) -> epath.Path:
    """The path of a workdir, in a folder or a bucket.

    Raises:
      ConfigError: it is in neither, or the packages that reach a bucket are not installed.
    """
    text = os.fspath(path)
    scheme, separator, rest = text.partition(":/")
    if not separator or "/" in scheme:
        return epath.Path(path)
    # pathlib.Path takes a slash away.
    bucket, _, folder = rest.strip("/").partition("/")
    if scheme != "gs" or not bucket or not folder:
        raise ConfigError(
            f"workdir {text!r} must be a folder or gs://BUCKET/FOLDER; no other store is supported"
        )
    # Only to see that they are there. What Google shares between packages no type checker finds.
    try:
        import gcsfs  # noqa: F401
        import google.cloud.storage  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            f"workdir {text!r} needs the packages of a bucket: pip install 'podracer[gcs]'"
        ) from error
    # Else a process that lists a folder never sees what others write there afterwards.
    fsspec.config.conf.setdefault("gcs", {}).setdefault("use_listings_cache", False)
    return epath.Path(f"gs://{bucket}/{folder}")


def resolve(path: epath.PathLike) -> epath.Path:
    """The absolute path of a workdir. Raises ``ConfigError`` as ``locate`` does."""
    path = locate(path)
    return path if holds(path) else path.resolve()


def holds(path: epath.PathLike) -> bool:
    """Whether a path, of ``locate``, is in a bucket."""
    return os.fspath(path).startswith("gs://")


@contextlib.contextmanager
def reachable(path: epath.PathLike) -> Iterator[None]:
    """Makes a ``ConfigError`` of what a bucket refuses inside, but for files that are not there."""
    if not holds(path):
        yield
        return
    try:
        with _one_error():
            yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(f"{path} can't be used: {error.strerror}") from error


def read(path: epath.Path) -> str:
    """A file's text. Raises ``ConfigError`` if a bucket can't be read from."""
    with reachable(path):
        return path.read_text()


def move(source: epath.Path, target: epath.Path, last: str = "") -> None:
    """Renames a folder. In a bucket its objects are copied first and deleted afterwards.

    Args:
      source: the folder.
      target: its new name; must not exist.
      last: file of the folder that is deleted last.
    """
    if not holds(source):
        target.parent.mkdir(parents=True, exist_ok=True)
        source.rename(target)
        return
    with _one_error():
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

    The process that begins last holds the workdir, and one that held it before ends when it next
    copies: so a run that was killed goes on at once, and no two write for long.

    Attributes:
      local: the folder.
    """

    def __init__(self, path: epath.Path, say: Callable[[str], None]):
        """Makes the folder.

        Args:
          path: of the workdir.
          say: is told, in a line, of what goes wrong without ending the run.
        """
        self._path, self._say = path, say
        self._holder = f"{socket.gethostname()}, process {os.getpid()} ({uuid.uuid4().hex})"
        self._held = False
        self._copied: dict[str, tuple[int, int]] = {}
        self._due = 0.0
        self.local = pathlib.Path(tempfile.mkdtemp(prefix="podracer-")) / path.name
        self.local.mkdir()
        with _one_error():
            self._files = _file_system()

    def hold(self) -> None:
        """Takes hold of the workdir. Raises ``OSError`` if the bucket can't be written to."""
        if self._held:
            return
        from google.cloud import storage  # pyright: ignore[reportAttributeAccessIssue]

        with _one_error():
            # As Orbax does for each checkpoint, which needs a role that writing does not.
            storage.Client().get_bucket(self._path.parts[2])
            before = self._read_lock()
            self._write_lock()
        self._held = True
        if before is not None:
            self._say(f"{self._path} was held by {before}; if that still runs, it will end")

    def _read_lock(self) -> str | None:
        try:
            return self._files.cat_file(f"{self._path}/{LOCK}").decode()
        except FileNotFoundError:
            return None

    def _write_lock(self) -> None:
        self._files.pipe_file(f"{self._path}/{LOCK}", self._holder.encode())

    def fetch(self) -> None:
        """Copies the files, but no folders, that are in the workdir. Raises ``OSError``."""
        with _one_error():
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
        """What tells that a file has changed."""
        stat = (self.local / name).stat()
        return stat.st_size, stat.st_mtime_ns

    def _new(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """Files that have changed since they were copied."""
        for file in sorted(self.local.rglob("*")):
            name = str(file.relative_to(self.local))
            if file.is_file() and not file.is_symlink() and name != LOCK:
                stamp = self._stamp(name)
                if self._copied.get(name) != stamp:
                    yield name, stamp

    def copy(self) -> bool:
        """Copies what is new.

        Returns:
          Whether the workdir had been deleted, and all was copied.

        Raises:
          OSError: the bucket can't be written to.
          SaveError: another process holds the workdir now.
        """
        start = time.monotonic()
        try:
            with _one_error():
                holder = self._read_lock()
                if holder not in (None, self._holder):
                    raise SaveError(f"{self._path} now belongs to another run, of {holder}")
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
        """Copies for those who look on, if that is some time ago. Raises ``SaveError`` as ``copy``
        does."""
        if time.monotonic() < self._due:
            return
        try:
            self.copy()
        except OSError as error:
            self._say(f"{self._path} is not up to date, training goes on: {error.strerror}")

    def close(self) -> None:
        """Copies for the last time, if it is held, and lets go of the workdir. What can't be copied
        stays in the local folder, and is told of."""
        try:
            if self._held:
                self.copy()
                with _one_error():
                    self._files.rm_file(f"{self._path}/{LOCK}")
        except (OSError, SaveError) as error:
            self._say(f"what {self._path} lacks is in {self.local}: {error}")
        else:
            shutil.rmtree(self.local.parent)


def _file_system() -> Any:
    return fsspec.filesystem("gcs")


@contextlib.contextmanager
def _one_error() -> Iterator[None]:
    """What a network throws through libraries can't be listed: here it becomes ``OSError``."""
    try:
        yield
    except (FileNotFoundError, ConfigError, SaveError):
        raise
    except Exception as error:
        text = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise OSError(errno.EIO, text.replace("\n", " ")) from error
