"""Shows a run while it trains: a live view on a terminal or in a notebook, else plain lines."""

import importlib.util
import json
import os
import pathlib
import resource
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Literal, TextIO

import jax
from etils import epath
from rich.console import Console, RenderableType
from rich.live import Live

from podracer.monitoring import dashboard
from podracer.monitoring.dashboard import View
from podracer.storage import bucket
from podracer.storage.workdir import SUMMARY, read_rows, read_run
from podracer.types import Row

Level = Literal["quiet", "normal", "verbose"]

# Seconds between two lines without a live view. Rows with an evaluation are always printed.
LINE_INTERVAL = 2.0
# Live view updates per second. One takes 4 ms of a CPU core at 80 columns, during which actor
# threads wait; a notebook sends each to the browser.
TERMINAL_RATE, NOTEBOOK_RATE = 2, 1


def resident_bytes() -> int:
    """Memory of this process in bytes: resident now, or at its peak where there is no /proc."""
    statm = pathlib.Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def memory_usage() -> dict[str, tuple[int, int]]:
    """Bytes in use and bytes available (0: unknown), of this process and its fullest device."""
    used = {"process": (resident_bytes(), 0)}
    # CPU devices have no statistics: their memory is the process' own.
    stats = [stats for device in jax.local_devices() if (stats := device.memory_stats())]
    if stats:
        used["device"] = max((x["bytes_in_use"], x.get("bytes_limit", 0)) for x in stats)
    return used


class RunDisplay:
    """Shows the progress of a run.

    Use it as a context manager around the run, so that the live view ends and the terminal is
    restored even if the run fails. The last state of the view stays visible.
    """

    def __init__(self, stream: TextIO | None = None, *, level: Level = "normal"):
        """Creates a display that shows nothing until ``log`` or ``begin`` is called.

        Args:
          stream: where to write; None is the standard output.
          level: "quiet" writes nothing at all, "verbose" shows all values of each row.
        """
        quiet, stream = level == "quiet", stream or sys.stdout
        console = Console(file=stream, quiet=quiet, highlight=False)
        if console.is_jupyter and importlib.util.find_spec("ipywidgets") is None:
            # Without widgets a notebook can't redraw an output, so write lines to a plain stream.
            # IPython sets FORCE_COLOR, which rich would take for a terminal.
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
        self._last_line = -LINE_INTERVAL

    def __enter__(self) -> "RunDisplay":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def log(self, text: str) -> None:
        """Prints text, above the live view if there is one."""
        self._console.print(text, soft_wrap=True, markup=False)

    def begin(
        self,
        total_steps: int,
        first_step: int = 0,
        *,
        title: str = "",
        earlier: Iterable[Row] = (),
    ) -> None:
        """Starts the live view if the stream is a terminal or a notebook.

        Args:
          total_steps: environment steps after which the run is complete.
          first_step: step that this process starts from; greater than 0 in a resumed run.
          title: title of the view.
          earlier: rows of metrics up to ``first_step``, which the curves begin with.
        """
        view = View(title, total_steps, first_step)
        for row in earlier:
            view = dashboard.extend(view, row, {}, {})
        # The speed of this process is measured from its own rows only.
        self._view = view._replace(row={}, origin=None)
        self._changed = time.monotonic()
        console = self._console
        if console.quiet or not (console.is_interactive or console.is_jupyter):
            return
        self._live = Live(
            console=console,
            get_renderable=self._draw,
            refresh_per_second=NOTEBOOK_RATE if console.is_jupyter else TERMINAL_RATE,
            # Output that the user has redirected to a file must still go to that file.
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        self._live.start(refresh=True)

    def show(self, row: Row, clock_seconds: Mapping[str, float]) -> None:
        """Shows a row of metrics.

        Args:
          row: metrics, with at least ``step``, ``wall_time`` and ``time/steps_per_second``.
          clock_seconds: time of the run so far, by activity.
        """
        if self._live is not None:
            self._view = dashboard.extend(self._view, row, clock_seconds, memory_usage())
            self._changed = time.monotonic()
            return
        now = time.monotonic()
        due = now - self._last_line >= LINE_INTERVAL
        if self._level == "verbose":
            self.log(dashboard.all_values(row))
        elif due or "eval/episode_return" in row:
            self._last_line = now
            self.log(dashboard.summary_line(row))

    def finish(self, text: str) -> None:
        """Ends the live view and prints a closing text."""
        self.close()
        self.log(text)

    def close(self) -> None:
        """Ends the live view; its last state stays visible."""
        live, self._live = self._live, None
        if live is not None:
            if self._console.is_jupyter:
                # In a notebook, stop() doesn't draw the newest state.
                live.refresh()
            live.stop()

    def _draw(self) -> RenderableType:
        return dashboard.render(
            self._view,
            self._console.width,
            age=time.monotonic() - self._changed,
            verbose=self._level == "verbose",
        )


def load_view(workdir: epath.PathLike) -> View:
    """The dashboard of a run, from the files of its workdir.

    Raises:
      ConfigError: there is no run in this folder.
    """
    content, rows = read_run(workdir), read_rows(workdir)
    summary = bucket.locate(workdir) / SUMMARY
    # Time by activity is written when a run finishes.
    seconds = json.loads(bucket.read(summary))["seconds"] if summary.exists() else {}
    view = View(dashboard.title(content["config"]), content["sizes"]["total_steps"])
    for row in rows:
        view = dashboard.extend(view, row, seconds, {})
    return view


def show_run(workdir: epath.PathLike, out: pathlib.Path | None, width: int | None, verbose: bool):
    """Prints the dashboard of a run, and with ``out`` also writes it to an SVG file.

    Args:
      workdir: workdir of the run.
      out: SVG file to write, or None.
      width: width in characters; None is the terminal's width.
      verbose: show all values of the newest row.
    """
    console = Console(width=width, record=out is not None, highlight=False)
    view = load_view(workdir)
    console.print(dashboard.render(view, console.width, verbose=verbose))
    if out is not None:
        console.save_svg(str(out), title=f"podracer: {workdir}")
