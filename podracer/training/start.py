"""How a run of either architecture starts: processes join, the run is set up, a session opens."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from etils import epath

from podracer.config import Config
from podracer.config.sizes import Sizes
from podracer.distributed import processes
from podracer.distributed.processes import Processes
from podracer.monitoring import writers
from podracer.monitoring.metrics import Clock
from podracer.storage.checkpoint import Progress
from podracer.training import memory
from podracer.training.memory import StateMemory
from podracer.training.options import Options, RunOptions
from podracer.training.session import Session
from podracer.types import Agent, Device


class Setup(Protocol):
    """What an architecture decides about a run before anything compiles."""

    @property
    def sizes(self) -> Sizes:
        """The numbers that follow from the configuration."""
        ...

    @property
    def devices(self) -> Sequence[Device]:
        """The devices that the run uses."""
        ...

    @property
    def layout(self) -> Mapping[str, str]:
        """What runs on which devices, in words."""
        ...

    @property
    def memory(self) -> StateMemory:
        """The memory of the state."""
        ...


SetupT = TypeVar("SetupT", bound=Setup)


class Compiled(Protocol):
    """A run's compiled functions."""

    @property
    def state(self) -> Any:
        """The initial state, whose ``train`` is a ``TrainState``."""
        ...


CompiledT = TypeVar("CompiledT", bound=Compiled)


@contextlib.contextmanager
def open_session(
    architecture: str,
    prepare: Callable[[Config, Processes], SetupT],
    config: Config,
    workdir: epath.PathLike | None,
    options: RunOptions,
) -> Iterator[tuple[SetupT, Session, Clock]]:
    """Joins the other processes, sets the run up and opens its session; closes them at the end.

    Args:
      architecture: "anakin" or "sebulba".
      prepare: decides everything that needs no compilation.
      config: the run's configuration.
      workdir: the run's folder, or None.
      options: the other options of the run.

    Yields:
      The run's setup, its session, and the clock that measures what its time is spent on.

    Raises:
      ConfigError: an impossible setting.
    """
    given = Options(workdir, **options)
    with processes.joined(given.address, config.hosts) as joined:
        clock = Clock()
        with clock.measure("setup"):
            writers.check(config.logging)
            setup = prepare(config, joined)
            memory.check(setup.memory, config)
            session = Session(architecture, config, setup.sizes, given, joined)
        with session:
            session.begin(setup.devices, {**setup.layout, **setup.memory.layout})
            yield setup, session, clock


def compile_and_restore(
    compile_programs: Callable[[], CompiledT], session: Session, clock: Clock, agent: Agent
) -> tuple[CompiledT, Any, Progress]:
    """Compiles a run, and restores it if its workdir has a checkpoint.

    Args:
      compile_programs: compiles the run's functions.
      session: the run's session.
      clock: measures the compilation.
      agent: the run's agent.

    Returns:
      The compiled functions, the state to train from, and the run's progress.

    Raises:
      SaveError: there are checkpoints, but none can be read.
    """
    session.processes.begin(None, "compiling")
    with clock.measure("compile"):
        compiled = compile_programs()
    session.processes.barrier()
    return compiled, *session.restore(compiled.state, clock, agent.target)
