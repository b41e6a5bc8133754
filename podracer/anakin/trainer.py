"""Trains with Anakin: from a configuration to weights, metrics and a workdir."""

from functools import partial
from typing import Any, NamedTuple, Unpack

import jax
from etils import epath
from ml_collections import ConfigDict

from podracer import config as config_lib
from podracer.anakin.program import AnakinProgram, make_program
from podracer.anakin.state import AnakinState, make_start
from podracer.config import Config
from podracer.config.sizes import auto_cpu_devices, make_sizes
from podracer.distributed import mesh as mesh_lib
from podracer.distributed.processes import Processes
from podracer.training import builder, loop
from podracer.training.exchange import Exchange
from podracer.training.options import RunOptions
from podracer.training.start import compile_and_restore, open_session
from podracer.training.sweep_effects import check_effects
from podracer.training.sweep_report import make_report


def train(
    config: ConfigDict | Config,
    workdir: epath.PathLike | None = None,
    **options: Unpack[RunOptions],
) -> loop.Result:
    """Trains an agent in an environment written in JAX.

    Args:
      config: a ``ConfigDict``, as ``podracer.config.default_config`` returns it, or a ``Config``.
      workdir: folder of the run, or gs://BUCKET/FOLDER; a run that it holds is resumed. None writes
        nothing.
      **options: see ``training.options.Options``.

    Returns:
      The trained weights, all rows of metrics, the summary, and the trained policy.

    Raises:
      ConfigError: an impossible setting, before anything compiles.
      DivergedError: a loss or gradient became NaN or infinite.
      DriftError: devices no longer hold the same weights.
      PreemptedError: the run was asked to end by SIGTERM, and has been saved.
      DisplacedError: the workdir, in a bucket, belongs to another run now.
      SaveError: the run could not be saved or read back.
      TransientError: storage or the network still failed after several attempts.
    """
    parsed = config_lib.parse(config)
    with open_session("anakin", prepare, parsed, workdir, options) as (program, session, clock):
        exchange = Exchange(parsed, session.processes.count)
        compiled, state, progress = compile_and_restore(
            lambda: compile_program(program, parsed), session, clock, program.agent
        )
        result = loop.run(
            exchange.join(state, progress.update),
            progress,
            step=exchange.wrap(compiled.step),
            evaluate=compiled.evaluate,
            config=parsed,
            sizes=program.sizes,
            session=session,
            clock=clock,
            mesh=program.mesh,
            make_policy=partial(builder.make_policy, parsed, program.env),
            report=partial(make_report, parsed),
        )
        exchange.leave()
        return result


def prepare(config: Config, joined: Processes | None = None) -> AnakinProgram:
    """Builds a run's program on the devices that JAX finds, without compiling it.

    Args:
      config: the run's configuration.
      joined: the processes that share the run; None if this one is alone.

    Raises:
      ConfigError: an impossible setting.
    """
    joined = joined or Processes()
    # Hosts may have different numbers of cores, but must have the same number of devices.
    default = joined.broadcast(lambda: auto_cpu_devices(config, joined.count))
    # This precedes the environment: its constructor may use JAX, which fixes the number of devices.
    devices = mesh_lib.initialize_devices(
        config.cpu_devices or default, required=config.cpu_devices > 0
    )
    env = builder.make_environment(config)
    sizes = make_sizes(config, len(devices))
    program = make_program(config, env, sizes, mesh_lib.make_mesh(devices, sizes.num_groups))
    # Tracing finds shapes that don't fit each other, without compiling.
    program.step.trace(program.state)
    if config.sweep:
        check_effects(config, (program.step, program.evaluate), program.state)
    return program


class CompiledProgram(NamedTuple):
    """An Anakin program, compiled for its mesh.

    Attributes:
      state: the initial state.
      step: the compiled ``AnakinProgram.step``.
      evaluate: the compiled ``AnakinProgram.evaluate``.
    """

    state: AnakinState
    step: Any
    evaluate: Any


def compile_program(program: AnakinProgram, config: Config) -> CompiledProgram:
    """Makes the initial state on the devices, and compiles everything that a run calls."""
    state = program.init(make_start(config))
    step = program.step.lower(state).compile()
    evaluate = program.evaluate.lower(state).compile()
    return CompiledProgram(jax.block_until_ready(state), step, evaluate)
