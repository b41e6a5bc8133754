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

from podracer.errors import OK, ActorError, DriftError, PreemptedError

# The exit code, as of an actor thread that hangs: start me again.
LOST = ActorError.code
# After these a scheduler is to start the same command again.
AGAIN = (LOST, DriftError.code, PreemptedError.code)
# Where stacks are written: sys.stderr may be no file.
STDERR = 2


class State(NamedTuple):
    """What a process says of itself.

    Attributes:
      host: where it runs.
      beat: how often it has said so.
      moves: how often it has begun with something else; all processes do the same things.
      signs: how often it has shown that it goes on.
      step: environment steps it has reached; None before the first.
      doing: what it does since.
      code: its exit code, if it comes to its end.
      why: the error that has come up.
    """

    host: str = ""
    beat: int = 0
    moves: int = 0
    signs: int = 0
    step: int | None = None
    doing: str = "starting"
    code: int | None = None
    why: str = ""


class Heard(NamedTuple):
    """What was last heard of a process, and when that was new, by this process' own clock; and when
    it had gone on."""

    state: State
    at: float
    moved: float


class Store(NamedTuple):
    """What processes leave messages in.

    Attributes:
      put: ``(key, value)``.
      entries: ``(prefix) -> values by key``.
    """

    put: Callable[[str, str], None]
    entries: Callable[[str], Mapping[str, str]]


class Limits(NamedTuple):
    """Seconds of patience, see ``processes.HostsConfig``; until all train, and then."""

    start_s: float
    run_s: float

    def said(self, starts: bool) -> tuple[float, str]:
        """One of them, and how it is told."""
        key, limit = ("start_timeout_s", self.start_s) if starts else ("timeout_s", self.run_s)
        return limit, f"for {limit:g} s (hosts.{key})"


def name(index: int, heard: Mapping[int, Heard]) -> str:
    """A process as a person knows it."""
    host = heard[index].state.host
    return f"process {index}" + (f" ({host})" if host else "")


def report(heard: Mapping[int, Heard], now: float) -> str:
    """What every process had last reached, a line each."""
    lines = []
    for index, (state, at, _) in heard.items():
        if not state.beat:
            lines.append(f"  process {index}: never heard of")
            continue
        step = "before its first step" if state.step is None else f"step {state.step:,}"
        does = state.doing if state.code is None else f"ends with code {state.code}"
        why = f", {state.why}" if state.why else ""
        lines.append(f"  {name(index, heard)}: {step}, {does}{why}; heard of {now - at:.0f} s ago")
    return "\n".join(lines)


def missing(heard: Mapping[int, Heard], now: float, limits: Limits) -> list[int]:
    """Processes that have said nothing for too long, and had not come to their end."""
    return [
        index
        for index, (state, at, _) in heard.items()
        if state.code is None and now - at > limits.said(starts=not state.beat)[0]
    ]


class Watchdog:
    """Watches over this process and all others, from two threads.

    What this process says of itself is written by its main thread alone, and what was heard of the
    others by one of the two.

    Attributes:
      alone: this process has ended by an error that the others have not met.
    """

    def __init__(
        self, store: Store, index: int, count: int, limits: Limits, coordinator: tuple[str, int]
    ):
        """Starts.

        Args:
          store: what all processes leave messages in.
          index: of this process.
          count: of processes.
          limits: in which each must be heard of, and get on.
          coordinator: address of what keeps the store.
        """
        self._store, self._index = store, index
        self._limits, self._coordinator = limits, coordinator
        self._interval = min(5.0, limits.run_s / 10)
        self._grace = max(3.0, 2 * self._interval)
        self._own, self._signs = State(socket.gethostname()), 0
        self._moved = self._answered = self._started = now = time.monotonic()
        self._heard = {i: Heard(State(), now, now) for i in range(count)}
        self._failed_at: dict[int, float] = {}
        self._wake, self._closed = threading.Event(), threading.Event()
        self.alone = False
        self._catch_abort()
        self._threads = [
            threading.Thread(target=body, name=f"watchdog {body.__name__}", daemon=True)
            for body in (self._speak, self._judge)
        ]
        for thread in self._threads:
            thread.start()

    def reached(self, step: int | None, doing: str) -> None:
        """The main thread has come so far, and does this now; it must call this again in time."""
        starts = self._own.step is None
        self._own = self._own._replace(step=step, doing=doing)
        self.moved()
        if starts:
            self._wake.set()

    def moved(self) -> None:
        """The main thread goes on to what all processes do next."""
        self._own = self._own._replace(moves=self._own.moves + 1)
        self.beat()

    def beat(self) -> None:
        """What the main thread does takes long, but goes on."""
        self._signs += 1
        self._moved = time.monotonic()

    def doubt(self, why: str) -> None:
        """JAX has failed in the main thread, for which the end of another process may be the cause:
        waits until that is noticed, which ends this one, or all others are heard of anew."""
        self._own = self._own._replace(why=why)
        self.beat()
        before = dict(self._heard)

        def lives(index: int) -> bool:
            now = self._heard[index].state
            return now.code == OK or (not now.code and now.beat >= before[index].state.beat + 3)

        while not all(lives(i) for i in before if i != self._index):
            time.sleep(0.1)

    def ending(self, code: int, why: str) -> None:
        """Tells the others that the run ends here; this process no more ends by their errors."""
        self._own = self._own._replace(code=code, why=why)
        self.beat()
        self._wake.set()

    def end(self) -> None:
        """The run has ended here. After an error, waits a little for the others to end by it, too;
        then nobody watches any more."""
        code, deadline = self._own.code, time.monotonic() + self._grace + 2 * self._interval

        def together() -> bool:
            others = [heard.state.code for i, heard in self._heard.items() if i != self._index]
            return not code or None not in others

        while not together() and time.monotonic() < deadline:
            time.sleep(0.05)
        self.alone = not together()
        self._closed.set()
        self._wake.set()
        for thread in self._threads:
            thread.join(self._grace)
        faulthandler.cancel_dump_traceback_later()
        if not self.alone:
            self._let_abort()

    def _speak(self) -> None:
        beat, closing = 0, False
        while not closing:
            self._wake.clear()
            # The last time for what the main thread has said last.
            closing, beat = self._closed.is_set(), beat + 1
            try:
                said = json.dumps(self._own._replace(beat=beat, signs=self._signs))
                self._store.put(f"state/{self._index}", said)
                found = self._store.entries("state/")
            except Exception:  # As a store that is gone throws: the other thread notices.
                found = {}
            now = time.monotonic()
            for key, value in found.items():
                index, state = int(key.rpartition("/")[2]), State(*json.loads(value))
                before = self._heard[index]
                if state.beat != before.state.beat:
                    moved = now if state.signs != before.state.signs else before.moved
                    self._heard[index] = Heard(state, now, moved)
                if state.code and index != self._index:
                    self._failed_at.setdefault(index, now)
            if found:
                self._answered = now
            if not closing:
                self._wake.wait(self._interval)

    def _judge(self) -> None:
        while not self._closed.wait(self._interval):
            # Ends the process where even this thread can't run, as a library keeps Python's lock.
            late = 2 * self._limits.run_s + 60
            faulthandler.dump_traceback_later(late, exit=True, file=STDERR)
            verdict = self._verdict(time.monotonic())
            if verdict is not None:
                self._leave(*verdict)

    def _verdict(self, now: float) -> tuple[int, str] | None:
        """The exit code and the reason to end, if there is one."""
        heard, limits = dict(self._heard), self._limits
        # This process may be about to end by the same error.
        failed = [i for i, at in dict(self._failed_at).items() if now - at > self._grace]
        if failed and self._own.code is None:
            state = heard[failed[0]].state
            return state.code or LOST, f"{name(failed[0], heard)} failed: {state.why}"
        limit, how_long = limits.said(starts=False)
        if now - self._answered > limit:
            return LOST, f"{name(0, heard)}, which coordinates, has not answered {how_long}"
        if lost := missing(heard, now, limits):
            names = " and ".join(name(i, heard) for i in lost)
            _, how_long = limits.said(starts=any(not heard[i].state.beat for i in lost))
            return LOST, f"nothing was heard of {names} {how_long}"
        return self._stuck(heard, now)

    def _stuck(self, heard: Mapping[int, Heard], now: float) -> tuple[int, str] | None:
        """The same where all talk, but none goes on: whoever does will come to those who wait."""
        since = max(self._moved, *(each.moved for each in heard.values()))
        going = {i: state for i, (state, *_) in heard.items() if state.code is None}
        starts = any(state.step is None for state in going.values())
        if starts:
            self._started = now
        else:
            since = max(since, self._started)
        limit, how_long = self._limits.said(starts)
        # Those of whom nothing is heard are to be named first.
        if now - since <= limit + self._grace:
            return None
        least = min((state.moves for state in going.values()), default=0)
        behind = [i for i, state in going.items() if state.moves == least]
        who = "none is behind another"
        if len(behind) < len(going):
            who = f"behind: {' and '.join(name(i, heard) for i in behind)}"
        return LOST, f"no process has got on {how_long}; {who}"

    def _leave(self, code: int, reason: str) -> None:
        """Ends the process at once: its main thread waits for what never comes."""
        # What the main thread has failed by, and was about to end with, is the first cause.
        code = code if self._own.code is None else self._own.code
        again = "; the same command goes on from the last checkpoint" if code in AGAIN else ""
        text = (
            f"error: {reason}. All processes end{again}. Last heard:\n"
            f"{report(dict(self._heard), time.monotonic())}\n"
            f"Where this process, {self._index}, was:"
        )
        try:
            print(text, file=sys.stderr, flush=True)
            faulthandler.dump_traceback(file=STDERR, all_threads=True)
            if self._index == 0:
                # With it goes the store: others are to find the true reason first.
                time.sleep(self._grace)
        finally:
            os._exit(code)

    def _catch_abort(self) -> None:
        """JAX aborts a process at once, from C++, when process 0 closes its connection. Python's
        own handlers would never run then; this one does, in the thread that aborts."""

        def aborted(_: int) -> None:
            own, first = self._own, self._heard[0].state
            if own.code is not None:
                print(f"error: {own.why or 'the coordinator is gone'}", file=sys.stderr, flush=True)
                os._exit(own.code or LOST)
            if first.code:
                self._leave(first.code, f"{name(0, self._heard)} failed: {first.why}")
            if self._index == 0 or self._reachable():
                self._leave(LOST, "JAX or another library aborts this process, see above")
            self._leave(LOST, f"{name(0, self._heard)}, which coordinates, is gone")

        # Kept, as C does not.
        self._handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(aborted)
        self._signal = ctypes.CDLL(None).signal
        self._signal.restype = ctypes.c_void_p
        self._signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
        self._before = self._signal(signal.SIGABRT, ctypes.cast(self._handler, ctypes.c_void_p))

    def _let_abort(self) -> None:
        self._signal(signal.SIGABRT, self._before)

    def _reachable(self) -> bool:
        try:
            socket.create_connection(self._coordinator, timeout=2).close()
        except OSError:
            return False
        return True
