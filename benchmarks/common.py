"""Functions that the benchmarks share."""

import argparse
import importlib.util
from typing import Any

from podracer import config as config_lib
from podracer.storage import versions as versions_lib


def read_config(path: str | None) -> Any:
    """The config that a config file returns; the default config if ``path`` is None."""
    if path is None:
        return config_lib.default_config()
    spec = importlib.util.spec_from_file_location("benchmark_config", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"--config={path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config()


def override(config: Any, args: argparse.Namespace, *keys: str) -> None:
    """Replaces the settings ``keys`` of a config by command line arguments that are not None."""
    for key in keys:
        if getattr(args, key) is not None:
            config[key] = getattr(args, key)


def versions(*packages: str) -> dict[str, str | None]:
    """The versions of packages; None for one that is not installed, as podracer on PYTHONPATH."""
    installed = versions_lib.versions()
    return {name: installed.get(name) for name in packages}
