"""``python -m podracer.plan --config=FILE --topology=v5e:4x4 [--topology=...] [--json]``."""

import dataclasses
import importlib.metadata
import json
import os
import sys
from collections.abc import Sequence

import jax
from absl import flags

from podracer import config as config_lib
from podracer.config import Config
from podracer.errors import ConfigError, run_command
from podracer.monitoring.formatting import console
from podracer.plan import architectures, chips, estimate, table
from podracer.plan.estimate import Plan
from podracer.training import command_line

# Without these, libtpu looks for a TPU on this machine and locks it for one process.
ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5e-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
}


FLAGS: dict[str, command_line.Flag] = {
    "topology": (
        flags.DEFINE_multi_string,
        [],
        "TPU slice, as CHIP:SHAPE, such as v5e:4x4; repeat the flag for a table of slices. Chips: "
        f"{', '.join(chips.CHIPS)}; an unknown shape is answered with the known ones",
    ),
    "num_slices": (
        flags.DEFINE_integer,
        1,
        "Number of slices of each topology, connected by the data centre's network",
    ),
    "arch": (
        flags.DEFINE_string,
        "",
        "anakin, sebulba, or meta for podracer.anakin.meta; default: anakin or sebulba, as the "
        "environment needs",
    ),
    "envs_per_core": (
        flags.DEFINE_integer,
        0,
        "Environments of an agent per learner core, instead of the config's num_envs; scales a "
        "replay buffer",
    ),
    "json": (flags.DEFINE_bool, False, "Print JSON instead of tables"),
}


def make_plans(
    config: Config, topology: Sequence[str], num_slices: int, arch: str, envs_per_core: int
) -> list[Plan]:
    """Makes a plan for each topology; see ``FLAGS`` for the arguments.

    Raises:
      ConfigError: an argument is missing or impossible, or sizes don't fit a slice.
    """
    if not topology:
        raise ConfigError(
            "--topology is missing; specify for example --topology=v5e:4x4, or another of "
            f"{', '.join(chips.TOPOLOGIES)}"
        )
    if num_slices <= 0 or envs_per_core < 0:
        raise ConfigError(
            "--num_slices must be positive and --envs_per_core not negative, got "
            f"{num_slices} and {envs_per_core}"
        )
    architecture = architectures.resolve(config, arch)
    slices = [chips.get_slice(name, num_slices) for name in topology]
    env = architecture.make_env(config)
    plans, cache = [], {}
    for tpu_slice in slices:
        scaled = config
        if envs_per_core:
            learners = architecture.num_learner_devices(config, tpu_slice)
            scaled = config.scaled(envs_per_core * learners)
        plans.append(estimate.make_plan(scaled, architecture, env, tpu_slice, cache, _log))
    return plans


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(argv: Sequence[str]) -> None:
    """Makes and prints the plans of a command line; ``argv`` includes the program's name."""
    config, _, options = command_line.parse_config("plan", FLAGS, argv)
    as_json = options.pop("json")
    plans = make_plans(config_lib.parse(config), **options)
    if as_json:
        versions = {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}
        rows = [dataclasses.asdict(plan) for plan in plans]
        print(json.dumps({"versions": versions, "plans": rows}, indent=2))
        return
    printer = console()
    if len(plans) == 1:
        table.print_plan(plans[0], printer)
    else:
        table.print_scaling(plans, printer)


if __name__ == "__main__":
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    # Nothing is executed, so this machine's accelerators are not used.
    jax.config.update("jax_platforms", "cpu")
    sys.exit(run_command(lambda: main(sys.argv)))
