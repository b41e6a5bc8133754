"""Detects that another process is lost or hangs, reports which one, and ends this process.

A collective waits forever for a process that never arrives. A thread of each process publishes its
state in the key-value store of JAX's coordination service, which is a thread of process 0, and
reads the states of the others. A second thread checks the states that were read. It never uses the
network, so that it also notices when the coordinator does not answer.
"""

import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from podracer.distributed.abort import on_abort
from podracer.errors import FINAL, ExitCode, see

EXPLAINED = see("devices-and-several-hosts")
# File descriptor for stack traces: sys.stderr may be replaced by an object without one.
STDERR = 2
# Seconds within which the operating system closes all sockets of a process that was killed.
ENDING_S = 1.0


class ProcessState(NamedTuple):
    """The state of a process as it publishes it.

    Attributes:
      host: name of its machine.
      heartbeats: number of states published so far.
      stages: number of stages begun so far. All processes go through the same stages.
      progress: a counter that grows while the process makes progress, also within a stage.
      step: environment steps done; None until training begins.
      activity: what the process is doing.
      exit_code: the code it is about to exit with; None while it runs.
      error: the first line of the exception that occurred in it.
    """

    host: str = ""
    heartbeats: int = 0
    stages: int = 0
    progress: int = 0
    step: int | None = None
    activity: str = "starting"
    exit_code: int | None = None
    error: str = ""


class LastSeen(NamedTuple):
    """The latest state read of a process, by this process's clock.

    Attributes:
      state: the state itself.
      heartbeat_at: time of the last new heartbeat.
      progress_at: time of the last progress.
    """

    state: ProcessState
    heartbeat_at: float
    progress_at: float


class Store(NamedTuple):
    """A key-value store that all processes share.

    Attributes:
      put: ``(key, value)`` writes a value.
      get_all: ``(prefix)`` returns the values by key, of all keys with this prefix.
    """

    put: Callable[[str, str], None]
    get_all: Callable[[str], Mapping[str, str]]


class Limits(NamedTuple):
    """Seconds after which a process counts as hanging, see ``joining.HostsConfig``.

    Attributes:
      start_s: the limit until all processes train.
      run_s: the limit from then on.
    """

    start_s: float
    run_s: float

    def get(self, *, starting: bool) -> tuple[float, str]:
        """The limit in seconds, and its config key."""
        if starting:
            return self.start_s, "hosts.start_timeout_s"
        return self.run_s, "hosts.timeout_s"

    def describe(self, *, starting: bool) -> str:
        """The limit as part of a message."""
        limit, key = self.get(starting=starting)
        return f"for {limit:g} s ({key})"


def process_name(index: int, seen: Mapping[int, LastSeen]) -> str:
    """The number of a process with its host, where that is known."""
    host = seen[index].state.host
    return f"process {index}" + (f" ({host})" if host else "")


def describe_processes(seen: Mapping[int, LastSeen], now: float) -> str:
    """One line for each process: its step, activity and error, and when it was last heard from."""
    lines = []
    for index, (state, heartbeat_at, _) in seen.items():
        if not state.heartbeats:
            lines.append(f"  process {index}: never heard from")
            continue
        step = "before its first step" if state.step is None else f"step {state.step:,}"
        ended = f"ends with code {state.exit_code}"
        activity = state.activity if state.exit_code is None else ended
        error = f", {state.error}" if state.error else ""
        lines.append(
            f"  {process_name(index, seen)}: {step}, {activity}{error}; "
            f"last heard from {now - heartbeat_at:.0f} s ago"
        )
    return "\n".join(lines)


def find_silent(seen: Mapping[int, LastSeen], now: float, limits: Limits) -> list[int]:
    """Numbers of the processes that have not ended and sent no heartbeat within the limit."""
    return [
        index
        for index, (state, heartbeat_at, _) in seen.items()
        if state.exit_code is None
        and now - heartbeat_at > limits.get(starting=not state.heartbeats)[0]
    ]


class Watchdog:
    """Watches over this process and all others, in two threads.

    Only the main thread changes this process's state, except for its progress counter, and only one
    of the two threads changes the states read from the others.

    Attributes:
      failed_alone: whether this process ended with an error that the others did not have.
    """

    def __init__(
        self, store: Store, index: int, count: int, limits: Limits, coordinator: tuple[str, int]
    ):
        """Starts the threads.

        Args:
          store: the store in which all processes publish their states.
          index: number of this process.
          count: number of processes.
          limits: time limits after which a process counts as hanging.
          coordinator: host and port of the process that holds the store.
        """
        self._store, self._index = store, index
        self._limits, self._coordinator = limits, coordinator
        self._interval = min(5.0, limits.run_s / 10)
        self._grace = max(3.0, 2 * self._interval)
        self._own, self._progress = ProcessState(socket.gethostname()), 0
        self._progress_at = self._answered_at = self._starting_at = now = time.monotonic()
        self._seen = {i: LastSeen(ProcessState(), now, now) for i in range(count)}
        self._failed_at: dict[int, float] = {}
        self._wake, self._closed = threading.Event(), threading.Event()
        self.failed_alone = False
        # JAX aborts a process as soon as process 0 closes its connection.
        self._restore_abort = on_abort(self._aborted)
        self._threads = [
            threading.Thread(target=body, name=f"watchdog {body.__name__}", daemon=True)
            for body in (self._exchange_states, self._check_states)
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, step: int | None, activity: str) -> None:
        """The main thread begins an activity, at this step; None until training begins."""
        starting = self._own.step is None
        self._own = self._own._replace(step=step, activity=activity)
        self.next_stage()
        if starting:
            self._wake.set()

    def next_stage(self) -> None:
        """The main thread begins the next of the stages that all processes go through."""
        self._own = self._own._replace(stages=self._own.stages + 1)
        self.show_progress()

    def show_progress(self) -> None:
        """The current stage is still making progress. Any thread may call this."""
        self._progress += 1
        self._progress_at = time.monotonic()

    def wait_until_others_are_alive(self, error: str) -> None:
        """Waits until each other process has sent three heartbeats, or has ended successfully.

        To be called when JAX has failed in the main thread: the cause may be that another process
        is lost. If so, this does not return: the other thread notices and ends this process.

        Args:
          error: the failure, for messages.
        """
        self._own = self._own._replace(error=error)
        self.show_progress()
        before = dict(self._seen)

        def is_alive(index: int) -> bool:
            now = self._seen[index].state
            return now.exit_code == ExitCode.OK or (
                not now.exit_code and now.heartbeats >= before[index].state.heartbeats + 3
            )

        while not all(is_alive(i) for i in before if i != self._index):
            time.sleep(0.1)

    def announce_end(self, exit_code: int, error: str) -> None:
        """Tells the others that the run ends here. From now on their errors don't end this process.

        Args:
          exit_code: exit code of this process.
          error: the exception's first line; empty after success.
        """
        self._own = self._own._replace(exit_code=exit_code, error=error)
        self.show_progress()
        self._wake.set()

    def close(self) -> None:
        """Stops the threads. After an error, first waits a little for the others to end as well."""
        code, deadline = self._own.exit_code, time.monotonic() + self._grace + 2 * self._interval

        def all_end() -> bool:
            others = [seen.state.exit_code for i, seen in self._seen.items() if i != self._index]
            return not code or None not in others

        while not all_end() and time.monotonic() < deadline:
            time.sleep(0.05)
        self.failed_alone = not all_end()
        self._closed.set()
        self._wake.set()
        for thread in self._threads:
            thread.join(self._grace)
        faulthandler.cancel_dump_traceback_later()
        if not self.failed_alone:
            self._restore_abort()

    def _exchange_states(self) -> None:
        """Publishes this process's state and reads those of the others, until ``close``."""
        heartbeats, closing = 0, False
        while not closing:
            self._wake.clear()
            # Once more after the end, to publish the last state.
            closing, heartbeats = self._closed.is_set(), heartbeats + 1
            try:
                own = self._own._replace(heartbeats=heartbeats, progress=self._progress)
                self._store.put(f"state/{self._index}", json.dumps(own))
                found = self._store.get_all("state/")
            except Exception:  # The store is gone; the other thread notices that it doesn't answer.
                found = {}
            self._take(found, time.monotonic())
            if not closing:
                self._wake.wait(self._interval)

    def _take(self, found: Mapping[str, str], now: float) -> None:
        """Records states that were read from the store at time ``now``, by their keys."""
        for key, value in found.items():
            index, state = int(key.rpartition("/")[2]), ProcessState(*json.loads(value))
            before = self._seen[index]
            if state.heartbeats != before.state.heartbeats:
                progressed = state.progress != before.state.progress
                self._seen[index] = LastSeen(state, now, now if progressed else before.progress_at)
            if state.exit_code and index != self._index:
                self._failed_at.setdefault(index, now)
        if found:
            self._answered_at = now

    def _check_states(self) -> None:
        """Ends the process if there is a reason to, until ``close``."""
        while not self._closed.wait(self._interval):
            # This ends the process even if a library holds Python's lock, so that no thread runs.
            late = 2 * self._limits.run_s + 60
            faulthandler.dump_traceback_later(late, exit=True, file=STDERR)
            problem = self._find_problem(time.monotonic())
            if problem is not None:
                self._exit_process(*problem)

    def _find_problem(self, now: float) -> tuple[int, str] | None:
        """The exit code and the reason to end this process now; None if there is no reason."""
        seen, limits = dict(self._seen), self._limits
        # Within the grace period this process may end with the same error by itself.
        failed = [i for i, at in dict(self._failed_at).items() if now - at > self._grace]
        if failed and self._own.exit_code is None:
            state = seen[failed[0]].state
            return (
                state.exit_code or ExitCode.STALLED,
                f"{process_name(failed[0], seen)} failed: {state.error}",
            )
        if now - self._answered_at > limits.run_s:
            return (
                ExitCode.STALLED,
                f"{process_name(0, seen)}, the coordinator, has not answered "
                f"{limits.describe(starting=False)}",
            )
        if silent := find_silent(seen, now, limits):
            names = " and ".join(process_name(i, seen) for i in silent)
            limit = limits.describe(starting=any(not seen[i].state.heartbeats for i in silent))
            return ExitCode.STALLED, f"nothing was heard from {names} {limit}"
        return self._find_stall(seen, now)

    def _find_stall(self, seen: Mapping[int, LastSeen], now: float) -> tuple[int, str] | None:
        """As ``_find_problem``, where all processes send heartbeats but none makes progress.

        As long as one process makes progress, the others may be waiting for it.
        """
        since = max(self._progress_at, *(each.progress_at for each in seen.values()))
        running = {i: state for i, (state, *_) in seen.items() if state.exit_code is None}
        starting = any(state.step is None for state in running.values())
        if starting:
            self._starting_at = now
        else:
            since = max(since, self._starting_at)
        limit, key = self._limits.get(starting=starting)
        # Within the grace period a silent process would be reported first.
        if now - since <= limit + self._grace:
            return None
        fewest = min((state.stages for state in running.values()), default=0)
        behind = [i for i, state in running.items() if state.stages == fewest]
        who = "none is behind the others"
        if len(behind) < len(running):
            who = f"behind: {' and '.join(process_name(i, seen) for i in behind)}"
        slow = "compilation" if starting else "call, evaluation or checkpoint"
        return (
            ExitCode.STALLED,
            f"no process has made progress {self._limits.describe(starting=starting)}; {who}; set "
            f"{key} higher if a single {slow} takes longer",
        )

    def _exit_process(self, code: int, reason: str) -> None:
        """Ends the process at once, because its main thread may wait forever."""
        # If the main thread was about to exit with an error, that error is the cause.
        code = code if self._own.exit_code is None else self._own.exit_code
        resumes = "" if code in FINAL else "; the same command resumes from the last checkpoint"
        text = (
            f"error: {reason}. All processes end{resumes}. Last states:\n"
            f"{describe_processes(dict(self._seen), time.monotonic())}\n{EXPLAINED}\n"
            f"Stack of this process, {self._index}:"
        )
        try:
            print(text, file=sys.stderr, flush=True)
            faulthandler.dump_traceback(file=STDERR, all_threads=True)
            if self._index == 0:
                # The store ends with this process, and the others should find the reason first.
                time.sleep(self._grace)
        finally:
            os._exit(code)

    def _aborted(self) -> None:
        """Ends the process with a message when a C++ library aborts it."""
        own, first = self._own, self._seen[0].state
        if own.exit_code is not None:
            text = f"error: {own.error or 'the coordinator is gone'}\n{EXPLAINED}"
            print(text, file=sys.stderr, flush=True)
            os._exit(own.exit_code or ExitCode.STALLED)
        if first.exit_code:
            self._exit_process(
                first.exit_code, f"{process_name(0, self._seen)} failed: {first.error}"
            )
        if self._index == 0 or self._coordinator_is_reachable():
            self._exit_process(
                ExitCode.STALLED, "JAX or another library aborts this process, see above"
            )
        self._exit_process(
            ExitCode.STALLED, f"{process_name(0, self._seen)}, the coordinator, is gone"
        )

    def _coordinator_is_reachable(self) -> bool:
        # A killed process closes its connections before it no longer accepts new ones.
        time.sleep(ENDING_S)
        try:
            socket.create_connection(self._coordinator, timeout=2).close()
        except OSError:
            return False
        return True
