"""Being asked to end: Ctrl-C, and the SIGTERM of batch systems and preempted machines."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from podracer.errors import PreemptedError

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """Whatever goes on now can be left undone, as the run has to end."""


class StopSignals:
    """Within its context the first signal is noted, and a second one ends the process at once.

    Where the main thread may have to wait in C++ for other processes, Python tells it of no signal
    meanwhile: another thread is told of them then.

    Outside of the main thread, where Python can't tell of signals, it notes none.

    Attributes:
      number: of the signal that came; None before.
    """

    def __init__(self, *, waits: bool = False):
        """``waits`` for other processes."""
        self._waits = waits
        self._pipe: int | None = None
        self.number: int | None = None
        self._before = {}
        self._raising = False

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
            if self._waits:
                read, self._pipe = os.pipe()
                os.set_blocking(self._pipe, False)
                signal.set_wakeup_fd(self._pipe, warn_on_full_buffer=False)
                threading.Thread(target=_end_at_second, args=(read,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._pipe is not None:
            signal.set_wakeup_fd(-1)
            # Which ends the thread.
            os.close(self._pipe)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.note(number)
        if self._raising:
            raise Interrupted

    def note(self, number: int) -> None:
        """This signal has come, here or to another process."""
        self.number = number
        for each in self._before:
            signal.signal(each, signal.SIG_DFL)

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


def _end_at_second(read: int) -> None:
    """Reads the numbers of signals as they come, and ends the process with the second of ours."""
    with open(read, "rb", buffering=0) as pipe:
        numbers = (byte[0] for byte in iter(lambda: pipe.read(1), b""))
        ours = (number for number in numbers if number in SIGNALS)
        next(ours, None)
        for number in ours:
            os._exit(128 + number)
