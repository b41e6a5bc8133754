"""Where a run is looked at: a live view on a terminal or in a notebook, else plain lines."""

import importlib.util
import os
import pathlib
import resource
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Literal, TextIO

import jax
from rich.console import Console, RenderableType
from rich.live import Live

from podracer import view as view_lib
from podracer.metrics import Row
from podracer.view import View

Level = Literal["quiet", "normal", "verbose"]

# Without a live view, a line at most this often, in seconds.
PLAIN_INTERVAL = 2.0
# Times a second that the live view is drawn. That takes 4 ms of a CPU core at 80 columns, for which
# actor threads wait; a notebook sends each drawing to a browser.
TERMINAL_RATE, NOTEBOOK_RATE = 2, 1


def resident() -> int:
    """Bytes of memory that this process holds; the most it ever held, where there is no /proc."""
    statm = pathlib.Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def memory() -> dict[str, tuple[int, int]]:
    """Bytes in use and bytes there are (0: unknown), of this process and of its fullest device."""
    used = {"process": (resident(), 0)}
    # A CPU's memory is the process's own: its devices tell nothing.
    stats = [stats for device in jax.local_devices() if (stats := device.memory_stats())]
    if stats:
        used["device"] = max((x["bytes_in_use"], x.get("bytes_limit", 0)) for x in stats)
    return used


class Screen:
    """Shows a run.

    Use as a context manager around the run, so that the live view is taken down however it ends;
    its last state stays where it is.
    """

    def __init__(self, stream: TextIO | None = None, *, level: Level = "normal"):
        """Shows nothing yet.

        Args:
          stream: None takes the standard output.
          level: "quiet" shows nothing at all, "verbose" all values of each row.
        """
        quiet, stream = level == "quiet", stream or sys.stdout
        console = Console(file=stream, quiet=quiet, highlight=False)
        if console.is_jupyter and importlib.util.find_spec("ipywidgets") is None:
            # Nothing could be drawn anew: lines of text, which a notebook keeps as one output. This
            # is no terminal, though IPython's FORCE_COLOR has rich take it for one.
            console = Console(
                file=stream,
                quiet=quiet,
                force_jupyter=False,
                force_terminal=False,
                highlight=False,
            )
        self._console = console
        self._level = level
        self._view = View()
        self._live: Live | None = None
        self._changed = time.monotonic()
        self._last_line = -PLAIN_INTERVAL

    def __enter__(self) -> "Screen":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def say(self, text: str) -> None:
        """Prints text, above the live view where there is one."""
        self._console.print(text, soft_wrap=True, markup=False)

    def begin(
        self,
        total_steps: int,
        first_step: int = 0,
        *,
        title: str = "",
        earlier: Iterable[Row] = (),
    ) -> None:
        """Starts the live view, where there can be one.

        Args:
          total_steps: of the run.
          first_step: that this process begins with; not 0 where it continues a run.
          title: of the view.
          earlier: the run's rows up to ``first_step``, for its curves.
        """
        view = View(title, total_steps, first_step)
        for row in earlier:
            view = view_lib.extend(view, row, {}, {})
        # How fast this process is, only its own rows can tell.
        self._view = view._replace(row={}, origin=None)
        self._changed = time.monotonic()
        console = self._console
        if console.quiet or not (console.is_interactive or console.is_jupyter):
            return
        self._live = Live(
            console=console,
            get_renderable=self._draw,
            refresh_per_second=NOTEBOOK_RATE if console.is_jupyter else TERMINAL_RATE,
            # What a user sends to a file goes there, whatever happens on the terminal.
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        self._live.start(refresh=True)

    def show(self, row: Row, clock_seconds: Mapping[str, float]) -> None:
        """Shows a row.

        Args:
          row: of metrics, with at least ``step``, ``wall_time`` and ``time/steps_per_second``.
          clock_seconds: of the run so far, by what they went to.
        """
        if self._live is not None:
            self._view = view_lib.extend(self._view, row, clock_seconds, memory())
            self._changed = time.monotonic()
            return
        now = time.monotonic()
        due = now - self._last_line >= PLAIN_INTERVAL
        if self._level == "verbose":
            self.say(view_lib.lines(row))
        elif due or "eval/episode_return" in row:
            self._last_line = now
            self.say(view_lib.line(row))

    def finish(self, text: str) -> None:
        """Takes the live view down and says how it went."""
        self.close()
        self.say(text)

    def close(self) -> None:
        """Takes the live view down; its last state stays."""
        live, self._live = self._live, None
        if live is not None:
            if self._console.is_jupyter:
                # There, stopping does not draw what came last.
                live.refresh()
            live.stop()

    def _draw(self) -> RenderableType:
        return view_lib.render(
            self._view,
            self._console.width,
            age=time.monotonic() - self._changed,
            verbose=self._level == "verbose",
        )
