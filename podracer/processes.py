"""Many processes: how they join, and what they agree on without devices.

JAX's own engine does it (``jax.distributed``): every process runs the same program on a mesh over
the devices of all. On Cloud TPU, SLURM, MPI and Kubernetes JAX finds the others by itself.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

# Half private, and what Orbax uses as well: whose process this is without starting any device, and
# the key-value store of the coordination service.
from jax._src import distributed

from podracer.errors import ConfigError
from podracer.watchdog import Store, Watchdog

# What ``jax.distributed.initialize`` says where there is no cluster, and where devices are in use.
NO_CLUSTER, TOO_LATE = "coordinator_address should be defined", "must be called before"
# A ``get`` waits this long: for ever, as the watchdog ends it.
DAY_MS = 24 * 60 * 60 * 1000
_starts = itertools.count()


@dataclasses.dataclass(frozen=True)
class HostsConfig:
    """What many devices and processes watch in each other.

    Attributes:
      timeout_s: seconds in which every process must be heard of, and get on; after them the others
        end. More than the longest call, evaluation and checkpoint.
      drift_every: updates between two looks whether all devices hold the same weights, rounded up
        to whole host calls; 0 never looks.
    """

    timeout_s: float = 300.0
    drift_every: int = 1000

    def __post_init__(self):
        if self.timeout_s <= 0 or self.drift_every < 0:
            raise ConfigError(
                "hosts.timeout_s must be positive and hosts.drift_every must not be negative, got "
                f"{self.timeout_s} and {self.drift_every}"
            )


class Address(NamedTuple):
    """Where a process is to find the others; None where JAX is to find out.

    Attributes:
      coordinator: host and port of process 0.
      num_processes: in all; 1 joins none.
      process_id: of this one.
    """

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None


def from_environment(address: Address, environment: Mapping[str, str]) -> Address:
    """The address with what it does not say taken from JAX's environment variables.

    Raises:
      ConfigError: a number is none.
    """

    def number(said: int | None, variable: str) -> int | None:
        value = environment.get(variable)
        if said is not None or value is None:
            return said
        if not value.isdecimal():
            raise ConfigError(f"{variable}={value!r} must be a number")
        return int(value)

    return Address(
        address.coordinator or environment.get("JAX_COORDINATOR_ADDRESS"),
        number(address.num_processes, "JAX_NUM_PROCESSES"),
        number(address.process_id, "JAX_PROCESS_ID"),
    )


def join(address: Address, timeout_s: float) -> None:
    """Joins the others, if there are any to find; must come before the first use of a device.

    Args:
      address: what is known of them.
      timeout_s: see ``HostsConfig``.

    Raises:
      ConfigError: the others can't be joined as is said.
    """
    address = from_environment(address, os.environ)
    said = any(x is not None for x in address)
    if jax.distributed.is_initialized() or address.num_processes == 1:
        return
    # Its handler of SIGTERM would take the place of ours.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            *address,
            initialization_timeout=math.ceil(timeout_s),
            shutdown_timeout_seconds=math.ceil(timeout_s),
            # JAX aborts without a word of who is missing: our watchdog is to come first.
            heartbeat_timeout_seconds=2 * math.ceil(timeout_s) + 60,
        )
    except (ValueError, RuntimeError) as error:
        if not said and (NO_CLUSTER in str(error) or TOO_LATE in str(error)):
            return
        raise ConfigError(
            f"the other processes can't be joined: {error} (--coordinator={address.coordinator} "
            f"--num_processes={address.num_processes} --process_id={address.process_id}); all "
            "three are needed where JAX finds no cluster, and --num_processes=1 runs this one alone"
        ) from error


class Processes:
    """The processes of a run, as one of them sees them; by default it is alone.

    Attributes:
      index: of this one.
      count: of all.
    """

    def __init__(self, index: int = 0, count: int = 1):
        self.index, self.count = index, count
        self._client: Any = None
        self._watchdog: Watchdog | None = None

    def watch(self, timeout_s: float) -> None:
        """Begins to watch over the others."""
        state: Any = distributed.global_state
        self._client = state.client
        # A second run of the same processes must not read what the first has left.
        self._prefix = prefix = f"podracer/{next(_starts)}/"
        store = Store(
            put=lambda key, value: self._client.key_value_set(prefix + key, value, True),
            entries=lambda key: dict(self._client.key_value_dir_get(prefix + key)),
        )
        host, _, port = state.coordinator_address.rpartition(":")
        self._watchdog = Watchdog(store, self.index, self.count, timeout_s, (host, int(port)))

    @property
    def first(self) -> bool:
        """Whether this is the one that writes and prints."""
        return self.index == 0

    @property
    def forsaken(self) -> bool:
        """Whether this one has failed alone: the others can't be waited for."""
        return self._watchdog is not None and self._watchdog.alone

    def reached(self, step: int, doing: str) -> None:
        """This process has come so far, and now does this; others stop waiting for one that says
        nothing any more."""
        if self._watchdog is not None:
            self._watchdog.reached(step, doing)

    def from_first(self, name: str, make: Callable[[], Any]) -> Any:
        """What ``make`` gives in process 0, where alone it is called, as JSON can tell it.

        Args:
          name: of its own for each use.
          make: may raise there; the others are then ended by the watchdog.
        """
        value = make() if self.first else None
        if self._client is None:
            return value
        key = f"{self._prefix}first/{name}"
        if self.first:
            self._client.key_value_set(key, json.dumps(value))
        return json.loads(self._client.blocking_key_value_get(key, DAY_MS))

    def end(self, error: BaseException | None) -> None:
        """Tells the others that the run is over here, and by which error."""
        if self._watchdog is None:
            return
        code = 130 if isinstance(error, KeyboardInterrupt) else getattr(error, "code", 1)
        why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if isinstance(error, jax.errors.JaxRuntimeError):
            # Before another process' end is noticed, which may end this one first.
            traceback.print_exception(error)
            print("is another process gone?", file=sys.stderr, flush=True)
            self._watchdog.doubt(why)
        self._watchdog.end(0 if error is None else code, "" if error is None else why)


@contextlib.contextmanager
def joined(address: Address, timeout_s: float) -> Iterator[Processes]:
    """The processes of a run, which watch over each other meanwhile.

    Raises:
      ConfigError: they can't be joined as is said.
    """
    global _last
    join(address, timeout_s)
    state: Any = distributed.global_state
    processes = _last = Processes(state.process_id, state.num_processes)
    if processes.count > 1:
        processes.watch(timeout_s)
    try:
        yield processes
    except BaseException as error:
        processes.end(error)
        raise
    processes.end(None)


_last = Processes()


def forsaken() -> bool:
    """Whether the last run has failed in this process alone: JAX must not wait for the others at
    the end of the process."""
    return _last.forsaken
