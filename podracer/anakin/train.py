"""Trains by Anakin: from a configuration to weights, metrics and a workdir."""

import dataclasses
import os
from typing import Any

import jax

from podracer import config as config_lib
from podracer import envs, loop, metrics, prng
from podracer import mesh as mesh_lib
from podracer.anakin.program import Program, State, lower_step, make_program
from podracer.config import Config, Sizes


@dataclasses.dataclass(frozen=True)
class Compiled:
    """An Anakin program, compiled for its mesh."""

    state: State
    step: Any
    evaluate: Any


def compile_program(program: Program, config: Config) -> Compiled:
    """Makes the first state on the devices and compiles what is called on it."""
    state = jax.jit(program.init)(prng.key(config.seed))
    step = lower_step(program, state).compile()
    evaluate = jax.jit(program.evaluate).lower(state).compile()
    return Compiled(state, step, evaluate)


def prepare(config: Config) -> tuple[Program, Sizes]:
    """Everything that can be wrong with a configuration is found here, before it compiles."""
    # Before the environment: making one may already use JAX, which fixes the number of devices.
    devices = mesh_lib.start(
        config.cpu_devices or config_lib.auto_cpu_devices(config), wanted=config.cpu_devices > 0
    )
    env = envs.make(config.env, config.env_kwargs, config.env_params)
    sizes = config_lib.sizes(config, len(devices))
    program = make_program(config, env, sizes, mesh_lib.make_mesh(devices))
    # Traced without compiling: shapes that don't fit each other are found by this.
    jax.eval_shape(program.step, jax.eval_shape(program.init, prng.key(config.seed)))
    return program, sizes


def train(
    config: Any, workdir: str | os.PathLike[str] | None = None, *, quiet: bool = False
) -> loop.Result:
    """Trains an agent on an environment written in JAX.

    Args:
      config: a ``ConfigDict`` as ``podracer.config.default_config`` gives it, or a ``Config``.
      workdir: folder for config.json, metrics.jsonl and summary.json; None writes nothing.
      quiet: print nothing.

    Returns:
      The trained weights, all rows of metrics, and the summary.

    Raises:
      ConfigError: an impossible setting, before anything compiles.
      DivergedError: a loss or gradient became NaN or infinite.
    """
    config = config_lib.parse(config)
    clock = metrics.Clock()
    with clock.measure("setup"):
        program, sizes = prepare(config)
    # Only now: a run that can't start must not move an earlier one aside.
    writer = metrics.Writer(workdir, quiet=quiet)
    writer.begin(
        config,
        sizes,
        list(program.mesh.devices.flat),
        {
            "devices": f"{sizes.num_devices} x {jax.devices()[0].device_kind} "
            f"({jax.default_backend()})",
            "environments": f"{sizes.num_envs:,} = {sizes.num_devices} x {sizes.envs_per_device:,}",
        },
    )
    with clock.measure("compile"):
        compiled = compile_program(program, config)
        jax.block_until_ready(compiled.state)
    return loop.run(
        compiled.state,
        step=compiled.step,
        evaluate=compiled.evaluate,
        config=config,
        sizes=sizes,
        writer=writer,
        clock=clock,
    )
