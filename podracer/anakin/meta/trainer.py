"""Trains an update rule: from a configuration to a rule, metrics and a workdir."""

from typing import Any, NamedTuple, Unpack, cast

import jax
from etils import epath
from ml_collections import ConfigDict

from podracer import config as config_lib
from podracer.anakin.meta.program import MetaProgram, MetaState, make_program
from podracer.config import Config
from podracer.distributed import mesh as mesh_lib
from podracer.distributed.processes import Processes
from podracer.training import builder, loop
from podracer.training.options import RunOptions
from podracer.training.start import compile_and_restore, open_session


def train(
    config: ConfigDict | Config,
    workdir: epath.PathLike | None = None,
    **options: Unpack[RunOptions],
) -> loop.Result:
    """Learns an update rule in grid worlds.

    Args:
      config: as that of ``podracer.anakin.train``, with "grid:5x5" or another size as ``env``.
        ``num_envs``, ``unroll_length`` and the optimizer are those of each agent, ``lpg`` says how
        the rule is learned, and ``total_steps`` counts the steps of all agents.
      workdir: as that of ``podracer.anakin.train``.
      **options: see ``training.options.Options``.

    Returns:
      The rule as ``weights``, all rows of metrics, and the summary. There is no ``policy``.

    Raises:
      as ``podracer.anakin.train``.
    """
    parsed = config_lib.parse(config)
    with open_session("meta", prepare, parsed, workdir, options) as (program, session, clock):
        # A run can start from the rule of another one (``init_from``), as others do from weights.
        agent = program.agent._replace(target=None)
        compiled, state, progress = compile_and_restore(
            lambda: _compile(program, parsed), session, clock, agent
        )
        return loop.run(
            state,
            progress,
            step=compiled.step,
            evaluate=compiled.evaluate,
            config=parsed,
            sizes=program.sizes,
            session=session,
            clock=clock,
            mesh=program.mesh,
            make_policy=lambda *_: cast(Any, None),
        )


def prepare(config: Config, joined: Processes | None = None) -> MetaProgram:
    """Builds a run's program on the devices that JAX finds, without compiling it.

    Args:
      config: the run's configuration.
      joined: the processes that share the run; None if this one is alone.

    Raises:
      ConfigError: an impossible setting, or agents that can't be spread over the devices.
    """
    joined = joined or Processes()
    devices = mesh_lib.initialize_devices(config.cpu_devices or 1, required=config.cpu_devices > 0)
    program = make_program(config, len(devices), mesh_lib.make_mesh(devices, len(devices)))
    program.step.trace(program.state)
    return program


class _Compiled(NamedTuple):
    """The initial state, and the program's functions, compiled."""

    state: MetaState
    step: Any
    evaluate: Any


def _compile(program: MetaProgram, config: Config) -> _Compiled:
    key = builder.run_keys([config.seed], program.devices[0].platform)
    state = program.init(key)
    step = program.step.lower(state).compile()
    evaluate = program.evaluate.lower(state).compile()
    return _Compiled(jax.block_until_ready(state), step, evaluate)
