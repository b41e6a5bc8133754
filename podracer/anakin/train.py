"""Trains by Anakin: from a configuration to weights, metrics and a workdir."""

import dataclasses
from typing import Any

import jax
from etils import epath

from podracer import config as config_lib
from podracer import envs, loop, metrics, prng, processes, trackers
from podracer import mesh as mesh_lib
from podracer.anakin.program import Program, State, make_program
from podracer.config import Config, Sizes
from podracer.processes import Processes
from podracer.session import Options, Session


@dataclasses.dataclass(frozen=True)
class Compiled:
    """An Anakin program, compiled for its mesh."""

    state: State
    step: Any
    evaluate: Any


def compile_program(program: Program, config: Config) -> Compiled:
    """Makes the first state on the devices and compiles what is called on it."""
    state = program.init(prng.keys(config.seeds))
    step = program.step.lower(state).compile()
    return Compiled(state, step, program.evaluate.lower(state).compile())


def prepare(config: Config, joined: Processes | None = None) -> tuple[Program, Sizes]:
    """Everything that can be wrong with a configuration is found here, before it compiles."""
    joined = joined or Processes()
    trackers.check(config.logging)
    # Hosts may have more cores than another, but must have as many devices.
    default = joined.from_first(lambda: config_lib.auto_cpu_devices(config, joined.count))
    # Before the environment: making one may already use JAX, which fixes the number of devices.
    devices = mesh_lib.start(config.cpu_devices or default, wanted=config.cpu_devices > 0)
    env = envs.make(config.env, config.env_kwargs, config.env_params)
    sizes = config_lib.sizes(config, len(devices))
    program = make_program(config, env, sizes, mesh_lib.make_mesh(devices))
    # Traced without compiling: shapes that don't fit each other are found by this.
    program.step.trace(jax.eval_shape(program.init, prng.keys(config.seeds)))
    return program, sizes


def train(config: Any, workdir: epath.PathLike | None = None, **options: Any) -> loop.Result:
    """Trains an agent on an environment written in JAX.

    Args:
      config: a ``ConfigDict`` as ``podracer.config.default_config`` gives it, or a ``Config``.
      workdir: folder of the run, or gs://BUCKET/FOLDER; a run that is there is continued. None
        writes nothing.
      **options: see ``session.Options``.

    Returns:
      The trained weights, all rows of metrics, and the summary.

    Raises:
      ConfigError: an impossible setting, before anything compiles.
      DivergedError: a loss or gradient became NaN or infinite.
      DriftError: devices no longer hold the same weights.
      PreemptedError: the run was asked to end by SIGTERM, and has been saved.
      SaveError: the run could not be saved or read back.
    """
    parsed, given = config_lib.parse(config), Options(workdir, **options)
    with processes.joined(given.address, parsed.hosts) as joined:
        return _train(parsed, given, joined)


def _train(config: Config, options: Options, joined: Processes) -> loop.Result:
    clock = metrics.Clock()
    with clock.measure("setup"):
        program, sizes = prepare(config, joined)
        session = Session("anakin", config, sizes, options, joined)
    layout = {
        "devices": f"{sizes.num_devices} x {jax.devices()[0].device_kind} "
        f"({jax.default_backend()})",
        "environments": f"{sizes.num_envs:,} = {sizes.num_devices} x {sizes.envs_per_device:,}",
    }
    with session:
        session.begin(list(program.mesh.devices.flat), layout)
        joined.reached(None, "compiling")
        with clock.measure("compile"):
            compiled = compile_program(program, config)
            jax.block_until_ready(compiled.state)
        state, progress = session.restore(compiled.state, clock)
        return loop.run(
            state,
            progress,
            step=compiled.step,
            evaluate=compiled.evaluate,
            config=config,
            sizes=sizes,
            session=session,
            clock=clock,
            mesh=program.mesh,
        )
