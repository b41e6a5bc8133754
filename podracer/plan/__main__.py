"""``python -m podracer.plan --config=FILE --topology=v5e:4x4 [--topology=...] [--json]``."""

import dataclasses
import importlib.metadata
import json
import os
import sys
from collections.abc import Sequence

import jax
from absl import flags
from rich.console import Console

from podracer import cli
from podracer import config as config_lib
from podracer.config import Config
from podracer.errors import ConfigError
from podracer.plan import chips, estimate, programs, table
from podracer.plan.estimate import Plan

# libtpu looks for the machine's TPU unless it is told what there is, and keeps it to one process.
ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5e-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
}


def _flags() -> flags.FlagValues:
    values = flags.FlagValues()
    flags.DEFINE_multi_string(
        "topology", [], "A slice, as v5e:4x4; several give a scaling table", flag_values=values
    )
    flags.DEFINE_integer("num_slices", 1, "That many of each", flag_values=values)
    flags.DEFINE_string(
        "arch", "", "anakin or sebulba; default: by the environment", flag_values=values
    )
    flags.DEFINE_integer(
        "envs_per_core",
        0,
        "Environments for each core that learns, in place of the config's num_envs",
        flag_values=values,
    )
    flags.DEFINE_bool("json", False, "Print JSON instead of tables", flag_values=values)
    return values


def plans(config: Config, values: flags.FlagValues) -> list[Plan]:
    """A plan for each slice that a command line names."""
    if not values.topology:
        raise ConfigError(
            f"--topology is missing; known are {', '.join(chips.TOPOLOGIES)}, as --topology=v5e:4x4"
        )
    if values.num_slices <= 0 or values.envs_per_core < 0:
        raise ConfigError(
            "--num_slices must be positive and --envs_per_core not negative, got "
            f"{values.num_slices} and {values.envs_per_core}"
        )
    arch = programs.architecture(config, values.arch)
    slices = [chips.get_slice(name, values.num_slices) for name in values.topology]
    env = programs.make_env(config, arch)
    made, known = [], {}
    for where in slices:
        here = config
        if values.envs_per_core:
            learners = programs.num_learners(config, arch, where)
            here = dataclasses.replace(config, num_envs=values.envs_per_core * learners)
        made.append(estimate.make(here, arch, env, where, known))
    return made


def main(argv: Sequence[str]) -> None:
    """Plans as a command line says, and prints it."""
    values = _flags()
    config, _ = cli.parse_config(argv, values)
    made = plans(config_lib.parse(config), values)
    if values.json:
        versions = {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}
        rows = [dataclasses.asdict(plan) for plan in made]
        print(json.dumps({"versions": versions, "plans": rows}, indent=2))
        return
    console = Console(width=None if sys.stdout.isatty() else 160)
    if len(made) == 1:
        table.one(made[0], console)
    else:
        table.scaling(made, console)


if __name__ == "__main__":
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    # Whatever devices this machine has: nothing is run here.
    jax.config.update("jax_platforms", "cpu")
    sys.exit(cli.exit_code(lambda: main(sys.argv)))
