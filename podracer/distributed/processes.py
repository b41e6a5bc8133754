"""The processes of a run: how they agree without using devices, and how they end together.

Every process runs the same program on a mesh over the devices of all. This module exchanges small
values through the key-value store of JAX's coordination service, which needs no device.
"""

import contextlib
import itertools
import json
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import jax

# Partly private to JAX, and used by Orbax as well: it has the number of this process, without
# starting a device, and the client of the key-value store.
from jax._src import distributed

from podracer.distributed import signals
from podracer.distributed.joining import Address, HostsConfig, join
from podracer.distributed.watchdog import Limits, Store, Watchdog
from podracer.errors import ERRORS, ConfigError, code_of

# Milliseconds of one wait in the key-value store. Python handles no signal meanwhile, so long waits
# are made of short ones; the watchdog ends waits that never succeed.
POLL_MS = 1000
_runs = itertools.count()


class Processes:
    """The processes of a run, seen from one of them. By default it runs alone.

    All processes must call ``broadcast``, ``all_gather`` and ``barrier`` in the same order, as the
    keys are numbered. If one of them fails instead, the watchdog ends the others.

    Attributes:
      index: number of this process, from 0.
      count: number of processes.
    """

    def __init__(self, index: int = 0, count: int = 1):
        self.index, self.count = index, count
        self._client: Any = None
        self._prefix, self._numbers = "", itertools.count()
        self._watchdog: Watchdog | None = None
        self._end_announced = False

    def start_watchdog(self, hosts: HostsConfig) -> None:
        """Starts to watch over the other processes, with the limits of ``hosts``."""
        state: Any = distributed.global_state
        self._client = state.client
        # A second run of the same processes must not read the keys of the first.
        self._prefix = prefix = f"podracer/{next(_runs)}/"
        store = Store(
            put=lambda key, value: self._client.key_value_set(prefix + key, value, True),
            get_all=lambda key: dict(self._client.key_value_dir_get(prefix + key)),
        )
        host, _, port = state.coordinator_address.rpartition(":")
        limits = Limits(hosts.start_timeout_s, hosts.timeout_s)
        address = (host.strip("[]"), int(port))
        self._watchdog = Watchdog(store, self.index, self.count, limits, address)

    @property
    def first(self) -> bool:
        """Whether this is process 0, which alone writes files and prints."""
        return self.index == 0

    @property
    def failed_alone(self) -> bool:
        """Whether this process failed while others did not, so that it can't wait for them."""
        return self._watchdog is not None and self._watchdog.failed_alone

    def check_devices(self) -> None:
        """Raises ``ConfigError`` if JAX has another number of processes. This starts JAX's devices.

        Their order is not checked: a TPU numbers its hosts itself.
        """
        if self.count != jax.process_count():
            raise ConfigError(
                f"JAX runs in {jax.process_count()} processes, and this run in {self.count}: a run "
                "must start before the first use of JAX, and --num_processes=1 is only for a "
                "machine that is not part of a pod"
            )

    def check_counts(self) -> None:
        """Raises ``ConfigError`` if processes were started with different numbers of processes."""
        counts = self.all_gather(self.count)
        if len(set(counts)) > 1:
            raise ConfigError(
                f"--num_processes must be the same in all processes, got {counts} in the order of "
                "--process_id"
            )

    def begin(self, step: int | None, activity: str) -> None:
        """Tells the watchdogs of all processes what this one does from now on.

        All processes must begin the same activities in the same order.

        Args:
          step: environment steps done; None until training begins.
          activity: what begins now, such as "compiling", for messages.
        """
        if self._watchdog is not None:
            self._watchdog.begin(step, activity)

    def show_progress(self) -> None:
        """Tells the watchdogs that this process's activity is still making progress."""
        if self._watchdog is not None:
            self._watchdog.show_progress()

    def broadcast(self, make: Callable[[], Any]) -> Any:
        """Gives all processes a value of process 0.

        Args:
          make: called in process 0 only; returns a value that JSON can represent.
        """
        value = make() if self.first else None
        if self._watchdog is None:
            return value
        # If process 0 never gets here, it must count as being behind those that wait.
        self._watchdog.next_stage()
        key = f"{self._prefix}broadcast/{next(self._numbers)}"
        if self.first:
            self._client.key_value_set(key, json.dumps(value))
        return self._get(key)

    def all_gather(self, value: Any) -> list[Any]:
        """Returns the values of all processes, in the order of processes.

        Args:
          value: this process's, which JSON can represent.
        """
        if self._watchdog is None:
            return [value]
        self._watchdog.next_stage()
        key = f"{self._prefix}gather/{next(self._numbers)}/"
        self._client.key_value_set(f"{key}{self.index}", json.dumps(value))
        return self.broadcast(lambda: [self._get(f"{key}{i}") for i in range(self.count)])

    def barrier(self) -> None:
        """Returns when all processes have called this."""
        self.all_gather(None)

    def _get(self, key: str) -> Any:
        while True:
            try:
                return json.loads(self._client.blocking_key_value_get(key, POLL_MS))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise

    def announce_end(self, error: BaseException | None) -> None:
        """Tells the other processes that the run ends here.

        It should be called before this process releases what it holds, which takes time. Only the
        first call has an effect.

        Args:
          error: the exception that ends the run; None is success.
        """
        if self._watchdog is None or self._end_announced:
            return
        self._end_announced = True
        message = ""
        try:
            if error is not None:
                message = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                if not isinstance(error, (*ERRORS, KeyboardInterrupt)):
                    # The watchdog may end this process before Python prints the traceback.
                    traceback.print_exception(error)
                # A signal that arrives while JAX fails is not a failure of JAX.
                if isinstance(error, Exception) and _caused_by_jax(error):
                    self._watchdog.wait_until_others_are_alive(message)
        finally:
            self._watchdog.announce_end(code_of(error), message)

    def close(self, error: BaseException | None) -> None:
        """Stops the watchdog at the end of the run.

        Args:
          error: the exception that ends the run; None is success.
        """
        try:
            self.announce_end(error)
        finally:
            if self._watchdog is not None:
                self._watchdog.close()


def _caused_by_jax(error: BaseException | None) -> bool:
    """Whether an exception, or one that led to it, is an error of JAX's runtime."""
    while error is not None:
        if isinstance(error, jax.errors.JaxRuntimeError):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextlib.contextmanager
def joined(address: Address, hosts: HostsConfig) -> Iterator[Processes]:
    """Joins the processes of a run, which watch over each other within this context.

    Args:
      address: what the user has specified; see ``joining.join``.
      hosts: the time limits.

    Raises:
      ConfigError: the address is wrong, or processes were started differently.
      TransientError: the other processes could not be reached.
    """
    global _latest
    join(address, hosts)
    state: Any = distributed.global_state
    processes = _latest = Processes(state.process_id, state.num_processes)
    with ExitStack() as stack:
        if processes.count > 1:
            stack.enter_context(signals.exit_on_signal(2, lambda number: 128 + number))
            processes.start_watchdog(hosts)
        try:
            processes.check_counts()
            yield processes
        except BaseException as error:
            processes.close(error)
            raise
        processes.close(None)


_latest = Processes()


def failed_alone() -> bool:
    """Whether the latest run failed in this process alone, so that it can't wait for the others at
    its exit, as JAX would."""
    return _latest.failed_alone
