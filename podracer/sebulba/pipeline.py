"""What actors and learner exchange, and who watches over them. Nothing here waits for ever.

Each actor thread has a bounded ``Channel`` for its unrolls; weights go the other way by
``Publisher``, by version. A ``Worker`` is a thread for what the main thread would have to wait for.
``Supervisor`` starts the threads, notices one that failed or hangs, and stops all. Every wait ends
when it says stop.
"""

import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from podracer.errors import ActorError
from podracer.rollout import EpisodeMetrics
from podracer.types import Trajectory, Weights

T = TypeVar("T")

# How often whoever waits looks whether it should stop, in seconds.
LOOK = 0.1
# What stopping may take, in seconds, before threads that don't end are left behind.
GRACE = 3.0


class Stopped(Exception):  # noqa: N818
    """No error: the run is ending, and a thread that sees this ends as well."""


class Unroll(NamedTuple):
    """What an actor thread gives the learner.

    Attributes:
      parts: of the trajectory, one on each learner device.
      version: of the weights it was acted with.
      episodes: numpy sums over the games that ended in it.
      restarts: of its pool, so far.
      seconds: what its time went to.
    """

    parts: tuple[Trajectory, ...]
    version: int
    episodes: EpisodeMetrics
    restarts: int
    seconds: dict[str, float]


class Supervisor:
    """Starts threads and ends them all, for good or when one of them fails.

    As a context manager it ends them when the block does, and raises ``ActorError`` if one failed
    even after its work was done. Threads are daemons: one that hangs in C++ can't be ended, and
    must not keep the process. The main thread watches them all while it waits for one of them, so
    what they wait for is done by a thread as well, see ``Worker``.

    Attributes:
      stopping: set when everything has to end.
    """

    def __init__(self, timeout: float):
        """``timeout``: seconds in which a thread must get on with what it is doing."""
        self.stopping = threading.Event()
        self._timeout = timeout
        self._threads: dict[str, threading.Thread] = {}
        self._doing: dict[str, tuple[str, float]] = {}
        self._failure: tuple[str, BaseException] | None = None

    def start(self, name: str, body: Callable[[], None]) -> None:
        """Runs ``body`` in a thread of that name."""

        def run() -> None:
            try:
                body()
            except Stopped:
                pass
            except BaseException as error:
                # The first failure is the cause, what follows it are consequences.
                self._failure = self._failure or (name, error)
                self.stopping.set()
            finally:
                self._doing.pop(name, None)

        thread = self._threads[name] = threading.Thread(target=run, name=name, daemon=True)
        thread.start()

    def beat(self, what: str) -> None:
        """The calling thread goes on, to do this; to be called often enough to tell a hang.

        Raises:
          Stopped: everything has to end.
        """
        self.check_stopping()
        self._doing[threading.current_thread().name] = (what, time.monotonic())

    def idle(self) -> bool:
        """Whether all threads wait for somebody else, or have ended."""
        return not self._doing

    def check_stopping(self) -> None:
        """Raises ``Stopped`` when everything has to end."""
        if self.stopping.is_set():
            raise Stopped

    def check(self, *, timed: bool = True) -> None:
        """Raises ``ActorError`` if a thread has failed or, if ``timed``, hangs."""
        if self._failure is not None:
            name, error = self._failure
            text = "".join(traceback.format_exception(error))
            raise ActorError(f"thread {name!r} failed: {error!r}\n{text}") from error
        for name, (what, since) in list(self._doing.items()) if timed else ():
            if time.monotonic() - since > self._timeout:
                frame = sys._current_frames().get(self._threads[name].ident or 0)
                text = "".join(traceback.format_stack(frame)) if frame else ""
                raise ActorError(
                    f"thread {name!r} hangs: {what} has taken more than "
                    f"sebulba.timeout_s={self._timeout:g} seconds (set it higher where that is "
                    f"just slow)\n{text}"
                )

    def wait(self, done: Callable[[float], bool], *, timed: bool = True) -> None:
        """Calls ``done(seconds)``, which waits that long at most, until it is true. Waiting for
        another thread is no hang: that one is watched.

        Args:
          done: what to call.
          timed: whether the main thread notices threads that hang, beside those that fail.

        Raises:
          Stopped: in a thread, when the run ends.
          ActorError: in the main thread, see ``check``.
        """
        thread = threading.current_thread()
        main = thread not in self._threads.values()
        self._doing.pop(thread.name, None)
        while not done(LOOK):
            if main:
                self.check(timed=timed)
            else:
                self.check_stopping()

    def close(self) -> None:
        """Ends all threads that can be ended."""
        self.stopping.set()
        deadline = time.monotonic() + GRACE
        for thread in self._threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))

    def __enter__(self) -> "Supervisor":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()
        if kind is None:
            self.check()


class Channel(Generic[T]):
    """A bounded queue between two threads."""

    def __init__(self, supervisor: Supervisor):
        self._queue: queue.Queue[T] = queue.Queue(maxsize=1)
        self._supervisor = supervisor

    def put(self, item: T) -> None:
        """Waits for room."""

        def done(seconds: float) -> bool:
            try:
                self._queue.put(item, timeout=seconds)
            except queue.Full:
                return False
            return True

        self._supervisor.wait(done)

    def get(self, *, timed: bool = True) -> T:
        """Waits for an item; ``timed`` as in ``Supervisor.wait``."""
        out: list[T] = []

        def done(seconds: float) -> bool:
            try:
                out.append(self._queue.get(timeout=seconds))
            except queue.Empty:
                return False
            return True

        self._supervisor.wait(done, timed=timed)
        return out[0]


class Worker:
    """A thread that does for the main thread, one after another, what may take long or hang.

    The main thread waits for each, and meanwhile notices signals, and threads that fail.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        name: str,
        close: Callable[[], None] = lambda: None,
        *,
        timed: bool = True,
    ):
        """Starts it.

        Args:
          supervisor: of the thread.
          name: of the thread.
          close: called in the thread at its end.
          timed: whether what takes too long is taken to hang: this, and what waits for it.
        """
        self._beat, self._close, self._timed = supervisor.beat, close, timed
        self._asked: Channel[tuple[str, Callable[[], Any]]] = Channel(supervisor)
        self._answered: Channel[Any] = Channel(supervisor)
        supervisor.start(name, self._run)

    def __call__(self, what: str, function: Callable[[], Any]) -> Any:
        """What the function gives; ``what`` it does is told where it hangs.

        Raises:
          ActorError: it has failed or hangs, or another thread.
        """
        self._asked.put((what, function))
        return self._answered.get(timed=self._timed)

    def _run(self) -> None:
        try:
            while True:
                self._answered.put(self._answer(*self._asked.get()))
        finally:
            self._close()

    def _answer(self, what: str, function: Callable[[], Any]) -> Any:
        if self._timed:
            self._beat(what)
        return function()


class Publisher:
    """The weights of the newest versions, on every actor device; and the time when none are made.

    The learner pauses while the loop around it evaluates or saves. Actors soon wait then, but for
    nothing that learning could do faster.
    """

    def __init__(self, supervisor: Supervisor, keep: int):
        """``keep``: how many versions stay."""
        self._supervisor = supervisor
        self._keep = keep
        self._versions: dict[int, dict[Any, Weights]] = {}
        self._changed = threading.Condition()
        # Seconds of the pauses that are over, and when the present one began.
        self._paused = 0.0
        self._since: float | None = time.monotonic()

    def pause(self) -> None:
        """The learner does something else from now on; so it does before it first resumes."""
        with self._changed:
            self._since = time.monotonic()

    def resume(self) -> None:
        """The learner learns from now on."""
        paused = self.paused()
        with self._changed:
            self._paused, self._since = paused, None

    def paused(self) -> float:
        """Seconds of all pauses so far."""
        with self._changed:
            running = 0.0 if self._since is None else time.monotonic() - self._since
            return self._paused + running

    def publish(self, version: int, weights: dict[Any, Weights]) -> None:
        """Adds a version; weights, by actor device, must be ready."""
        with self._changed:
            self._versions[version] = weights
            for old in sorted(self._versions)[: -self._keep]:
                del self._versions[old]
            self._changed.notify_all()

    def get(self, device: Any, version: int | None) -> tuple[int, Weights]:
        """Waits for this version; None takes the newest there is.

        Returns:
          The version and its weights on that device.
        """

        def has() -> bool:
            return bool(self._versions) if version is None else version in self._versions

        def there(seconds: float) -> bool:
            with self._changed:
                return self._changed.wait_for(has, seconds)

        self._supervisor.wait(there)
        with self._changed:
            chosen = max(self._versions) if version is None else version
            return chosen, self._versions[chosen][device]
