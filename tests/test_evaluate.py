"""The command that judges a run: known numbers, the run's own, real GIFs, errors."""

import dataclasses
import json
import sys

import jax
import numpy as np
import pytest
from PIL import Image, ImageSequence

from podracer import anakin, cli, envs, evaluate, parts, prng, render, sebulba
from podracer.envs import gymnax
from podracer.errors import ConfigError
from tests.helpers import make_config

HOST = ("envpool", "gymnasium")


@pytest.fixture
def left_by(tmp_path, monkeypatch):
    """Leaves a workdir as a run of this config would, with untrained weights, after 3 updates."""

    def leave(config, on_host=False):
        content = {
            "config": dataclasses.asdict(config),
            "architecture": "sebulba" if on_host else "anakin",
            "sizes": {},
        }
        (tmp_path / "config.json").write_text(json.dumps(content))
        make = envs.make_host if on_host else envs.make
        env = make(config.env, config.env_kwargs, config.env_params)
        weights = parts.make_agent(config, env.spec).init(prng.key(config.seed))
        loaded = []

        def load_weights(workdir, which, like):
            loaded.append(which)
            assert str(workdir) == str(tmp_path)
            shapes, expected = (jax.tree.map(np.shape, tree) for tree in (like, weights))
            assert shapes == expected
            return jax.device_put(weights, jax.devices()[0]), 3

        monkeypatch.setattr(evaluate.checkpoint, "load_weights", load_weights)
        return tmp_path, loaded

    return leave


def command(*arguments) -> int:
    return evaluate.main(["evaluate", *map(str, arguments)])


@pytest.mark.parametrize("on_host", [False, True])
def test_numbers_known_by_hand(on_host, left_by):
    """Episodes of 3 and of 4 steps, whose rewards count: returns of 6 and of 10."""
    config = make_config(env="dummy:counting", env_kwargs={"length": 3, "vary": 1})
    workdir, _ = left_by(config, on_host)
    result = evaluate.evaluate(workdir, num_episodes=24)
    assert (result["episodes"], result["complete"]) == (24, 24)
    assert (result["return_min"], result["return_max"]) == (6, 10)
    share = (result["return_mean"] - 6) / 4
    assert 0.2 < share < 0.8
    np.testing.assert_allclose(result["return_std"], 4 * np.sqrt(share * (1 - share)), rtol=1e-5)
    np.testing.assert_allclose(result["length_mean"], 3 + share, rtol=1e-5)
    assert (result["update"], result["env_steps"]) == (3, 3 * 8 * 8)


def test_the_command_prints_what_python_returns(left_by, capsys):
    workdir, loaded = left_by(make_config(env="dummy:counting", env_kwargs={"vary": 0}))
    expected = evaluate.evaluate(workdir, weights="best", num_episodes=3, seed=5, greedy=False)
    arguments = (f"--workdir={workdir}", "--weights=best", "--episodes=3", "--seed=5", "--nogreedy")
    assert command(*arguments, "--json") == cli.OK
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert json.loads(out) == expected
    assert (expected["seed"], expected["greedy"], expected["weights"]) == (5, False, "best")
    assert loaded == ["best", "best"]
    assert command(*arguments) == cli.OK
    out = capsys.readouterr().out
    assert "3 episodes, sampled, seed 5" in out
    assert "return 15.00 +- 0.00, from 15.00 to 15.00" in out
    assert "length 5.0" in out


def test_greedy_or_sampled(left_by):
    """An action half way to the cue earns most; an untrained mean is near 0, a sample anywhere."""
    workdir, _ = left_by(make_config(env="dummy:choice", env_kwargs={"continuous": True}))
    spread = {
        greedy: evaluate.evaluate(workdir, num_episodes=64, greedy=greedy)["return_std"]
        for greedy in (True, False, None)
    }
    assert spread[True] < 0.1
    assert spread[False] > 0.2
    assert spread[None] == spread[True]


def test_a_seed_is_one_set_of_episodes(left_by):
    workdir, _ = left_by(make_config())
    results = [
        evaluate.evaluate(workdir, seed=seed, greedy=False)["return_mean"] for seed in (None, 0, 1)
    ]
    assert results[0] == results[1] != results[2]


@pytest.mark.parametrize(
    ("train", "changes"),
    [
        (anakin.train, {"env": "gymnax:CartPole-v1", "network__core": "gru"}),
        pytest.param(sebulba.train, {"env": "envpool:CartPole-v1"}, marks=pytest.mark.slow),
    ],
)
def test_the_run_s_own_last_evaluation_comes_again(train, changes, tmp_path, monkeypatch):
    config = make_config(
        **changes,
        agent="vtrace",
        num_envs=16,
        total_steps=16 * 8 * 20,
        seed=3,
        normalize_observations=True,
        cpu_devices=2,
        learning_rate=1e-3,
    )
    run = train(config, tmp_path, quiet=True)
    steps = run.summary["env_steps"]
    update = steps // (config.num_envs * config.unroll_length)
    monkeypatch.setattr(evaluate.checkpoint, "load_weights", lambda *_: (run.weights, update))
    result = evaluate.evaluate(tmp_path)
    assert result["return_mean"] == run.summary["eval_return_mean"]
    assert result["return_std"] == run.summary["eval_return_std"] > 0
    assert (result["env_steps"], result["seed"]) == (steps, 3)
    assert result["length_mean"] == run.metrics[-1]["eval/episode_length"]


@pytest.mark.parametrize(
    ("env_id", "max_steps", "after_end"),
    [
        # gymnax shows no state after a termination.
        ("gymnax:CartPole-v1", 500, 0),
        ("gymnax:Breakout-MinAtar", 3, 1),
        ("envpool:Pong-v5", 40, 1),
        ("envpool:LunarLander-v3", 6, 1),
        ("gymnasium:CartPole-v1", 500, 1),
    ],
)
def test_an_episode_becomes_an_animated_gif(env_id, max_steps, after_end, left_by, tmp_path):
    """With memory and normalisation where there are no images: the film plays what is judged."""
    on_host = env_id.startswith(HOST)
    changes = {"network__core": "gru", "normalize_observations": True}
    if env_id == "envpool:Pong-v5":
        changes = {"network__torso": "pixels"}
    config = make_config(env=env_id, evaluation__max_steps=max_steps, **changes)
    workdir, _ = left_by(config, on_host)
    gif = tmp_path / "pictures" / "out.gif"
    result = evaluate.evaluate(workdir, num_episodes=1, greedy=False, gif=gif)
    assert result["gif"] == str(gif)
    assert result["gif_return"] == result["return_mean"]
    steps = result["gif_length"]
    assert steps == result["length_mean"] <= max_steps
    assert result["gif_frames"] == steps + after_end
    with Image.open(gif) as image:
        frames = [frame.copy().convert("RGB") for frame in ImageSequence.Iterator(image)]
        shown = [frame.info["duration"] for frame in ImageSequence.Iterator(image)]
    # What does not change from one step to the next is one frame, shown for longer.
    assert sum(shown) == (steps + after_end) * render.MILLISECONDS
    assert 1 < len(frames) <= steps + after_end
    assert len({frame.tobytes() for frame in frames}) > 1
    assert render.SIDE / 2 < max(frames[0].size) <= render.SIDE
    # Neither blank nor noise.
    assert 1 < len(frames[0].getcolors(render.COLORS)) <= render.COLORS


@pytest.mark.parametrize("most", [2, 3, 8])
def test_a_film_of_any_length_is_evenly_spaced_and_no_longer_than_it_may_be(most):
    for length in range(1, 50):
        film, drawn = render.Film(most), []
        for step in range(length):
            film.offer(lambda: drawn.append(step) or np.full((2, 2, 3), step, np.uint8))  # noqa: B023
        steps = [picture.getpixel((0, 0))[0] for picture in film.pictures]
        stride = steps[1] - steps[0] if len(steps) > 1 else 1
        assert steps == list(range(0, length, stride))
        assert len(steps) <= most
        assert stride == 1 or len(steps) > most // 2
        assert len(drawn) <= most * (1 + np.log2(stride))


@pytest.mark.parametrize(
    ("size", "expected"),
    [((600, 400), (320, 213)), ((64, 64), (320, 320)), ((160, 210), (160, 210))],
)
def test_pictures_are_of_a_size_to_look_at(size, expected):
    assert render.resize(Image.new("RGB", size)).size == expected


def test_the_state_shown_is_the_state_given():
    """gymnax's CartPole, far right and upright, then far left: where it is dark moves along."""
    env = envs.make("gymnax:CartPole-v1", {}, {})
    state, _ = env.reset(prng.key(0))
    centre = {}
    for x in (-1.5, 1.5):
        picture = env.render(state.replace(env=state.env.replace(x=x, theta=0.0)))
        # The cart alone is above the track and below the pole's joint.
        dark = (picture.max(-1) < 50).any(0) & (np.arange(600) > 0)
        rows = picture[290:297].max(-1) < 50
        centre[x] = np.nonzero(rows.all(0))[0].mean()
        assert dark.any()
    np.testing.assert_allclose([centre[-1.5], centre[1.5]], [300 - 187.5, 300 + 187.5], atol=15)


BAD = {
    "no workdir": ([], "--workdir is missing"),
    "no run": (["--workdir=nothing/here"], "'nothing/here' is no run"),
    "weights": (["--weights=first"], "should be one of <last|best>"),
    "episodes": (["--episodes=0"], "evaluation.episodes"),
    "seed": (["--seed=-1"], "seed must not be negative, got -1"),
    "frames": (["--gif_frames=1"], "--gif_frames=1 must be 2 or more"),
    "flag": (["--gif_frame=3"], "Unknown command line flag 'gif_frame'"),
    "extra": (["everything"], "unexpected arguments: everything"),
    "not a GIF": (["--gif=out.mp4"], "--gif=out.mp4 is no name of a GIF; out.gif would be"),
    "a file in the way": (["--gif=config.json/out.gif"], "can't be written"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_settings_end_in_one_line_and_exit_code_2(
    name, left_by, capsys, monkeypatch, nothing_plays
):
    arguments, message = BAD[name]
    workdir, _ = left_by(make_config())
    monkeypatch.chdir(workdir)
    given = [] if name == "no workdir" else [f"--workdir={workdir}"]
    assert command(*given, *arguments) == cli.BAD_CONFIG
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.fixture
def nothing_plays(monkeypatch):
    def plays(*args):
        raise AssertionError("played")

    monkeypatch.setattr(evaluate, "_statistics", plays)


def test_a_run_without_weights(left_by, capsys, monkeypatch, nothing_plays):
    workdir, _ = left_by(make_config())

    def load_weights(*_):
        raise ConfigError("holds no checkpoints")

    monkeypatch.setattr(evaluate.checkpoint, "load_weights", load_weights)
    assert command(f"--workdir={workdir}") == cli.BAD_CONFIG
    assert "holds no checkpoints" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("env_id", "on_host"),
    [
        ("dummy:counting", False),
        ("dummy:counting", True),
        ("gymnax:MemoryChain-bsuite", False),
        ("envpool:Taxi-v3", True),
    ],
)
def test_what_can_not_be_drawn_is_said_before_anything_is_played(
    env_id, on_host, left_by, capsys, nothing_plays
):
    workdir, _ = left_by(make_config(env=env_id), on_host)
    assert command(f"--workdir={workdir}", f"--gif={workdir}/out.gif") == cli.BAD_CONFIG
    error = capsys.readouterr().err
    assert f"{env_id} can't be drawn" in error
    assert error.count("\n") == 1
    assert not (workdir / "out.gif").exists()


@pytest.mark.parametrize("env_id", ["gymnax:CartPole-v1", "gymnasium:CartPole-v1"])
def test_the_package_that_draws_is_named_where_it_is_missing(
    env_id, left_by, monkeypatch, nothing_plays
):
    monkeypatch.setitem(sys.modules, "pygame", None)
    workdir, _ = left_by(make_config(env=env_id), env_id.startswith(HOST))
    with pytest.raises(ConfigError, match="pygame"):
        evaluate.evaluate(workdir, gif=workdir / "out.gif")


def test_an_environment_that_has_no_name_for_gymnax_is_not_drawn():
    class Nameless:
        def __init__(self):
            self._env, self.default_params = gymnax.import_gymnax().make("CartPole-v1")

        def __getattr__(self, attribute):
            if attribute == "name":
                raise AttributeError
            return getattr(self._env, attribute)

    with pytest.raises(ConfigError, match="my_module:Nameless can't be drawn"):
        render.check("my_module:Nameless", gymnax.adapt(Nameless(), "my_module:Nameless", {}))


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_s_checkpoints_are_what_is_judged(tmp_path, monkeypatch, capsys, caplog):
    """In a folder that is given as users give it, relative to where they are."""
    monkeypatch.chdir(tmp_path)
    run = anakin.train(make_config(total_steps=2048), "run", quiet=True)
    left = files(tmp_path / "run")
    caplog.clear()
    for which in ("last", "best"):
        arguments = ("--workdir=run", f"--weights={which}", "--json")
        assert command(*arguments, f"--gif={tmp_path}/out.gif", "--gif_frames=5") == cli.OK
        result = json.loads(capsys.readouterr().out)
        assert result["return_mean"] == run.summary["eval_return_mean"]
        assert result["return_std"] == run.summary["eval_return_std"]
        assert result["env_steps"] == run.summary["env_steps"] == 2048
        assert (tmp_path / "out.gif").stat().st_size > 0
    assert files(tmp_path / "run") == left, "judging only reads"
    assert not caplog.records, "warned by a library, of what users can't change"
