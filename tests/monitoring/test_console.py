"""The live view and plain lines: terminals of any width, notebooks, pipes, and finished runs."""

import io
import itertools
import json
import math
import mmap
import os
import pty
import select
import signal
import subprocess
import sys
import time
import types
from typing import Any

import pytest
from rich.console import Console

from podracer import look
from podracer.monitoring import console as console_lib
from podracer.monitoring import dashboard
from podracer.monitoring import series as series_lib
from podracer.monitoring.console import RunDisplay

MEMORY = {"process": (3 * 2**29, 0), "device": (5 * 2**29, 80 * 2**30)}
SECONDS = {"setup": 1.0, "compile": 10.0, "evaluation": 2.0, "training": 27.0}


def train_row(step, *, ret=1.0, **more):
    return {
        "step": step,
        "wall_time": 10.0 + step / 1000,
        "time/steps_per_second": 1234.5,
        "loss/entropy": 0.51,
        "loss/policy": -1.25e-4,
        "loss/total": 0.25,
        "train/episodes": 3,
        "train/episode_return": ret,
        **more,
    }


def actor_row(step):
    return train_row(
        step,
        **{
            "actor/restarts": 2, "lag/min": 1, "lag/mean": 1.5, "lag/max": 2,
            "time/actor_environment": 0.3, "time/actor_wait": 0.1,
            "time/learner_update": 0.1, "time/learner_wait": 0.3,
        },
    )  # fmt: skip


def agents_row(step, returns, evaluations=()):
    """A row of several agents, of which the first has diverged and the second has ended no
    episode."""
    row = train_row(step, **{"member_0/train/diverged": 1.0, "member_1/train/diverged": 0.0})
    for name, values in (("train", returns), ("eval", evaluations)):
        for i, x in enumerate(values, 2):
            row |= {f"member_{i}/train/diverged": 0.0, f"member_{i}/{name}/episode_return": x}
    return row


def view_of(*rows, total_steps=10_000, seconds=SECONDS, memory=MEMORY):
    view = dashboard.View("ppo on gymnax:CartPole-v1, seed 0", total_steps)
    for row in rows:
        view = dashboard.extend(view, row, seconds, memory)
    return view


def drawn(view, width=80, *, encoding="utf-8", **options) -> list[str]:
    """The lines that a terminal of this width receives, without colours."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=stream, width=width)
    console.print(dashboard.render(view, width, **options))
    stream.flush()
    return stream.buffer.getvalue().decode(encoding).splitlines()


# The view.


def test_a_series_of_any_length_keeps_its_means_and_extremes():
    series, values = series_lib.Series(), [math.sin(i / 500) for i in range(5000)]
    for value in values:
        series = series_lib.append(series, value)
    assert series_lib.SPARK_CELLS <= len(series.means) <= 2 * series_lib.SPARK_CELLS
    chunks = [values[i : i + series.span] for i in range(0, len(values), series.span)]
    assert series.means == pytest.approx([sum(chunk) / len(chunk) for chunk in chunks])
    assert (series.low, series.high, series.last) == (min(values), max(values), values[-1])


def test_a_series_leaves_out_nan_and_infinity():
    series = series_lib.Series()
    for value in (1.0, math.nan, math.inf, 3.0, -math.inf):
        series = series_lib.append(series, value)
    assert series.means == (1.0, 3.0)
    assert (series.low, series.high, series.last) == (1.0, 3.0, -math.inf)


def test_sparkline():
    assert series_lib.sparkline(range(8), 60) == "▁▂▃▄▅▆▇█"
    assert series_lib.sparkline(range(16), 8) == "▁▂▃▄▅▆▇█"
    assert series_lib.sparkline([5.0, 5.0], 60) == "▁▁"
    assert series_lib.sparkline([], 60) == ""
    assert series_lib.sparkline([1.0], 0) == ""


def test_the_view_shows_progress_returns_losses_times_and_memory():
    rows = [actor_row(step) for step in range(1000, 6000, 1000)]
    rows[2]["eval/episode_return"] = 480.0
    rows[4]["eval/episode_return"] = 123.0
    rows[4]["train/episode_return"] = 99.5
    lines = drawn(view_of(*rows), 100, age=1.0)
    assert lines[0].startswith("╭─ ppo on gymnax:CartPole-v1, seed 0 ─")
    # 5,000 steps are left at 1,000 steps/s of wall time; the newest row is a second old.
    assert "50%  0:00:04 left" in lines[1]
    by_label = {line[2:13].strip(): " ".join(line[13:-2].split()) for line in lines[2:-1]}
    assert by_label["steps"] == "5,000 of 10,000, 1,234 steps/s"
    assert by_label["return"] == "99.50 ▁▁▁▁█ min 1.000 max 99.50"
    assert by_label["evaluation"] == "123.0 █▁ best 480.0"
    assert by_label["losses"] == "entropy 0.510 policy -0.000125 total 0.250"
    assert by_label["actors"].lstrip("━") == " environment 75% wait 25%"
    assert by_label["learner"].lstrip("━") == " update 25% wait 75%"
    assert by_label["lag"] == "min 1 mean 1.50 max 2 restarts 2"
    assert by_label["time"].lstrip("━") == " setup 2% compile 25% evaluation 5% training 68%"
    assert by_label["memory"] == "process 1.5 GiB device 2.5 GiB of 80.0 GiB"


def test_the_view_shows_workers_and_what_crosses_the_wire():
    names = ("workers", "free_places", "joins", "losses", "restarts", "rejected")
    counts = {f"remote/{name}": number for number, name in enumerate(names, 2)}
    times = {"env_ms_p50": 1.5, "env_ms_p99": 20.0, "network_ms_p50": 0.25, "network_ms_p99": 4.0}
    row = train_row(1000, **counts, **{f"remote/{name}": x for name, x in times.items()})
    row |= {"remote/received_mb": 3.5 * 2**20 / 1e6, "remote/sent_mb": 0.0}
    words = " ".join(" ".join(line.strip("│ ").split()) for line in drawn(view_of(row)))
    assert "workers connected 2 free places 3 joins 4 losses 5 restarts 6 rejected 7" in words
    assert "received 3.5 MiB sent 0 Bytes env 1.50 to 20.0 ms network 0.250 to 4.00 ms" in words
    assert dashboard.summary_line(row).endswith(", workers: 2 connected, 5 lost")


def test_the_view_shows_a_replay_and_that_it_fills():
    replay = {"replay/fill": 0.05, "train/learned": 0.0}
    filling = train_row(1000, **replay)
    (line,) = [line for line in drawn(view_of(filling)) if "replay" in line]
    assert line.strip("│ ").split(None, 1) == ["replay", "5% full, not learning yet"]
    assert dashboard.summary_line(filling).endswith(
        "replay 5% full, not learning yet, return 1.000"
    )
    learning = {"train/learned": 1.0, "replay/age": 12.25, "replay/importance": 0.5}
    learning["replay/priority"] = 0.25
    row = train_row(2000, **{**replay, **learning})
    words = " ".join(" ".join(line.strip("│ ").split()) for line in drawn(view_of(row)))
    assert "replay fill 0.0500 age in updates 12.2 priority 0.250 importance 0.500" in words
    assert "replay" not in dashboard.summary_line(row)


def test_the_view_shows_quantiles_over_agents():
    rows = [
        agents_row(1000, [9, 9, 9, 9, 9], [50.0, 10.0, 20.0, math.nan, 30.0, 40.0]),
        agents_row(2000, [3.0, 1.0, 4.0, 2.0]),
    ]
    lines = [" ".join(line[2:-2].split()) for line in drawn(view_of(*rows), 100)]
    assert "agents 6, 1 of them diverged" in lines
    (training, evaluation) = (line for line in lines if line.startswith("of agents"))
    assert training == "of agents min 1.00 25 % 1.75 median 2.50 75 % 3.25 max 4.00 ▁▃▆█"
    # Of the newest evaluation, where a later row has none.
    assert evaluation == "of agents min 10.0 25 % 20.0 median 30.0 75 % 40.0 max 50.0 ▁▃▅▆█"
    assert not any("of agents" in line for line in drawn(view_of(train_row(1000))))
    (alone,) = (x for x in drawn(view_of(agents_row(1, [5.0]))) if "of agents" in x)
    assert alone.count("5.00") == 5


def test_verbose_shows_all_values():
    text = "\n".join(drawn(view_of(actor_row(1000)), 100, verbose=True))
    assert "episodes 3" in text
    assert "actor_environment 0.300" in text
    assert "wall_time 11.0" in text
    assert text.count("lag  ") == 1


UNUSUAL = {
    "no row yet": view_of(),
    "no episodes": view_of({"step": 5, "wall_time": 1.0, "time/steps_per_second": 5.0}),
    "almost no speed": view_of({"step": 5, "wall_time": 1.0, "time/steps_per_second": 1e-310}),
    "NaN": view_of(
        dict.fromkeys(actor_row(1), math.nan) | {"step": 2},
        dict.fromkeys(actor_row(1), math.inf) | {"step": 3, "eval/episode_return": math.nan},
        seconds={"training": 0.0},
    ),
    "NaN time of a finished run": view_of(train_row(10_000, wall_time=math.nan)),
    "huge": view_of(
        train_row(10**13, ret=-1e30, **{"loss/grad_norm": 1e38}),
        train_row(10**13 + 1, ret=1e30),
        total_steps=10**15,
    ),
    "many losses": view_of(actor_row(1) | {f"loss/{'very' * 9}_long_{i}": 0.1 for i in range(30)}),
    "agents": view_of(agents_row(1, [-math.inf, 1e30, -1e30] * 99, [math.nan])),
    "no steps": view_of(total_steps=0),
    "[bold]markup": view_of(train_row(1))._replace(title="[bold]" * 30),
}


@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("width", [1, 10, 24, 40, 80, 120, 300])
@pytest.mark.parametrize("name", UNUSUAL)
def test_no_width_and_no_value_breaks_the_view(name, width, encoding, verbose):
    lines = drawn(UNUSUAL[name], width, encoding=encoding, verbose=verbose)
    assert max(map(len, lines)) <= width
    if width >= 40:
        # The frame is closed.
        assert {len(line) for line in lines} == {width}


def test_the_view_keeps_its_shape_from_row_to_row():
    rows = [train_row(100 * i, ret=10.0**i, **{"loss/value": 10.0**-i}) for i in range(1, 8)]
    views = [drawn(view_of(*rows[:count]), 80) for count in range(1, 8)]
    assert len({len(lines) for lines in views}) == 1
    # The extremes don't move while the sparkline before them grows.
    assert len({lines[3].index("min") for lines in views}) == 1


def test_time_left():
    view = view_of(train_row(2000))
    # With a single row, by the speed in that row.
    assert dashboard.seconds_left(view) == pytest.approx(8000 / 1234.5)
    assert dashboard.seconds_left(view_of()) is None
    assert dashboard.seconds_left(view_of(train_row(10), train_row(2000))) == pytest.approx(8.0)
    stopped = {"step": 5, "wall_time": 1.0, "time/steps_per_second": 0.0}
    assert dashboard.seconds_left(view_of(stopped)) is None


# In a pipe.


def printed_to_a_pipe(level, rows):
    stream = io.StringIO()
    with RunDisplay(stream, level=level) as display:
        display.log("a header [with] brackets")
        display.begin(10_000)
        for row in rows:
            display.show(row, SECONDS)
        display.finish("the end")
    return stream.getvalue().splitlines()


ROWS = [
    train_row(1000, ret=21.04),
    train_row(2000),
    train_row(3000, **{"eval/episode_return": 1e4}),
    {"step": 4000, "time/steps_per_second": 3.0, "eval/episode_return": math.nan},
]
PLAIN = [
    "1,000 steps, 1,234 steps/s, return 21.04",
    "3,000 steps, 1,234 steps/s, return 1.000, evaluation 10,000",
    "4,000 steps, 3 steps/s, evaluation nan",
]


def test_plain_lines_are_few():
    # The second row comes within two seconds of the first; evaluations always have their line.
    assert printed_to_a_pipe("normal", ROWS) == ["a header [with] brackets", *PLAIN, "the end"]


def test_plain_lines_come_every_two_seconds(monkeypatch):
    clock = itertools.count(step=0.5)
    monkeypatch.setattr(console_lib.time, "monotonic", lambda: next(clock))
    lines = printed_to_a_pipe("normal", [train_row(step) for step in range(1, 10)])
    assert [line.split()[0] for line in lines[1:-1]] == ["1", "5", "9"]


def test_quiet_is_silent():
    assert printed_to_a_pipe("quiet", ROWS) == []


def test_verbose_prints_all_values_of_each_row():
    lines = printed_to_a_pipe("verbose", ROWS[:2])
    assert lines[1:6] == [
        PLAIN[0],
        "  run       step 1,000, wall_time 11.0",
        "  time      steps_per_second 1,234",
        "  loss      entropy 0.510, policy -0.000125, total 0.250",
        "  train     episodes 3, episode_return 21.0",
    ]
    assert len(lines) == 1 + 2 * 5 + 1


# On a terminal.

# Four runs in one process, whose output the fixture splits: importing JAX takes seconds.
PROGRAM = """
import sys, time, traceback
from podracer.monitoring import console
console.TERMINAL_RATE = 20

def run(level, end):
    with console.RunDisplay(level=level) as display:
        display.log("the header")
        display.begin(10_000, title="probe")
        for step in range(1000, 5000, 1000):
            display.show({"step": step, "wall_time": step / 1000, "time/steps_per_second": 10.0,
                          "train/episode_return": step / 7}, {"training": 1.0})
            time.sleep(0.1)
        end(display)
    print("and after")

def fail(display):
    raise RuntimeError("a failure")

def wait(display):
    print("waiting", flush=True)
    time.sleep(60)

def finish(display):
    display.finish("the closing text")

for level, end in (("quiet", finish), ("normal", finish), ("normal", fail), ("normal", wait)):
    try:
        run(level, end)
    except BaseException:
        traceback.print_exc()
    print("NEXT", flush=True)
"""


@pytest.fixture(scope="module")
def terminal():
    """What a terminal receives from each of the program's runs."""
    terminal, end = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "40"}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=end, stdout=end, stderr=end, env=environment, start_new_session=True,
    )  # fmt: skip
    os.close(end)
    output, interrupted, deadline = b"", False, time.monotonic() + 100
    try:
        while time.monotonic() < deadline:
            if not select.select([terminal], [], [], 1.0)[0]:
                continue
            try:
                output += os.read(terminal, 65536)
            except OSError:
                # Linux reports that the other end is closed by EIO.
                break
            if b"waiting" in output and not interrupted:
                process.send_signal(signal.SIGINT)
                interrupted = True
        assert process.wait(timeout=10) == 0
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
    quiet, finished, failed, interrupted, rest = output.decode().split("NEXT\r\n")
    assert rest == ""
    return {"quiet": quiet, "finished": finished, "failed": failed, "interrupted": interrupted}


SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"


def last_view(output):
    """The output from the last drawing of the view on."""
    return output[output.rindex("╭") :]


def test_a_terminal_has_a_live_view_whose_last_state_stays(terminal):
    output = terminal["finished"]
    assert output.index("the header") < output.index("╭")
    assert output.count("╭") >= 3, "the view is drawn repeatedly"
    last = last_view(output)
    assert "4,000 of 10,000" in last
    assert last.index("571.4") < last.index("╰") < last.index("the closing text")
    assert last.index("the closing text") < last.index("and after")
    assert output.rindex(SHOW_CURSOR) > output.rindex(HIDE_CURSOR)
    assert "1,000 steps, 10 steps/s" not in output, "a live view replaces plain lines"


@pytest.mark.parametrize(
    ("run", "message"),
    [("failed", "RuntimeError: a failure"), ("interrupted", "KeyboardInterrupt")],
)
def test_the_live_view_ends_however_the_run_ends(run, message, terminal):
    output = terminal[run]
    last = last_view(output)
    assert "4,000 of 10,000" in last
    assert last.index("╰") < last.index("Traceback") < last.index(message)
    assert output.rindex(SHOW_CURSOR) > output.rindex(HIDE_CURSOR)


def test_a_quiet_run_writes_nothing_to_a_terminal(terminal):
    assert terminal["quiet"] == "and after\r\n"


# In a notebook.


@pytest.fixture
def notebook(monkeypatch):
    """What a notebook shows: its outputs in order, and the content of its one widget."""
    outputs, redrawn = [], []

    class Output:
        def __enter__(self):
            outputs.append(redrawn)

        def __exit__(self, *_):
            outputs.remove(redrawn)

        def clear_output(self, wait):
            redrawn.clear()

    def display(thing, **_):
        (redrawn if any(x is redrawn for x in outputs) else outputs).append(thing)

    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    ipython: Any = types.ModuleType("IPython")
    display_module: Any = types.ModuleType("IPython.display")
    ipython.display, display_module.display = display_module, display
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display_module)
    widgets: Any = types.ModuleType("ipywidgets")
    widgets.__spec__ = types.SimpleNamespace(name="ipywidgets")
    widgets.Output = Output
    monkeypatch.setitem(sys.modules, "ipywidgets", widgets)
    return outputs, redrawn


def text_of(thing):
    return thing._repr_mimebundle_([], [])["text/plain"]


def test_a_notebook_draws_into_one_output(notebook):
    outputs, redrawn = notebook
    with RunDisplay() as display:
        display.begin(10_000, title="probe")
        for step in range(1, 300):
            display.show(train_row(step), SECONDS)
        display.finish("the closing text")
    texts = outputs[1:]
    # rich leaves an empty output where its live view ended.
    assert [text_of(x) for x in texts] == ["", "the closing text\n"]
    (last,) = redrawn
    assert "299 of 10,000" in text_of(last)


def test_a_notebook_without_widgets_has_plain_lines(notebook, monkeypatch, capsys):
    monkeypatch.setattr(console_lib.importlib.util, "find_spec", lambda name: None)
    # As IPython's kernel sets it.
    monkeypatch.setenv("FORCE_COLOR", "1")
    with RunDisplay() as display:
        display.begin(10_000)
        for row in ROWS:
            display.show(row, SECONDS)
        display.finish("the closing text")
    assert capsys.readouterr().out.splitlines() == [*PLAIN, "the closing text"]
    with RunDisplay(level="quiet") as display:
        display.begin(10_000)
        display.show(ROWS[0], SECONDS)
        display.finish("the closing text")
    assert capsys.readouterr().out == ""
    assert notebook == ([], [])


# Memory, resumed runs and finished runs.


def test_memory(monkeypatch):
    (used, limit) = console_lib.memory_usage()["process"]
    assert limit == 0
    assert 2**26 < used < 2**40
    with mmap.mmap(-1, 2**26) as block:
        block[::4096] = b"x" * len(block[::4096])
        assert console_lib.resident_bytes() - used > 2**25
    gpu = types.SimpleNamespace(memory_stats=lambda: {"bytes_in_use": 7, "bytes_limit": 9})
    cpu = types.SimpleNamespace(memory_stats=lambda: None)
    fuller = types.SimpleNamespace(memory_stats=lambda: {"bytes_in_use": 8})
    monkeypatch.setattr(console_lib.jax, "local_devices", lambda: [gpu, fuller, cpu])
    assert console_lib.memory_usage()["device"] == (8, 0)


def test_a_resumed_run_shows_its_whole_curve_and_the_speed_of_this_process():
    stream = io.StringIO()
    stream.isatty = lambda: True
    with RunDisplay(stream) as display:
        earlier = [train_row(step, ret=step) for step in (1000, 2000, 3000)]
        display.begin(10_000, 3000, earlier=earlier)
        # 400 steps in 10 seconds, after earlier rows at 1,000 steps/s.
        display.show(train_row(3200, wall_time=100.0), SECONDS)
        display.show(train_row(3600, wall_time=110.0), SECONDS)
        assert display._view.returns.num_values == 5
        assert display._view.returns.high == 3000
        assert dashboard.seconds_left(display._view) == pytest.approx(6400 / 40)


@pytest.fixture
def finished_run(tmp_path):
    config = {"agent": "ppo", "env": "gymnax:CartPole-v1", "seed": 3}
    about = {"config": config, "sizes": {"total_steps": 5000}}
    (tmp_path / "config.json").write_text(json.dumps(about))
    rows = [train_row(step) for step in (1000, 4000)] + [{**train_row(5000), "loss/total": None}]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 60')
    (tmp_path / "summary.json").write_text(json.dumps({"seconds": SECONDS}))
    return tmp_path


def test_look_shows_a_finished_run(finished_run, capsys):
    out = finished_run / "dashboard.svg"
    assert look.main([str(finished_run), f"--out={out}", "--width=90"]) == 0
    text = capsys.readouterr().out
    assert "ppo on gymnax:CartPole-v1, seed 3" in text
    assert "100% in 0:00:15" in text
    assert "compile 25%" in text
    assert {len(line) for line in text.splitlines()} == {90}
    svg = out.read_text()
    assert svg.startswith("<svg")
    assert "evaluation" in svg


def test_look_shows_a_run_without_a_summary(finished_run, capsys):
    (finished_run / "summary.json").unlink()
    assert look.main([str(finished_run), "--verbose"]) == 0
    assert "episode_return 1.00" in capsys.readouterr().out


def test_look_rejects_a_folder_without_a_run(tmp_path, capsys):
    assert look.main([str(tmp_path / "nowhere")]) == 2
    assert "nowhere' is not a run" in capsys.readouterr().err
