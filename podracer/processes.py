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
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import jax

# Half private, and what Orbax uses as well: whose process this is without starting any device, and
# the key-value store of the coordination service; and the clusters that JAX knows.
from jax._src import clusters, distributed

from podracer import signals
from podracer.errors import ERRORS, INTERRUPTED, ConfigError, PreemptedError, code_of
from podracer.watchdog import LOST, Limits, Store, Watchdog

# A ``get`` waits for ever, as the watchdog ends it; so long at a time, as it hears no signal.
POLL_MS = 1000
_starts = itertools.count()


@dataclasses.dataclass(frozen=True)
class HostsConfig:
    """What many devices and processes watch in each other.

    Attributes:
      timeout_s: seconds in which every process must be heard of, and get on; after them the others
        end. More than the longest call, evaluation and checkpoint.
      start_timeout_s: seconds in which all must have joined, and in which each must get on until
        all train. More than the longest compilation, and than a scheduler takes between the first
        host and the last.
      drift_every: updates between two looks whether all devices hold the same weights, rounded up
        to whole host calls; 0 never looks.
    """

    timeout_s: float = 300.0
    start_timeout_s: float = 900.0
    drift_every: int = 1000

    def __post_init__(self):
        if min(self.timeout_s, self.start_timeout_s) <= 0 or self.drift_every < 0:
            raise ConfigError(
                "hosts.timeout_s and hosts.start_timeout_s must be positive and hosts.drift_every "
                f"must not be negative, got {self.timeout_s}, {self.start_timeout_s} and "
                f"{self.drift_every}"
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
      ConfigError: a number is none, or the coordinator has no port.
    """

    def number(said: int | None, variable: str) -> int | None:
        value = environment.get(variable)
        if said is not None or value is None:
            return said
        if not value.isdecimal():
            raise ConfigError(f"{variable}={value!r} must be a number")
        return int(value)

    coordinator = address.coordinator or environment.get("JAX_COORDINATOR_ADDRESS")
    host, _, port = (coordinator or "").rpartition(":")
    if coordinator is not None and not (host and port.isdecimal()):
        raise ConfigError(f"coordinator={coordinator!r} must be HOST:PORT of process 0")
    return Address(
        coordinator,
        number(address.num_processes, "JAX_NUM_PROCESSES"),
        number(address.process_id, "JAX_PROCESS_ID"),
    )


def join(address: Address, hosts: HostsConfig) -> None:
    """Joins the others, if there are any to find; must come before the first use of a device.

    Args:
      address: what is known of them.
      hosts: how long to wait for them.

    Raises:
      ConfigError: the others can't be joined as is said.
    """
    address = from_environment(address, os.environ)
    if jax.distributed.is_initialized() or address.num_processes == 1:
        return
    try:
        # Alone in its cluster, a process keeps all its devices: JAX would take one of SLURM's.
        if any(x is not None for x in address) or _cluster_size() > 1:
            _connect(address, hosts)
    except Exception as error:  # What finding a cluster leads to: of any kind.
        raise ConfigError(
            f"the other processes can't be joined: {error} (--coordinator={address.coordinator} "
            f"--num_processes={address.num_processes} --process_id={address.process_id}); all "
            "three are needed where JAX finds no cluster, and --num_processes=1 runs this one alone"
        ) from error


def _cluster_size() -> int:
    """Processes of the cluster that JAX would find; 1 where it finds none."""
    known = clusters.ClusterEnv._cluster_types
    found = [env for env in known if not env.opt_in_only_method and env.is_env_present()]
    return found[0].get_process_count() if found else 1


def _connect(address: Address, hosts: HostsConfig) -> None:
    """Waits for the others. If they don't come, ends the process: JAX would, and name nobody."""
    state: Any = distributed.global_state

    def say(why: str) -> None:
        known = f"process {state.process_id} of {state.num_processes} at"
        who = f"{known} {state.coordinator_address}" if state.coordinator_address else "a process"
        print(f"error: {who}, which waited for the others, {why}", file=sys.stderr, flush=True)

    def give_up() -> None:
        limit = f"{hosts.start_timeout_s:g} s (hosts.start_timeout_s)"
        say(f"has given up after {limit}: do all run, and can they reach this address?")
        os._exit(LOST)

    def interrupted(number: int) -> int:
        say(f"was asked to end by {signal.Signals(number).name}")
        return INTERRUPTED if number == signal.SIGINT else PreemptedError.code

    # Programs with collectives would overtake each other on a CPU where each process runs them on
    # one device, so that processes would run them in different orders.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    # Its handler of SIGTERM would take the place of ours.
    jax.config.update("jax_enable_preemption_service", False)
    timer = threading.Timer(hosts.start_timeout_s, give_up)
    timer.daemon = True
    timer.start()
    # JAX is to be later than we are.
    late = 2 * math.ceil(max(hosts.timeout_s, hosts.start_timeout_s)) + 60
    try:
        # Nothing has begun that would have to be saved.
        with signals.ending_at(1, interrupted):
            jax.distributed.initialize(
                *address,
                # Where all is said, JAX is not to choose devices as on the cluster that it finds.
                cluster_detection_method=None if None in address else "deactivate",
                initialization_timeout=late,
                shutdown_timeout_seconds=math.ceil(hosts.timeout_s),
                heartbeat_timeout_seconds=late,
            )
    finally:
        timer.cancel()


class Processes:
    """The processes of a run, as one of them sees them; by default it is alone.

    What they agree on goes through the key-value store of JAX's coordination service. All must ask
    for it in the same order, as answers are numbered; one that fails meanwhile is named to the
    others by the watchdog, which ends them.

    Attributes:
      index: of this one.
      count: of all.
    """

    def __init__(self, index: int = 0, count: int = 1):
        self.index, self.count = index, count
        self._client: Any = None
        self._prefix, self._numbers = "", itertools.count()
        self._watchdog: Watchdog | None = None
        self._ending = False

    def watch(self, hosts: HostsConfig) -> None:
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
        limits = Limits(hosts.start_timeout_s, hosts.timeout_s)
        address = (host.strip("[]"), int(port))
        self._watchdog = Watchdog(store, self.index, self.count, limits, address)

    @property
    def first(self) -> bool:
        """Whether this is the one that writes and prints."""
        return self.index == 0

    @property
    def forsaken(self) -> bool:
        """Whether this one has failed alone: the others can't be waited for."""
        return self._watchdog is not None and self._watchdog.alone

    def check_devices(self) -> None:
        """Raises ``ConfigError`` if JAX, which has started its devices, counts otherwise. (Their
        order is its own: a TPU numbers its hosts itself.)"""
        if self.count != jax.process_count():
            raise ConfigError(
                f"JAX runs in {jax.process_count()} processes, and this run in {self.count}: it "
                "must come before the first use of JAX, and --num_processes=1 is for a machine "
                "that is no part of a pod"
            )

    def reached(self, step: int | None, doing: str) -> None:
        """This process has come so far (None: it does not train yet), and now does this; others
        stop waiting for one that says nothing any more."""
        if self._watchdog is not None:
            self._watchdog.reached(step, doing)

    def beat(self) -> None:
        """What this process does takes long, but goes on."""
        if self._watchdog is not None:
            self._watchdog.beat()

    def from_first(self, make: Callable[[], Any]) -> Any:
        """What ``make`` gives in process 0, where alone it is called, as JSON can tell it."""
        value = make() if self.first else None
        if self._watchdog is None:
            return value
        # Those who wait are further than the first one, should that never come to here.
        self._watchdog.moved()
        key = f"{self._prefix}agreed/{next(self._numbers)}"
        if self.first:
            self._client.key_value_set(key, json.dumps(value))
        return self._get(key)

    def from_all(self, value: Any) -> list[Any]:
        """What each process gives, in their order, as JSON can tell it."""
        if self._watchdog is None:
            return [value]
        self._watchdog.moved()
        key = f"{self._prefix}given/{next(self._numbers)}/"
        self._client.key_value_set(f"{key}{self.index}", json.dumps(value))
        return self.from_first(lambda: [self._get(f"{key}{i}") for i in range(self.count)])

    def _get(self, key: str) -> Any:
        while True:
            try:
                return json.loads(self._client.blocking_key_value_get(key, POLL_MS))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise

    def ending(self, error: BaseException | None) -> None:
        """Tells the others that the run ends here, and by which error; before this process lets go
        of what it holds, which takes its time. Only the first call counts."""
        if self._watchdog is None or self._ending:
            return
        self._ending = True
        why = ""
        try:
            if error is not None:
                why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                if not isinstance(error, (*ERRORS, KeyboardInterrupt)):
                    # Should it not come to its end.
                    traceback.print_exception(error)
                # What asks a run to end is none, wherever it comes.
                if isinstance(error, Exception) and _of_jax(error):
                    self._watchdog.doubt(why)
        finally:
            self._watchdog.ending(code_of(error), why)

    def end(self, error: BaseException | None) -> None:
        """The run has ended here, by this error if by one."""
        try:
            self.ending(error)
        finally:
            if self._watchdog is not None:
                self._watchdog.end()


def _of_jax(error: BaseException | None) -> bool:
    """Whether JAX has failed first."""
    while error is not None:
        if isinstance(error, jax.errors.JaxRuntimeError):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextlib.contextmanager
def joined(address: Address, hosts: HostsConfig) -> Iterator[Processes]:
    """The processes of a run, which watch over each other meanwhile.

    Raises:
      ConfigError: they can't be joined as is said.
    """
    global _last
    join(address, hosts)
    state: Any = distributed.global_state
    processes = _last = Processes(state.process_id, state.num_processes)
    with ExitStack() as stack:
        if processes.count > 1:
            stack.enter_context(signals.ending_at(2, lambda number: 128 + number))
            processes.watch(hosts)
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
