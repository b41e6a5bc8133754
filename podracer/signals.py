"""Being asked to end: Ctrl-C, and the SIGTERM of batch systems and preempted machines."""

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
    """Whatever goes on now can be left undone, as the run has to end."""


class StopSignals:
    """Within its context the first signal is noted, and a second one ends the process at once.

    Outside of the main thread, where Python can't tell of signals, it notes none.

    Attributes:
      number: of the signal that came; None before.
    """

    def __init__(self):
        self.number: int | None = None
        self._before = {}
        self._raising = False

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.number = number
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        if self._raising:
            raise Interrupted

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """What is done inside is left by ``Interrupted`` when a signal comes."""
        self._raising = True
        try:
            if self.number is not None:
                raise Interrupted
            yield
        finally:
            self._raising = False

    def error(self) -> BaseException:
        """What to end with."""
        if self.number == signal.SIGINT:
            return KeyboardInterrupt()
        return PreemptedError("asked to end by SIGTERM; the same command goes on from here")


@contextlib.contextmanager
def ending_at(count: int, code: Callable[[int], int]) -> Iterator[None]:
    """Within, the ``count``-th signal ends the process at once, with ``code`` of its number.

    Also where the main thread waits in C++, as for other processes: there Python tells it of no
    signal, so that another thread has to be told. Does nothing outside of the main thread, and is
    told of what Python handles alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    read, write = os.pipe()

    def listen() -> None:
        with open(read, "rb", buffering=0) as pipe:
            numbers = (byte[0] for byte in iter(lambda: pipe.read(1), b""))
            ours = (number for number in numbers if number in SIGNALS)
            for number in itertools.islice(ours, count - 1, None):
                os._exit(code(number))

    thread = threading.Thread(target=listen, name="signals", daemon=True)
    thread.start()
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        # Which ends the thread.
        os.close(write)
        thread.join()
