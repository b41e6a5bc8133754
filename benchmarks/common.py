"""What benchmarks do alike."""

import argparse
import importlib.metadata
import importlib.util
from typing import Any

from podracer import config as config_lib


def read_config(path: str | None) -> Any:
    """The config of a file, or the default."""
    if path is None:
        return config_lib.default_config()
    spec = importlib.util.spec_from_file_location("benchmark_config", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config()


def override(config: Any, args: argparse.Namespace, *keys: str) -> None:
    """Sets what was given on the command line."""
    for key in keys:
        if getattr(args, key) is not None:
            config[key] = getattr(args, key)


def versions(*packages: str) -> dict[str, str]:
    """Those that a measurement was made with."""
    return {name: importlib.metadata.version(name) for name in packages}
