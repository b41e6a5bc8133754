"""SIGINT and SIGTERM: Ctrl-C, and how batch systems and preempted machines stop a process."""

import contextlib
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from podracer.errors import PreemptedError

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """A signal arrived inside ``StopSignals.raising``: the current work can be abandoned."""


class StopSignals:
    """A context manager that records the first signal; a second one ends the process at once.

    Outside of the main thread, where Python handles no signals, it records none.

    Attributes:
      number: number of the recorded signal; None before one arrives.
    """

    def __init__(self, command: str = "the same command"):
        """``command`` says what resumes the run, in the message of the error."""
        self._command = command
        self.number: int | None = None
        self._previous = {}
        self._raising = False

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._record) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _record(self, number: int, _: FrameType | None) -> None:
        self.number = number
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        if self._raising:
            raise Interrupted

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """Within this context a signal raises ``Interrupted``, also one that arrived earlier."""
        self._raising = True
        try:
            if self.number is not None:
                raise Interrupted
            yield
        finally:
            self._raising = False

    def error(self, update: int) -> BaseException:
        """The exception that ends a run after the recorded signal.

        Args:
          update: number of updates done, after which the run was saved.
        """
        text = f"after update {update:,}; {self._command} resumes the run"
        if self.number == signal.SIGINT:
            return KeyboardInterrupt(text)
        return PreemptedError(f"stopped by SIGTERM {text}")


@contextlib.contextmanager
def exit_on_signal(count: int, exit_code: Callable[[int], int]) -> Iterator[None]:
    """Within this context the ``count``-th signal ends the process at once.

    This also works while the main thread waits inside C++, for example in a collective: Python then
    runs no signal handler, so a thread reads the signals from a pipe. Outside of the main thread
    the context does nothing.

    Args:
      count: how many signals end the process. Only signals with a Python handler are counted.
      exit_code: called with the signal's number; returns the exit code.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    read, write = os.pipe()

    def listen() -> None:
        with open(read, "rb", buffering=0) as pipe:
            numbers = (byte[0] for byte in iter(lambda: pipe.read(1), b""))
            counted = (number for number in numbers if number in SIGNALS)
            for number in itertools.islice(counted, count - 1, None):
                os._exit(exit_code(number))

    thread = threading.Thread(target=listen, name="signals", daemon=True)
    thread.start()
    os.set_blocking(write, False)
    previous = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous)
        # This ends the thread.
        os.close(write)
        thread.join()
