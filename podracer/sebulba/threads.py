"""Supervised threads: how they start, wait for each other, fail and stop.

No wait is endless: a thread that waits for another one regularly checks whether the run stops.
"""

import math
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from podracer.errors import ActorError

T = TypeVar("T")

# Seconds between two checks of a waiting thread.
POLL_S = 0.1
# Seconds in which threads must have ended when a run stops; threads that hang are left behind.
GRACE_S = 3.0


class Stopped(BaseException):
    """Ends a thread because the run stops.

    Like ``KeyboardInterrupt`` it is not an ``Exception``: code that retries after a failure must
    not treat it as one.
    """


class Limit(NamedTuple):
    """How long an activity may take.

    Attributes:
      seconds: the time after which it counts as a hang.
      reason: how the limit was derived, for the error message.
      setting: the setting that raises the limit.
    """

    seconds: float
    reason: str
    setting: str


class HangLimits:
    """After how many seconds an activity of a thread counts as a hang.

    Activities on the host, such as a step of a pool, have a fixed limit. Activities on a device may
    be queued behind an update, which takes milliseconds or many minutes, depending on the network,
    the batch and the device. Their limit is a multiple of the longest update so far; until the
    first update has ended, there is a separate, generous limit. A device that never answers is
    therefore always noticed.
    """

    # Updates of one run differ: those that reach ``ppo.target_kl`` stop early.
    FACTOR = 10

    def __init__(self, timeout_s: float, first_update_timeout_s: float, *, shared: bool = False):
        """No update has been measured yet.

        Args:
          timeout_s: limit of activities on the host, and lowest limit of those on a device.
          first_update_timeout_s: limit of activities on a device until an update was measured.
          shared: whether several processes share the run. An update may then wait for another
            process, and ``distributed.watchdog`` limits that wait.
        """
        self._timeout_s, self._first_s = timeout_s, max(timeout_s, first_update_timeout_s)
        self._shared = shared
        self._longest_s: float | None = None

    def add_update(self, seconds: float) -> None:
        """Records how long an update took."""
        self._longest_s = max(seconds, self._longest_s or 0.0)

    def on_host(self) -> Limit:
        """The limit of activities on the host."""
        return Limit(self._timeout_s, "", "sebulba.timeout_s")

    def on_device(self) -> Limit:
        """The limit of activities on a device."""
        if self._shared:
            return Limit(math.inf, "", "hosts.timeout_s")
        if self._longest_s is None:
            reason = ", and no update has finished yet"
            return Limit(self._first_s, reason, "sebulba.first_update_timeout_s")
        if self.FACTOR * self._longest_s <= self._timeout_s:
            return self.on_host()
        reason = f", {self.FACTOR} times the longest update so far"
        return Limit(self.FACTOR * self._longest_s, reason, "sebulba.timeout_s")


class Activity(NamedTuple):
    """What a thread is doing.

    Attributes:
      name: what it is, for the error message.
      since: when it began.
      on_device: whether it runs on a device.
    """

    name: str
    since: float
    on_device: bool


class Supervisor:
    """Starts threads, notices one that fails or hangs, and stops them all.

    It is a context manager: at the end of its block it stops all threads, and raises ``ActorError``
    if one has failed, even after its last trajectory. Threads are daemons, because one that hangs
    in C++ can't be ended and must not keep the process alive.

    The main thread checks all threads while it waits for one of them. Work that it would have to
    wait for is therefore done in a thread, see ``WorkerThread``.
    """

    def __init__(
        self,
        limits: HangLimits,
        warn: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
    ):
        """Starts nothing yet.

        Args:
          limits: time limits after which an activity counts as a hang.
          warn: prints a warning; called from any thread.
          now: ``() ->`` the time in seconds.
        """
        self._stopping = threading.Event()
        self._limits, self._warn, self.now = limits, warn, now
        self._warned: set[str] = set()
        self._warning = threading.Lock()
        self._threads: dict[str, threading.Thread] = {}
        # The activity of each thread that is not waiting for another one.
        self._activities: dict[str, Activity] = {}
        self._failure: tuple[str, BaseException] | None = None
        self._at_end: list[Callable[[BaseException | None], None]] = []

    def start(self, name: str, body: Callable[[], None]) -> None:
        """Runs ``body`` in a thread of that name."""
        thread = threading.Thread(target=self._run, args=(name, body), name=name, daemon=True)
        self._threads[name] = thread
        thread.start()

    def _run(self, name: str, body: Callable[[], None]) -> None:
        try:
            body()
        except Stopped:
            pass
        except BaseException as error:
            # The first failure is the cause, later ones are its consequences.
            self._failure = self._failure or (name, error)
            self._stopping.set()
        finally:
            self._activities.pop(name, None)

    def beat(self, activity: str, *, on_device: bool = False) -> None:
        """Records what the calling thread does from now on; the next call must follow in time.

        Args:
          activity: what the thread does, for the error message if it hangs.
          on_device: whether it runs on a device, where it may wait for an update.

        Raises:
          Stopped: the run stops.
        """
        self._check_stopping()
        name = threading.current_thread().name
        self._activities[name] = Activity(activity, self.now(), on_device)

    def begin_wait(self) -> None:
        """Records that the calling thread waits for another one, which does not count as a hang."""
        self._activities.pop(threading.current_thread().name, None)

    def check_wait(self) -> None:
        """Checks whether the calling thread may keep waiting; called every ``POLL_S`` seconds.

        Raises:
          Stopped: in a thread, when the run stops.
          ActorError: in the main thread, see ``check``.
        """
        if threading.current_thread() in self._threads.values():
            self._check_stopping()
        else:
            self.check()

    def add_update(self, seconds: float) -> None:
        """Records how long an update took, from which the limit of activities on a device
        follows."""
        self._limits.add_update(seconds)

    def warn_once(self, cause: str, text: str) -> None:
        """Prints a warning from any thread, unless there was one with the same cause before."""
        with self._warning:
            known = cause in self._warned
            self._warned.add(cause)
        if not known:
            self._warn(text)

    def _check_stopping(self) -> None:
        if self._stopping.is_set():
            raise Stopped

    def check(self) -> None:
        """Raises ``ActorError`` if a thread has failed or hangs."""
        if self._failure is not None:
            name, error = self._failure
            cause, text = type(error).__name__, "".join(traceback.format_exception(error))
            raise ActorError(f"thread {name!r} failed: {cause}: {error}\n{text}") from error
        now = self.now()
        for name, activity in list(self._activities.items()):
            limit = self._limits.on_device() if activity.on_device else self._limits.on_host()
            if now - activity.since > limit.seconds:
                raise ActorError(
                    f"thread {name!r} hangs: {activity.name} has taken more than "
                    f"{limit.seconds:g} seconds{limit.reason}; if it is only slow, set "
                    f"{limit.setting} higher\n{self._stack(name)}"
                )

    def _stack(self, name: str) -> str:
        """Where a thread is, as in a traceback."""
        frame = sys._current_frames().get(self._threads[name].ident or 0)
        return "".join(traceback.format_stack(frame)) if frame else ""

    def close(self) -> None:
        """Stops all threads that can be stopped."""
        self._stopping.set()
        deadline = time.monotonic() + GRACE_S
        for thread in self._threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))

    def __enter__(self) -> "Supervisor":
        return self

    def at_end(self, close: Callable[[BaseException | None], None]) -> None:
        """``close(error)`` is called at the end of the block, while threads still run; None if it
        ends without an error."""
        self._at_end.append(close)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        for close in self._at_end:
            close(error)
        self.close()
        if error is None:
            self.check()


class SupervisedQueue(Generic[T]):
    """A queue with room for one item between two threads, whose waits end when the run stops."""

    def __init__(self, supervisor: Supervisor):
        self._queue: queue.Queue[T] = queue.Queue(maxsize=1)
        self._supervisor = supervisor

    def put(self, item: T) -> None:
        """Adds an item, and waits until there is room for it."""
        self._supervisor.begin_wait()
        while True:
            try:
                return self._queue.put(item, timeout=POLL_S)
            except queue.Full:
                self._supervisor.check_wait()

    def get(self, waiting: Callable[[], None] = lambda: None) -> T:
        """Takes an item, and waits until there is one; ``waiting`` is called every ``POLL_S``
        seconds until then."""
        self._supervisor.begin_wait()
        while True:
            try:
                return self._queue.get(timeout=POLL_S)
            except queue.Empty:
                self._supervisor.check_wait()
                waiting()


class WorkerThread:
    """A thread that executes calls for the main thread, one after another.

    The main thread waits for each call, and meanwhile notices signals and threads that fail.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        name: str,
        close: Callable[[], None] = lambda: None,
        *,
        on_device: bool = False,
    ):
        """Starts the thread.

        Args:
          supervisor: starts and watches the thread.
          name: the thread's name.
          close: called in the thread when it ends.
          on_device: whether the calls run on a device, where they may wait for an update.
        """
        self._supervisor, self._close, self._on_device = supervisor, close, on_device
        self._calls: SupervisedQueue[tuple[str, Callable[[], Any]]] = SupervisedQueue(supervisor)
        self._results: SupervisedQueue[Any] = SupervisedQueue(supervisor)
        supervisor.start(name, self._run)

    def call(self, activity: str, function: Callable[[], Any]) -> Any:
        """Calls the function in the thread and returns its result.

        Args:
          activity: what the function does, for the error message if it hangs.
          function: the function to call.

        Raises:
          ActorError: this thread or another one has failed or hangs.
        """
        self._calls.put((activity, function))
        return self._results.get()

    def _run(self) -> None:
        try:
            while True:
                # No local variable: it would keep the function, and its trajectory, in memory.
                self._results.put(self._execute(*self._calls.get()))
        finally:
            self._close()

    def _execute(self, activity: str, function: Callable[[], Any]) -> Any:
        self._supervisor.beat(activity, on_device=self._on_device)
        return function()
