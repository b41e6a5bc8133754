"""The screen: what is drawn of a run on terminals of any width, in notebooks and in pipes."""

import io
import itertools
import json
import math
import os
import pty
import select
import signal
import subprocess
import sys
import time
import types

import pytest
from rich.console import Console

from podracer import look, view
from podracer import screen as screen_lib
from podracer.screen import Screen

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


def seen(*rows, total_steps=10_000, seconds=SECONDS, memory=MEMORY):
    shown = view.View("ppo on gymnax:CartPole-v1, seed 0", total_steps)
    for row in rows:
        shown = view.extend(shown, row, seconds, memory)
    return shown


def drawn(shown, width=80, *, encoding="utf-8", **options) -> list[str]:
    """What a terminal of this width gets, without colours."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=stream, width=width)
    console.print(view.render(shown, width, **options))
    stream.flush()
    return stream.buffer.getvalue().decode(encoding).splitlines()


# The view.


def test_a_curve_of_any_length_keeps_its_means_and_extremes():
    curve, values = view.Curve(), [math.sin(i / 500) for i in range(5000)]
    for value in values:
        curve = view.add(curve, value)
    assert view.SPARK_CELLS <= len(curve.means) <= 2 * view.SPARK_CELLS
    chunks = [values[i : i + curve.span] for i in range(0, len(values), curve.span)]
    assert curve.means == pytest.approx([sum(chunk) / len(chunk) for chunk in chunks])
    assert (curve.low, curve.high, curve.last) == (min(values), max(values), values[-1])


def test_a_curve_leaves_out_what_is_not_finite():
    curve = view.Curve()
    for value in (1.0, math.nan, math.inf, 3.0, -math.inf):
        curve = view.add(curve, value)
    assert curve.means == (1.0, 3.0)
    assert (curve.low, curve.high, curve.last) == (1.0, 3.0, -math.inf)


def test_sparklines():
    assert view.sparkline(range(8), 60) == "▁▂▃▄▅▆▇█"
    assert view.sparkline(range(16), 8) == "▁▂▃▄▅▆▇█"
    assert view.sparkline([5.0, 5.0], 60) == "▁▁"
    assert view.sparkline([], 60) == ""
    assert view.sparkline([1.0], 0) == ""


def test_everything_is_on_the_view():
    rows = [actor_row(step) for step in range(1000, 6000, 1000)]
    rows[2]["eval/episode_return"] = 480.0
    rows[4]["eval/episode_return"] = 123.0
    rows[4]["train/episode_return"] = 99.5
    lines = drawn(seen(*rows), 100, age=1.0)
    assert lines[0].startswith("╭─ ppo on gymnax:CartPole-v1, seed 0 ─")
    # 5,000 steps are left, at 1,000 a second of wall time; the newest row is a second old.
    assert "50%  0:04 left" in lines[1]
    by_label = {line[2:13].strip(): " ".join(line[13:-2].split()) for line in lines[2:-1]}
    assert by_label["steps"] == "5,000 of 10,000, 1,234 a second"
    assert by_label["return"] == "99.5 ▁▁▁▁█ min 1.00 max 99.5"
    assert by_label["evaluation"] == "123.0 █▁ best 480.0"
    assert by_label["losses"] == "entropy 0.51 policy -0.000125 total 0.25"
    assert by_label["actors"].lstrip("━") == " environment 75% wait 25%"
    assert by_label["learner"].lstrip("━") == " update 25% wait 75%"
    assert by_label["lag"] == "min 1 mean 1.5 max 2 restarts 2"
    assert by_label["time"].lstrip("━") == " setup 2% compile 25% evaluation 5% training 68%"
    assert by_label["memory"] == "process 1.5 GiB device 2.5 GiB of 80.0 GiB"


def test_verbose_shows_all_values():
    text = "\n".join(drawn(seen(actor_row(1000)), 100, verbose=True))
    assert "episodes 3" in text
    assert "actor_environment 0.3" in text
    assert "wall_time 11" in text
    assert text.count("lag  ") == 1


ODD = {
    "nothing yet": seen(),
    "no episodes": seen({"step": 5, "wall_time": 1.0, "time/steps_per_second": 5.0}),
    "NaN": seen(
        dict.fromkeys(actor_row(1), math.nan) | {"step": 2},
        dict.fromkeys(actor_row(1), math.inf) | {"step": 3, "eval/episode_return": math.nan},
        seconds={"training": 0.0},
    ),
    "huge": seen(
        train_row(10**13, ret=-1e30, **{"loss/grad_norm": 1e38}),
        train_row(10**13 + 1, ret=1e30),
        total_steps=10**15,
    ),
    "much": seen(actor_row(1) | {f"loss/{'very' * 9}_long_{i}": 0.1 for i in range(30)}),
    "nothing to do": seen(total_steps=0),
    "[bold]markup": seen(train_row(1))._replace(title="[bold]" * 30),
}


@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("width", [1, 10, 24, 40, 80, 120, 300])
@pytest.mark.parametrize("name", ODD)
def test_no_width_and_no_value_breaks_the_view(name, width, encoding, verbose):
    lines = drawn(ODD[name], width, encoding=encoding, verbose=verbose)
    assert max(map(len, lines)) <= width
    if width >= 40:
        # A closed frame.
        assert {len(line) for line in lines} == {width}


def test_the_view_keeps_its_shape_from_row_to_row():
    rows = [train_row(100 * i, ret=10.0**i, **{"loss/value": 10.0**-i}) for i in range(1, 8)]
    heights = {len(drawn(seen(*rows[:count]), 80)) for count in range(1, 8)}
    assert len(heights) == 1
    # What is written behind the curve does not move while that grows.
    assert len({drawn(seen(*rows[:count]), 80)[3].index("min") for count in range(1, 8)}) == 1


def test_time_left():
    shown = seen(train_row(2000))
    # One row says how fast it was itself.
    assert view.seconds_left(shown) == pytest.approx(8000 / 1234.5)
    assert view.seconds_left(seen()) is None
    assert view.seconds_left(seen(train_row(10), train_row(2000))) == pytest.approx(8.0)
    assert (
        view.seconds_left(seen({"step": 5, "wall_time": 1.0, "time/steps_per_second": 0.0})) is None
    )
    assert view.duration(3725.4) == "1:02:05"
    assert view.duration(59.7) == "1:00"


# The screen, in a pipe.


def shown_in_a_pipe(level, rows):
    stream = io.StringIO()
    with Screen(stream, level=level) as screen:
        screen.say("a header [with] brackets")
        screen.begin(10_000)
        for row in rows:
            screen.show(row, SECONDS)
        screen.finish("the end")
    return stream.getvalue().splitlines()


ROWS = [
    train_row(1000, ret=21.04),
    train_row(2000),
    train_row(3000, **{"eval/episode_return": 1e4}),
    {"step": 4000, "time/steps_per_second": 3.0, "eval/episode_return": math.nan},
]
PLAIN = [
    "1,000 steps, 1,234 a second, return 21.0",
    "3,000 steps, 1,234 a second, return 1.0, evaluation 10,000.0",
    "4,000 steps, 3 a second, evaluation nan",
]


def test_plain_lines_are_few():
    # The second row comes within two seconds, evaluations are always said.
    assert shown_in_a_pipe("normal", ROWS) == ["a header [with] brackets", *PLAIN, "the end"]


def test_plain_lines_come_every_two_seconds(monkeypatch):
    clock = itertools.count(step=0.5)
    monkeypatch.setattr(screen_lib.time, "monotonic", lambda: next(clock))
    lines = shown_in_a_pipe("normal", [train_row(step) for step in range(1, 10)])
    assert [line.split()[0] for line in lines[1:-1]] == ["1", "5", "9"]


def test_quiet_is_silent():
    assert shown_in_a_pipe("quiet", ROWS) == []


def test_verbose_says_all_of_each_row():
    lines = shown_in_a_pipe("verbose", ROWS[:2])
    assert lines[1:6] == [
        PLAIN[0],
        "  run       step 1,000, wall_time 11",
        "  time      steps_per_second 1,234",
        "  loss      entropy 0.51, policy -0.000125, total 0.25",
        "  train     episodes 3, episode_return 21",
    ]
    assert len(lines) == 1 + 2 * 5 + 1


# The screen, on a terminal.

PROGRAM = """
import sys, time
from podracer.screen import Screen
with Screen(level=sys.argv[2]) as screen:
    screen.say("the header")
    screen.begin(10_000, title="probe")
    for step in range(1000, 5000, 1000):
        screen.show({"step": step, "wall_time": step / 1000, "time/steps_per_second": 10.0,
                     "train/episode_return": step / 7}, {"training": 1.0})
        time.sleep(0.3)
    if sys.argv[1] == "fail":
        raise RuntimeError("a failure")
    if sys.argv[1] == "wait":
        print("waiting", flush=True)
        time.sleep(60)
    screen.finish("the closing text")
print("and after")
"""


def run_on_a_terminal(what, level="normal", *, columns=80, interrupt_at=None):
    """All that a terminal gets, and the exit code."""
    terminal, end = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": "40"}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, what, level],
        stdin=end, stdout=end, stderr=end, env=environment, start_new_session=True,
    )  # fmt: skip
    os.close(end)
    output, deadline = b"", time.monotonic() + 100
    try:
        while time.monotonic() < deadline:
            if not select.select([terminal], [], [], 1.0)[0]:
                continue
            try:
                output += os.read(terminal, 65536)
            except OSError:
                # Linux says so when the other end is closed.
                break
            if interrupt_at is not None and interrupt_at in output:
                process.send_signal(signal.SIGINT)
                interrupt_at = None
        return output.decode(), process.wait(timeout=10)
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"


def left_behind(output):
    """What stays after the view was drawn for the last time."""
    return output[output.rindex("╭") :]


def test_a_terminal_has_a_live_view_whose_last_state_stays():
    output, code = run_on_a_terminal("finish")
    assert code == 0
    assert output.index("the header") < output.index("╭")
    assert output.count("╭") >= 3, "it is drawn again and again"
    last = left_behind(output)
    assert "4,000 of 10,000" in last
    assert last.index("571.4") < last.index("╰") < last.index("the closing text")
    assert last.index("the closing text") < last.index("and after")
    assert output.rindex(SHOW_CURSOR) > output.rindex(HIDE_CURSOR)
    assert "1,000 steps, 10 a second" not in output, "no plain lines beside it"


@pytest.mark.parametrize(
    ("what", "message", "interrupt_at"),
    [("fail", "RuntimeError: a failure", None), ("wait", "KeyboardInterrupt", b"waiting")],
)
def test_the_live_view_is_taken_down_however_a_run_ends(what, message, interrupt_at):
    output, code = run_on_a_terminal(what, interrupt_at=interrupt_at)
    assert code != 0
    last = left_behind(output)
    assert "4,000 of 10,000" in last
    assert last.index("╰") < last.index("Traceback") < last.index(message)
    assert output.rindex(SHOW_CURSOR) > output.rindex(HIDE_CURSOR)


def test_quiet_leaves_a_terminal_alone():
    assert run_on_a_terminal("finish", "quiet") == ("and after\r\n", 0)


# The screen, in a notebook.


@pytest.fixture
def notebook(monkeypatch):
    """What a notebook shows: its outputs, in order, and what was drawn into the one widget."""
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
    ipython = types.ModuleType("IPython")
    ipython.display = types.ModuleType("IPython.display")
    ipython.display.display = display
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", ipython.display)
    widgets = types.ModuleType("ipywidgets")
    widgets.__spec__ = types.SimpleNamespace(name="ipywidgets")
    widgets.Output = Output
    monkeypatch.setitem(sys.modules, "ipywidgets", widgets)
    return outputs, redrawn


def text_of(thing):
    return thing._repr_mimebundle_([], [])["text/plain"]


def test_a_notebook_draws_into_one_output(notebook):
    outputs, redrawn = notebook
    with Screen() as screen:
        screen.begin(10_000, title="probe")
        for step in range(1, 300):
            screen.show(train_row(step), SECONDS)
        screen.finish("the closing text")
    texts = outputs[1:]
    # rich leaves an empty one where it takes its view down.
    assert [text_of(x) for x in texts] == ["", "the closing text\n"]
    (drawn_last,) = redrawn
    assert "299 of 10,000" in text_of(drawn_last)


def test_a_notebook_that_can_not_draw_has_plain_lines(notebook, monkeypatch, capsys):
    monkeypatch.setattr(screen_lib.importlib.util, "find_spec", lambda name: None)
    # As IPython's kernel does.
    monkeypatch.setenv("FORCE_COLOR", "1")
    with Screen() as screen:
        screen.begin(10_000)
        for row in ROWS:
            screen.show(row, SECONDS)
        screen.finish("the closing text")
    assert capsys.readouterr().out.splitlines() == [*PLAIN, "the closing text"]
    with Screen(level="quiet") as screen:
        screen.begin(10_000)
        screen.show(ROWS[0], SECONDS)
        screen.finish("the closing text")
    assert capsys.readouterr().out == ""
    assert notebook == ([], [])


# Memory, a run that continues, and one that is looked at again.


def test_memory(monkeypatch):
    (used, limit) = screen_lib.memory()["process"]
    assert limit == 0
    assert 2**26 < used < 2**40
    block = bytearray(2**28)
    block[::4096] = b"x" * len(block[::4096])
    assert screen_lib.resident() - used > 2**27
    gpu = types.SimpleNamespace(memory_stats=lambda: {"bytes_in_use": 7, "bytes_limit": 9})
    cpu = types.SimpleNamespace(memory_stats=lambda: None)
    fuller = types.SimpleNamespace(memory_stats=lambda: {"bytes_in_use": 8})
    monkeypatch.setattr(screen_lib.jax, "local_devices", lambda: [gpu, fuller, cpu])
    assert screen_lib.memory()["device"] == (8, 0)


def test_a_run_that_continues_shows_its_whole_curve_and_its_own_speed():
    stream = io.StringIO()
    stream.isatty = lambda: True
    with Screen(stream) as screen:
        earlier = [train_row(step, ret=step) for step in (1000, 2000, 3000)]
        screen.begin(10_000, 3000, earlier=earlier)
        # 400 steps in 10 seconds, while the rows before made 1,000 a second.
        screen.show(train_row(3200, wall_time=100.0), SECONDS)
        screen.show(train_row(3600, wall_time=110.0), SECONDS)
        assert screen._view.returns.seen == 5
        assert screen._view.returns.high == 3000
        assert view.seconds_left(screen._view) == pytest.approx(6400 / 40)


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


def test_looking_at_a_run_again(finished_run, capsys):
    out = finished_run / "view.svg"
    assert look.main([str(finished_run), f"--out={out}", "--width=90"]) == 0
    text = capsys.readouterr().out
    assert "ppo on gymnax:CartPole-v1, seed 3" in text
    assert "100% in 0:15" in text
    assert "compile 25%" in text
    assert {len(line) for line in text.splitlines()} == {90}
    svg = out.read_text()
    assert svg.startswith("<svg")
    assert "evaluation" in svg


def test_looking_at_a_run_that_goes_on(finished_run, capsys):
    (finished_run / "summary.json").unlink()
    assert look.main([str(finished_run), "--verbose"]) == 0
    assert "episode_return 1" in capsys.readouterr().out


def test_looking_where_no_run_is(tmp_path, capsys):
    assert look.main([str(tmp_path / "nowhere")]) == 2
    assert "nowhere' is no run" in capsys.readouterr().err
