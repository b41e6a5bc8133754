"""What errors say about a run that another version of podracer has written.

A checkpoint and ``config.json`` both state the version that wrote them. The layout of checkpoints
has no version number of its own: the changelog lists what changed from one version to the next.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from podracer.errors import ConfigError
from podracer.storage.versions import versions


def note(wrote: str | None) -> str:
    """The end of an error about a run that this version can't use; "" if this version wrote it.

    Args:
      wrote: the version that wrote the run; None if that is not known.
    """
    here = versions().get("podracer")
    if wrote is None or here is None or wrote == here:
        return ""
    return (
        f"; podracer {wrote} wrote it and this is podracer {here}: see Upgrading in podracer's "
        "CHANGELOG.md for what changed in between"
    )


@contextmanager
def explained(wrote: str | None) -> Iterator[None]:
    """Adds ``note(wrote)`` to a ``ConfigError`` that is raised inside."""
    try:
        yield
    except ConfigError as error:
        if text := note(wrote):
            raise ConfigError(f"{error}{text}") from error
        raise
