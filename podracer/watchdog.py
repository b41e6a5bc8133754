"""Notices that another process is gone or stuck, says which, and ends this one.

A collective waits for ever for a process that does not come. So a thread of each process publishes
what it has reached, and that it lives, in the key-value store of JAX's coordination service, which
is a thread of process 0; another thread judges what the others have published. It talks to
nobody, so that a coordinator that does not answer is noticed as well.
"""

import ctypes
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

# The exit code, as of an actor thread that hangs: start me again.
LOST = 4


class State(NamedTuple):
    """What a process says of itself.

    Attributes:
      host: where it runs.
      beat: how often it has said so.
      step: environment steps it has reached; None before the first.
      doing: what it does since.
      code: its exit code, if it has come to its end.
      why: the error that has come up.
    """

    host: str
    beat: int = 0
    step: int | None = None
    doing: str = "starting"
    code: int | None = None
    why: str = ""


class Heard(NamedTuple):
    """What was last heard of a process, and when that was new, by this process' own clock."""

    state: State
    at: float


class Store(NamedTuple):
    """What processes leave messages in.

    Attributes:
      put: ``(key, value)``.
      entries: ``(prefix) -> values by key``.
    """

    put: Callable[[str, str], None]
    entries: Callable[[str], Mapping[str, str]]


def name(index: int, heard: Mapping[int, Heard]) -> str:
    """A process as a person knows it."""
    return f"process {index}" + (f" ({heard[index].state.host})" if index in heard else "")


def report(heard: Mapping[int, Heard], count: int, now: float) -> str:
    """What every process had last reached, a line each."""
    lines = []
    for index in range(count):
        if index not in heard:
            lines.append(f"  process {index}: never heard of")
            continue
        state, at = heard[index]
        step = "before its first step" if state.step is None else f"step {state.step:,}"
        does = state.doing if state.code is None else f"ended with code {state.code}"
        why = f", {state.why}" if state.why else ""
        lines.append(f"  {name(index, heard)}: {step}, {does}{why}; heard of {now - at:.0f} s ago")
    return "\n".join(lines)


def missing(heard: Mapping[int, Heard], count: int, now: float, timeout_s: float) -> list[int]:
    """Processes that have said nothing for so long, and had not come to their end."""
    return [
        index
        for index in range(count)
        if index in heard and heard[index].state.code is None and now - heard[index].at > timeout_s
    ]


class Watchdog:
    """Watches over this process and all others, from two threads.

    Attributes:
      alone: this process has ended by an error that the others have not met.
    """

    def __init__(
        self, store: Store, index: int, count: int, timeout_s: float, coordinator: tuple[str, int]
    ):
        """Starts.

        Args:
          store: what all processes leave messages in.
          index: of this process.
          count: of processes.
          timeout_s: in which each must be heard of, and get on.
          coordinator: address of what keeps the store.
        """
        self._store, self._index, self._count = store, index, count
        self._timeout_s, self._coordinator = timeout_s, coordinator
        self._interval = min(5.0, timeout_s / 10)
        self._grace = max(3.0, 2 * self._interval)
        self._own = State(socket.gethostname())
        self._moved = self._answered = time.monotonic()
        self._heard: dict[int, Heard] = {}
        self._failed_at: dict[int, float] = {}
        self._spoken, self._closed = threading.Event(), threading.Event()
        self.alone = False
        self._catch_abort()
        for body in (self._speak, self._judge):
            threading.Thread(target=body, name=f"watchdog {body.__name__}", daemon=True).start()

    def reached(self, step: int, doing: str) -> None:
        """The main thread has come so far, and does this now; from the first time on it must call
        this again in time."""
        self._own = self._own._replace(step=step, doing=doing)
        self._moved = time.monotonic()

    def doubt(self, why: str) -> None:
        """JAX has failed in the main thread, for which the end of another process may be the cause:
        waits until that is noticed, which ends this one, or is not."""
        self._own = self._own._replace(why=why)
        deadline = time.monotonic() + self._timeout_s + self._grace
        while time.monotonic() < deadline:
            others = [heard.state for i, heard in self._heard.items() if i != self._index]
            if others and all(state.why or state.code is not None for state in others):
                return
            time.sleep(0.1)

    def end(self, code: int, why: str) -> None:
        """The run is over here. After an error, waits a little for the others to end by it, too."""
        self._own = self._own._replace(code=code, why=why)
        self._spoken.clear()
        deadline = time.monotonic() + self._grace + 2 * self._interval
        while code and time.monotonic() < deadline:
            self._spoken.wait(self._interval)
            others = [heard.state.code for heard in self._heard.values()]
            if len(others) == self._count and None not in others:
                break
            time.sleep(0.1)
        else:
            self.alone = bool(code)
        self._spoken.wait(self._interval)
        # The store may go away now. That process 0 does is still noticed: see ``_catch_abort``.
        self._closed.set()
        faulthandler.cancel_dump_traceback_later()

    def _speak(self) -> None:
        while not self._closed.is_set():
            self._own = self._own._replace(beat=self._own.beat + 1)
            said = self._own
            try:
                self._store.put(f"state/{self._index}", json.dumps(said))
                found = self._store.entries("state/")
            except Exception:  # As a store that is gone throws: the other thread notices.
                found = {}
            now = time.monotonic()
            for key, value in found.items():
                index, state = int(key.rpartition("/")[2]), State(*json.loads(value))
                before = self._heard.get(index)
                at = before.at if before and before.state.beat == state.beat else now
                self._heard[index] = Heard(state, at)
                if state.code and index != self._index:
                    self._failed_at.setdefault(index, now)
            if found:
                self._answered = now
            if said.code == self._own.code:
                self._spoken.set()
            self._closed.wait(self._interval)

    def _judge(self) -> None:
        while not self._closed.wait(self._interval):
            # Ends the process where even this thread can't run, as a library keeps Python's lock.
            faulthandler.dump_traceback_later(2 * self._timeout_s + 60, exit=True)
            verdict = self._verdict(time.monotonic())
            if verdict is not None and self._own.code is None:
                self._leave(*verdict)

    def _verdict(self, now: float) -> tuple[int, str] | None:
        """The exit code and the reason to end, if there is one."""
        heard, limit = dict(self._heard), self._timeout_s
        # This process may be about to end by the same error.
        failed = [i for i, at in self._failed_at.items() if now - at > self._grace]
        if failed:
            state = heard[failed[0]].state
            return state.code or LOST, f"{name(failed[0], heard)} failed: {state.why}"
        limits = f"for {limit:g} s (hosts.timeout_s)"
        if now - self._answered > limit:
            return LOST, f"{name(0, heard)}, which coordinates, has not answered {limits}"
        if lost := missing(heard, self._count, now, limit):
            names = " and ".join(name(i, heard) for i in lost)
            return LOST, f"nothing was heard of {names} {limits}"
        if self._own.step is not None and now - self._moved > limit:
            steps = {i: x.state.step or 0 for i, x in heard.items()}
            behind = [name(i, heard) for i, step in steps.items() if step < max(steps.values())]
            who = f"; behind: {' and '.join(behind)}" if behind else "; none is behind another"
            return LOST, f"no process has got on {limits}{who}"
        return None

    def _leave(self, code: int, reason: str) -> None:
        """Ends the process at once: its main thread waits for what never comes."""
        text = (
            f"error: {reason}. All processes end; the same command goes on from the last "
            f"checkpoint. Last heard:\n"
            f"{report(dict(self._heard), self._count, time.monotonic())}\n"
            f"Where this process, {self._index}, was:"
        )
        print(text, file=sys.stderr, flush=True)
        faulthandler.dump_traceback(all_threads=True)
        if self._index == 0:
            # With it goes the store: others are to find the true reason first.
            time.sleep(self._grace)
        os._exit(code)

    def _catch_abort(self) -> None:
        """JAX aborts a process at once, from C++, when process 0 closes its connection. Python's
        own handlers would never run then; this one does, in the thread that aborts."""

        def aborted(_: int) -> None:
            gone = self._index != 0 and not self._reachable()
            heard = dict(self._heard)
            if self._own.code is not None:
                os._exit(self._own.code or LOST)
            first = heard[0].state if 0 in heard else State("")
            reason = f"{name(0, heard)}, which coordinates, is gone"
            if first.code:
                reason = f"{name(0, heard)} failed: {first.why}"
            self._leave(
                (first.code or LOST) if gone else LOST,
                reason if gone else "this process aborts by an error of a library",
            )

        # Kept, as C does not.
        self._handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(aborted)
        ctypes.CDLL(None).signal(signal.SIGABRT, self._handler)

    def _reachable(self) -> bool:
        try:
            socket.create_connection(self._coordinator, timeout=2).close()
        except OSError:
            return False
        return True
