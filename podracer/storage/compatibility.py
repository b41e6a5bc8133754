"""Whether a config may resume a run: which settings differ, and which of them must not."""

from collections.abc import Collection, Mapping
from typing import Any

from etils import epath

from podracer.errors import ConfigError
from podracer.storage.workdir import read_config

# Settings that may not change when a run is resumed: it would be another run, or the state would
# not fit. Agents add further ones, see ``agents``.
FIXED = (
    "architecture", "env", "env_kwargs", "env_params", "observed", "agent", "seed", "num_seeds",
    "sweep", "population", "selection.every", "averaging.groups", "num_envs", "unroll_length",
    "network", "optimizer", "normalize_observations", "normalize_rewards",
    "lpg.agents", "lpg.units", "lpg.predictions", "lpg.embedding",
)  # fmt: skip


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A config's values by their dotted keys; tuples become lists, as in JSON."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = list(value) if isinstance(value, tuple) else value
    return flat


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ, with both values; None stands for a missing key."""
    before, after = flatten(old), flatten(new)
    keys = sorted(before.keys() | after.keys())
    return {k: (before.get(k), after.get(k)) for k in keys if before.get(k) != after.get(k)}


def check_same_run(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    defaults: Mapping[str, Any],
    fixed: Collection[str] = (),
) -> list[str]:
    """Checks that a config may resume a run, and returns a line for each value that changes.

    Args:
      old: the config of the run so far.
      new: the config to resume it with.
      defaults: the default config; a setting that is newer than the run had its default value.
      fixed: dotted keys that may not change, in addition to ``FIXED``.

    Raises:
      ConfigError: a value differs that may not.
    """
    lines = []
    prefixes = tuple(f"{key}." for key in (*FIXED, *fixed))
    old = {**flatten(defaults), **flatten(old)}
    for key, (before, after) in differences(old, new).items():
        if f"{key}.".startswith(prefixes):
            raise ConfigError(
                f"the run in the workdir has {key}={before!r}, not {after!r}, which can't change "
                "when it is resumed; specify another --workdir, or --restart to move it aside and "
                "start over"
            )
        lines.append(f"{key} was {before!r} and is now {after!r}")
    return lines


def check_num_agents(init_from: epath.PathLike, num_agents: int) -> None:
    """Raises ``ConfigError`` if the run to start from has another number of agents."""
    content = read_config(init_from)
    # Before there were sweeps, each agent had its seed.
    other = content["sizes"].get("num_agents") or content["config"].get("num_seeds", 1)
    if other != num_agents:
        raise ConfigError(
            f"--init_from={init_from} is a run of {other} agents, and this one trains "
            f"{num_agents}; each agent starts from one agent of the other run, so train as many"
        )
