"""What a run is made with: versions of packages, and the commit of a clone."""

import functools
import importlib.metadata
import platform
import shutil
import subprocess
from contextlib import suppress

from podracer.errors import DISTRIBUTION, PACKAGE

PACKAGES = (
    "jax", "jaxlib", "flax", "optax", "rlax", "distrax", "chex", "mctx", "gymnax", "envpool",
    "gymnasium", "brax", "craftax", "jumanji", "navix", "pgx", "playground", "xminigrid", "grpcio",
    "orbax-checkpoint", "numpy",
)  # fmt: skip


def versions() -> dict[str, str]:
    """Versions of Python, podracer and the packages that matter to a run, if they are installed,
    and the "commit" of podracer, if it is in a clone."""
    found = {"python": platform.python_version()}
    for name, package in (("podracer", DISTRIBUTION), *zip(PACKAGES, PACKAGES, strict=True)):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(package)
    if commit():
        found["commit"] = commit()
    return found


@functools.cache
def commit() -> str:
    """The commit of the clone that podracer is in, with "-dirty" if files differ from it; "" if
    there is none."""
    if not (PACKAGE.parent / ".git").exists() or not shutil.which("git"):
        return ""
    command = ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    found = subprocess.run(
        ["git", "-C", str(PACKAGE.parent), *command], capture_output=True, text=True
    )
    return found.stdout.strip()
