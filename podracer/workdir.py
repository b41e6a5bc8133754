"""The files in a run's folder: their names, and how they are read back. It needs nothing of JAX."""

import json
import math
import os
import pathlib
from typing import Any

from podracer.errors import ConfigError

METRICS, CONFIG, SUMMARY = "metrics.jsonl", "config.json", "summary.json"
LEARNING_CURVE = "learning_curve.png"


def read_config(workdir: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of ``config.json``.

    Raises:
      ConfigError: the folder is no run.
    """
    path = pathlib.Path(workdir)
    try:
        content = json.loads((path / CONFIG).read_text(encoding="utf-8"))
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


def read_rows(workdir: str | os.PathLike[str]) -> list[dict[str, float]]:
    """The rows of ``metrics.jsonl``, null being NaN again.

    A last line without its end is left out: the run was killed while it wrote, or writes now.

    Raises:
      ConfigError: there is no row yet, or a line is none.
    """
    path = pathlib.Path(workdir) / METRICS
    if not path.is_file():
        raise ConfigError(f"{str(workdir)!r} has no {METRICS}")
    *lines, _ = path.read_text(encoding="utf-8").split("\n")
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path} is damaged: line {number} is no JSON") from error
        if not (isinstance(row, dict) and {"step", "wall_time"} <= row.keys()):
            raise ConfigError(f"{path} is damaged: line {number} lacks 'step' or 'wall_time'")
        rows.append({name: math.nan if x is None else x for name, x in row.items()})
    if not rows:
        raise ConfigError(f"{path} has no rows; has the run just begun?")
    return rows
