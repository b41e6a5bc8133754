"""Functions that several tests build runs with."""

import functools
import operator
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from podracer import config as config_lib
from podracer.anakin.program import AnakinProgram, make_program
from podracer.anakin.state import AnakinState, make_start
from podracer.config import Config
from podracer.config.sizes import Sizes, make_sizes
from podracer.distributed import mesh as mesh_lib
from podracer.training import builder
from podracer.types import ENVS_AXIS, Trajectory

# The repository.
ROOT = pathlib.Path(__file__).parent.parent


def is_one_error(text: str) -> bool:
    """Whether a command has printed one error, in one line, and below it where it is explained."""
    return re.fullmatch(r"error: .+\nSee docs/troubleshooting\.md#[\w-]+\n", text) is not None


def make_config(**changes: Any) -> Config:
    """A small config that compiles quickly: one gradient step per update.

    A double underscore separates a section from its keys, as in ``network__core="gru"``.
    """
    config = config_lib.default_config()
    config.num_envs, config.unroll_length, config.total_steps = 8, 8, 10_000
    config.num_epochs = config.num_minibatches = 1
    config.network.hidden, config.network.core_size = (16,), 16
    config.updates_per_call, config.evaluation.episodes = 1, 8
    with config.unlocked():
        for key, value in changes.items():
            *sections, name = key.split("__")
            functools.reduce(operator.getitem, sections, config)[name] = value
    return config_lib.parse(config)


def make_anakin(config: Config, num_devices: int = 1) -> tuple[AnakinProgram, Sizes]:
    """Program and sizes of a config on ``num_devices`` devices."""
    env = builder.make_environment(config)
    sizes = make_sizes(config, num_devices)
    mesh = mesh_lib.make_mesh(jax.devices()[:num_devices])
    return make_program(config, env, sizes, mesh), sizes


def make_run(config: Config, num_devices: int = 1) -> tuple[AnakinProgram, Sizes, AnakinState, Any]:
    """The same, and the initial state and jitted step."""
    program, sizes = make_anakin(config, num_devices)
    state = program.init(make_start(config))
    # Not donated: tests use states again.
    return program, sizes, state, jax.jit(program.step)


def join(trajectories: Sequence[Trajectory]) -> Trajectory:
    """The environments of several trajectories side by side, in numpy."""
    return jax.tree.map(
        lambda axis, *trees: jax.tree.map(lambda *x: np.concatenate(x, axis), *trees),
        ENVS_AXIS,
        *jax.device_get(list(trajectories)),
    )
