"""Small pieces that several tests put runs together from."""

from typing import Any

import jax

from podracer import config as config_lib
from podracer import envs, prng
from podracer import mesh as mesh_lib
from podracer.anakin.program import Program, State, make_program
from podracer.config import Config, Sizes


def make_config(**changes: Any) -> Config:
    """A small config, which compiles soon: one gradient step an update.

    "network.core" and the like reach into sections by a double underscore.
    """
    config = config_lib.default_config()
    config.num_envs, config.unroll_length, config.total_steps = 8, 8, 10_000
    config.num_epochs = config.num_minibatches = 1
    config.network.hidden, config.network.core_size = (16,), 16
    config.updates_per_call, config.evaluation.episodes = 1, 8
    with config.unlocked():
        for key, value in changes.items():
            section, _, name = key.rpartition("__")
            (config[section] if section else config)[name] = value
    return config_lib.parse(config)


def make_run(config: Config, num_devices: int = 1) -> tuple[Program, Sizes, State, Any]:
    """Program, sizes, first state and compiled step of a config on that many devices."""
    env = envs.make(config.env, config.env_kwargs, config.env_params)
    sizes = config_lib.sizes(config, num_devices)
    mesh = mesh_lib.make_mesh(jax.devices()[:num_devices])
    program = make_program(config, env, sizes, mesh)
    state = program.init(prng.key(config.seed))
    # Tests look at states again: not donated.
    return program, sizes, state, jax.jit(program.step)
