"""Host environments: their pools follow the one convention of ``types.Pool``."""

import contextlib
import importlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import types
from typing import Any

import gymnasium
import jax
import numpy as np
import pytest

from podracer import envs
from podracer.acting import host_unroll
from podracer.envs import dummy, envpool, spaces
from podracer.errors import ConfigError


def images(shape):
    return gymnasium.spaces.Box(0, 255, shape, np.uint8)


def play(env, steps, seeds=(1, 2, 3, 4), actions=None):
    """All arrivals of a pool under random or given actions, ``[steps + 1, B]``."""
    pool = env.make_pool(list(seeds), 1)
    rng = np.random.default_rng(0)
    arrivals = [pool.reset()]
    for t in range(steps):
        if actions is not None:
            action = actions[t]
        elif hasattr(env.spec.action, "num_actions"):
            action = rng.integers(0, env.spec.action.num_actions, len(seeds), np.int32)
        else:
            low, high = env.spec.action.low, env.spec.action.high
            action = rng.uniform(low, high, (len(seeds), *low.shape)).astype(np.float32)
        arrivals.append(pool.step(action))
    pool.close()
    return jax.tree.map(lambda *x: np.stack(x), *arrivals)


@pytest.mark.parametrize(
    ("env_id", "kwargs", "limit"),
    [
        ("envpool:CartPole-v1", {"max_episode_steps": 14}, 14),
        # A limit that envpool's max_episode_steps does not know of.
        ("envpool:Highway-v0", {"duration": 14}, 14),
        ("envpool:Basic-v1", {"use_combined_action": True, "max_episode_steps": 14}, 14),
        ("gymnasium:CartPole-v1", {"max_episode_steps": 14}, 14),
        ("dummy:counting", {"truncate": True}, None),
        ("dummy:counting", {}, None),
    ],
)
def test_an_episode_begins_in_the_step_after_an_end(env_id, kwargs, limit, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where ViZDoom leaves its settings
    out = play(envs.make_host_environment(env_id, kwargs, {}), 200)
    timestep = out.timestep
    assert timestep.first[0].all()
    assert (timestep.discount[0] == 1).all()
    np.testing.assert_array_equal(timestep.first[1:], out.game_over[:-1])
    assert (timestep.reward[timestep.first] == 0).all()
    # No end without a reason: terminated, or as long as an episode may be.
    terminated = timestep.discount == 0
    assert out.game_over[terminated].all()
    if limit:
        assert terminated.any()
        length = np.zeros(4)
        for t in range(1, 201):
            length = np.where(timestep.first[t], 0, length + 1)
            truncated = out.game_over[t] & ~terminated[t]
            assert (length[truncated] == limit).all()
            assert (length <= limit).all()
        assert (out.game_over & ~terminated).any()
    else:
        assert (out.game_over & terminated).any() != kwargs.get("truncate", False)


def test_a_lost_life_ends_an_episode_but_not_the_game():
    kwargs = {"episodic_life": True, "reward_clip": True}
    out = play(envs.make_host_environment("envpool:SpaceInvaders-v5", kwargs, {}), 900)
    ended = out.timestep.discount == 0
    assert ended.sum() >= 2 * out.game_over.sum() > 0
    assert (ended[out.game_over]).all()
    np.testing.assert_array_equal(out.timestep.first[1:], ended[:-1])
    # Rewards are clipped, the score is the game's own.
    assert out.timestep.reward.max() == 1
    assert out.raw_reward.max() >= 5
    np.testing.assert_array_equal(np.sign(out.raw_reward), out.timestep.reward)


@pytest.mark.parametrize("episodic_life", [True, False])
def test_the_newest_frames_stacked_on_the_device_are_the_stack(episodic_life):
    kwargs = {"episodic_life": episodic_life, "max_episode_steps": 120}
    whole, newest = (
        envs.make_host_environment("envpool:Breakout-v5", kwargs, {}, newest_frame=frame)
        for frame in (False, True)
    )
    rng = np.random.default_rng(0)
    actions = rng.integers(0, 4, (260, 4), np.int32)
    expected, sent = (play(env, 260, actions=actions) for env in (whole, newest))
    decode = jax.jit(newest.decode_observation)
    observation = np.zeros((4, 84, 84, 4), np.uint8)
    assert expected.timestep.first.sum() > 8
    for t in range(261):
        now = jax.tree.map(lambda x: x[t], sent.timestep.observation)  # noqa: B023
        assert now["frame"].shape == (4, 84, 84)
        observation = decode(now, observation)
        one = whole.decode_observation(expected.timestep.observation[t], observation)
        np.testing.assert_array_equal(observation, one)


@pytest.mark.parametrize(
    ("env_id", "shape", "dtype"),
    [
        ("envpool:Pong-v5", (84, 84, 4), np.uint8),
        ("envpool:CoinrunEasy-v0", (64, 64, 3), np.uint8),
        ("envpool:gfootball/academy_empty_goal_close-v1", (72, 96, 4), np.uint8),
        ("envpool:HalfCheetah-v4", (17,), np.float32),
        ("envpool:LunarLander-v3", (8,), np.float32),
        ("envpool:Taxi-v3", (500,), np.float32),
        ("gymnasium:CliffWalking-v1", (48,), np.float32),
        ("gymnasium:Pendulum-v1", (3,), np.float32),
    ],
)
def test_observations_as_agents_see_them(env_id, shape, dtype):
    try:
        env = envs.make_host_environment(env_id, {}, {})
    except ConfigError as error:
        if "Qt 5" in str(error):
            pytest.skip("this machine lacks Qt 5, which envpool 1.2.5 needs for Procgen")
        raise
    assert (env.spec.observation.shape, env.spec.observation.dtype) == (shape, dtype)
    out = play(env, 3, seeds=(1, 2))
    observation = env.decode_observation(out.timestep.observation[-1], np.zeros((2, *shape), dtype))
    assert (observation.shape, observation.dtype) == ((2, *shape), dtype)
    assert out.timestep.reward.dtype == out.timestep.discount.dtype == np.float32
    if env_id == "envpool:Pong-v5":
        # Time runs along the last axis: the newest frame is the last.
        np.testing.assert_array_equal(observation[..., -1], out.timestep.observation[-1][:, -1])


@pytest.mark.parametrize(
    ("env_id", "kwargs", "message"),
    [
        ("envpool:Pongg-v5", {}, "did you mean Pong-v5"),
        ("envpool:Pong-v5", {"episodic_lives": True}, "did you mean episodic_life"),
        ("envpool:Pong-v5", {"num_envs": 3}, "'num_envs', which is set by num_envs"),
        ("envpool:Pong-v5", {"num_threads": 3}, "which is set by sebulba.pool_threads"),
        ("envpool:Pong-v5", {"noop_max": "many"}, "can't be made with env_kwargs"),
        ("envpool:Go9x9-v1", {}, "a game of 2 players; agents play alone"),
        ("gymnasium:CartPole-v7", {}, "CartPole-v1"),
        ("gymnasium:LunarLandr-v3", {}, "LunarLander-v3"),
        ("gymnasium:Walk-v0", {}, r"is gymnasium:MODULE:Walk-v0"),
        ("gymnasium:walk:Walk-v0", {}, "there is no module 'walk'"),
        ("gymnasium:tests.envs.dictionaries:Dict-v0", {}, "mean Dictionary-v0"),
        ("walk:Walk", {}, "an environment of your own is gymnasium:walk:NAME"),
        ("gymnasium:CartPole-v1", {"colour": 1}, "colour"),
        ("gymnasium:Blackjack-v1", {}, "observes Tuple.*; agents observe Box, Discrete and"),
        ("gymnax:CartPole-v1", {}, "podracer.anakin"),
        ("envpol:Pong-v5", {}, "envpool"),
        ("Pong-v5", {}, "names no suite"),
        ("dummy:sign", {}, "counting"),
    ],
)
def test_bad_input_is_named(env_id, kwargs, message):
    with pytest.raises(ConfigError, match=message):
        envs.make_host_environment(env_id, kwargs, {})


@pytest.mark.filterwarnings("ignore:.*The obs returned")
@pytest.mark.parametrize(
    ("observation", "shape"),
    [(np.zeros(3), r"\(3,\)"), ({"place": np.zeros(2)}, r"{'place': \(2,\)}")],
)
def test_an_observation_that_is_not_of_its_space_is_named(observation, shape, photos, monkeypatch):
    def reset(self, *, seed=None, options=None):
        return observation, {}

    monkeypatch.setattr(Photos, "reset", reset)
    with pytest.raises(ConfigError, match=f"reset returned an observation of the shape {shape}"):
        envs.make_host_environment("gymnasium:Photos-v0", {"shape": (2,)}, {})


@pytest.mark.filterwarnings("ignore:.*(The obs|The reward|Expects|done signal|Core environment)")
@pytest.mark.parametrize(
    ("method", "returned", "message"),
    [
        ("reset", np.zeros(2), "reset returned 1 value; it must return observation, info"),
        ("step", (np.zeros(2), 0.0, False, {}), "step returned 4 values; it must return observ"),
        ("step", (np.zeros(3), 0.0, False, False, {}), r"step returned an .* shape \(3,\)"),
        (
            "step",
            (np.zeros(2), np.zeros(1), False, False, {}),
            r"reward=array\(\[0.\]\); it must be",
        ),
        ("step", (np.zeros(2), None, False, False, {}), "reward=None; it must be one number"),
        (
            "step",
            (np.zeros(2), 0.0, np.zeros(1) > 0, False, {}),
            "terminated=.*; it must be True or",
        ),
    ],
)
def test_what_an_own_environment_returns_is_checked(method, returned, message, photos, monkeypatch):
    monkeypatch.setattr(Photos, method, lambda self, *args, **options: returned)
    with pytest.raises(ConfigError, match=message):
        envs.make_host_environment("gymnasium:Photos-v0", {"shape": (2,)}, {})


HANGS = """
import os, signal, sys, tempfile, threading, time

tempfile.TemporaryDirectory()  # registers what runs at the end before multiprocessing does
import numpy as np

from podracer import envs

sleeper, steps = "gymnasium:tests.distributed.sleeper:Sleeper-v0", []
pool = envs.make_host_environment(sleeper, {"folder": sys.argv[1]}, {}).make_pool([0], 1)
pool.reset()
step = lambda: [steps.append(pool.step(np.zeros(1, np.int32))) for _ in range(30)]
threading.Thread(target=step, daemon=True).start()
while len(steps) < 19:
    time.sleep(0.1)
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("end", "code"), [("ended", 0), ("killed", -signal.SIGKILL)])
def test_no_process_outlives_one_that_ends_although_an_environment_hangs(end, code, tmp_path):
    arguments = [sys.executable, "-c", HANGS, str(tmp_path), end]
    assert subprocess.run(arguments, timeout=100, check=False).returncode == code
    deadline = time.monotonic() + 30
    while any(pathlib.Path("/proc", path.name).exists() for path in tmp_path.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.1)


class OldInterface(gymnasium.Env):
    """Returns what Gym's environments returned before version 0.26."""

    observation_space, action_space = images((2,)), gymnasium.spaces.Discrete(2)

    def reset(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return np.zeros(2, np.uint8)

    def step(self, action) -> Any:
        return np.zeros(2, np.uint8), 0.0, False, {}


class NewInterface(gymnasium.Wrapper):
    def reset(self, *, seed=None, options=None) -> Any:
        return self.env.reset(), {}

    def step(self, action) -> Any:
        observation, reward, done, info = self.env.step(action)
        return observation, reward, done, False, info


def test_a_wrapper_may_adapt_an_interface():
    gymnasium.register("Adapted-v0", lambda: NewInterface(OldInterface()))
    assert envs.make_host_environment("gymnasium:Adapted-v0", {}, {}).spec.observation.shape == (2,)


@pytest.mark.parametrize(
    "space",
    [
        gymnasium.spaces.Box(0, 5, (2,), np.int32),
        gymnasium.spaces.Discrete(3, start=1),
        gymnasium.spaces.MultiBinary(2),
        gymnasium.spaces.MultiDiscrete([2, 3]),
    ],
)
def test_an_action_space_that_agents_can_not_act_in_is_named(space):
    observation = gymnasium.spaces.Box(0, 1, (2,), np.float32)
    with pytest.raises(ConfigError, match="odd has the action space " + re.escape(str(space))):
        spaces.host_environment("odd", observation, space, dummy.CountingPool)


def test_anakin_points_to_sebulba_for_host_environments():
    with pytest.raises(ConfigError, match=r"podracer\.sebulba"):
        envs.make_environment("envpool:Pong-v5", {}, {})


def test_newest_frame_needs_stacked_gray_frames(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where ViZDoom leaves its settings
    for env_id in ("envpool:CartPole-v1", "gymnasium:CartPole-v1", "dummy:counting"):
        with pytest.raises(ConfigError, match="frame"):
            envs.make_host_environment(env_id, {}, {}, newest_frame=True)
    for env_id, kwargs in (
        ("envpool:Pong-v5", {"gray_scale": False}),
        ("envpool:DefendTheCenter-v1", {}),
    ):
        with pytest.raises(ConfigError, match="colours"):
            envs.make_host_environment(env_id, kwargs, {}, newest_frame=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_processes_of_gymnasium_s_environments_leave_signals_to_the_run(number):
    env = envs.make_host_environment("gymnasium:CartPole-v1", {}, {})
    pool: Any = env.make_pool([0, 1], 1)
    try:
        pool.reset()
        for process in pool._envs.processes:
            os.kill(process.pid, number)
        assert pool.step(np.zeros(2, np.int32)).timestep.reward.tolist() == [1, 1]
    finally:
        pool.close()


def children(name):
    """The numbers of this process's own child processes whose command has this name."""
    found = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command, _, rest = (folder / "stat").read_text().rpartition(")")
            if command.endswith(f"({name}") and int(rest.split()[1]) == os.getpid():
                found.append(int(folder.name))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_the_processes_of_vizdoom_leave_signals_to_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where ViZDoom leaves its settings
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    kwargs = {"use_combined_action": True, "img_height": 8, "img_width": 8}
    env = envs.make_host_environment("envpool:HealthGathering-v1", kwargs, {})
    pool = env.make_pool([0, 1], 1)
    try:
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == blocked
        pool.reset()
        games = children("vizdoom")
        assert len(games) == 2
        for game in games:
            # Looked up first, because envpool aborts when a game has ended.
            status = pathlib.Path(f"/proc/{game}/status").read_text()
            masked = int(re.findall(r"SigBlk:\s*(\w+)", status)[0], 16)
            for number in (signal.SIGINT, signal.SIGTERM):
                assert masked >> (number - 1) & 1
                os.kill(game, number)
        for _ in range(5):
            assert not pool.step(np.zeros(2, np.int32)).game_over.any()
        assert children("vizdoom") == games
    finally:
        pool.close()


def test_a_missing_envpool_is_named(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[sebulba\]'"):
        envs.make_host_environment("envpool:Pong-v5", {}, {})


class Photos(gymnasium.Env):
    """Observes images of any shape, each element of which is its place in the image."""

    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, shape):
        self.observation_space = images(shape)
        self._image = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)

    def reset(self, *, seed=None, options=None):
        return self._image, {}

    def step(self, action):
        return self._image, 0.0, False, False, {}


@pytest.fixture
def photos():
    """Makes ``gymnasium:Photos-v0`` with images of this shape, and decodes one image."""
    gymnasium.register("Photos-v0", Photos)

    def observe(shape, **params):
        env = envs.make_host_environment("gymnasium:Photos-v0", {"shape": shape}, params)
        image = Photos(shape).reset()[0]
        seen = env.decode_observation(image[None], image[None])[0]
        np.testing.assert_array_equal(env.observe(image), seen)
        assert env.spec.observation.shape == seen.shape
        return image, seen

    yield observe
    del gymnasium.registry["Photos-v0"]


@pytest.mark.parametrize(
    ("env_id", "params", "shapes"),
    [
        (
            "gymnasium:tests.envs.dictionaries:Dictionary-v0",
            {"channels": "first"},
            {"image": (6, 5, 3), "inner": {"kind": (3,), "switches": (2,)}, "action_mask": (4,)},
        ),
        (
            "envpool:MiniGrid-Empty-5x5-v0",
            {},
            {"image": (7, 7, 3), "direction": (4,), "mission": (96,)},
        ),
        ("envpool:WalkerWalk-v1", {}, {"height": (), "orientations": (14,), "velocity": (9,)}),
    ],
)
def test_dictionaries_as_agents_see_them(env_id, params, shapes):
    env = envs.make_host_environment(env_id, {}, params)
    spec = env.spec.observation
    assert jax.tree.map(lambda x: x.shape, spec) == shapes
    pool = env.make_pool([1, 2], 1)
    arrival = pool.reset().timestep
    pool.close()
    host_unroll.check_transfer(arrival, host_unroll.transfer_shapes(env, 2))
    seen = env.decode_observation(arrival.observation, ())
    dtypes = jax.tree.map(lambda x: x.dtype, seen)
    assert dtypes == jax.tree.map(lambda x: x.dtype, spec)
    if params:
        np.testing.assert_array_equal(seen["action_mask"], [[True, False, False, True]] * 2)
        np.testing.assert_array_equal(seen["inner"]["kind"], [[0, 1, 0]] * 2)
        np.testing.assert_array_equal(seen["image"][0, 0, 0], [0, 30, 60])


def test_images_in_a_dictionary_may_have_ambiguous_channels():
    with pytest.raises(ConfigError, match=r"shape \(3, 6, 5\); .*channels=first.*channels=last"):
        envs.make_host_environment("gymnasium:tests.envs.dictionaries:Dictionary-v0", {}, {})


def test_channels_of_gymnasium_s_images_are_last_or_as_the_user_sets_them(photos):
    for shape in ((6, 5, 3), (4, 4, 4)):
        np.testing.assert_array_equal(*photos(shape))
    for shape in ((3, 6, 5), (4, 6, 4), (6, 5, 3)):
        np.testing.assert_array_equal(*photos(shape, channels="last"))
        image, seen = photos(shape, channels="first")
        np.testing.assert_array_equal(np.moveaxis(image, 0, -1), seen)


def test_an_ambiguous_axis_of_channels_is_rejected(photos):
    for shape in ((3, 6, 5), (4, 84, 84), (5, 6, 7)):
        with pytest.raises(ConfigError, match=r"env_params\.channels=first.*channels=last"):
            photos(shape)
    with pytest.raises(ConfigError, match="channels='both' must be first or last"):
        photos((3, 6, 5), channels="both")
    with pytest.raises(ConfigError, match="'color'; known: channels"):
        photos((3, 6, 5), color="first")
    with pytest.raises(ConfigError, match="is for uint8 images"):
        envs.make_host_environment("gymnasium:CartPole-v1", {}, {"channels": "last"})


def test_an_environment_may_be_observed_as_stacked_gray_images():
    params = {"pixels": 16, "frames": 2}
    env = envs.make_host_environment("gymnasium:Pendulum-v1", {"max_episode_steps": 3}, params)
    assert (env.spec.observation.shape, env.spec.frames) == ((16, 16, 2), 2)
    timestep = play(env, 5, seeds=(1, 2)).timestep
    before = np.empty(())
    assert timestep.first[:, 0].tolist() == [True, False, False, False, True, False]
    for now, observation in enumerate(timestep.observation):
        seen = np.asarray(env.decode_observation(observation, ()))
        # White with a dark rod, which differs between environments.
        assert seen.max() == 255
        assert seen.min() < 200
        assert (seen[0] != seen[1]).any()
        if timestep.first[now, 0]:
            np.testing.assert_array_equal(seen[..., 0], seen[..., 1])
        else:
            np.testing.assert_array_equal(seen[..., 0], before[..., 1])
            assert (seen[..., 0] != seen[..., 1]).any()
        before = seen


@pytest.mark.parametrize(
    ("env_id", "params", "message"),
    [
        ("Pendulum-v1", {"pixels": 4}, r"env_params\.pixels must be an integer from 8, got 4"),
        ("Pendulum-v1", {"pixels": 64, "frames": 0}, r"frames must be an integer from 1, got 0"),
        ("Pendulum-v1", {"frames": 3}, r"env_params\.frames=3 .* set env_params\.pixels"),
        ("Pendulum-v1", {"pixels": 64, "channels": "last"}, "those of env_params.pixels are gray"),
        (
            "tests.envs.dictionaries:Dictionary-v0",
            {"pixels": 64},
            r"pixels=64 needs images .* render modes \[\] lack",
        ),
    ],
)
def test_impossible_pixels_are_rejected(env_id, params, message):
    with pytest.raises(ConfigError, match=message):
        envs.make_host_environment(f"gymnasium:{env_id}", {}, params)


@pytest.mark.parametrize(
    ("env_id", "kwargs", "shape"),
    [
        # Fewer pixels than frames.
        ("envpool:Pong-v5", {"stack_num": 12, "img_height": 9, "img_width": 8}, (9, 8, 12)),
        ("envpool:CarRacing-v3", {}, (96, 96, 3)),
        ("envpool:DefendTheCenter-v1", {"img_height": 8, "img_width": 8}, (8, 8, 12)),
    ],
)
def test_channels_of_envpool_s_images_are_known(env_id, kwargs, shape, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where ViZDoom leaves its settings
    env = envs.make_host_environment(env_id, kwargs, {})
    assert env.spec.observation.shape == shape


@pytest.mark.parametrize("channel_first", [True, False])
def test_procgen_s_channels_are_those_of_its_option(channel_first):
    """Its spec alone: the games need Qt 5."""
    spec = types.SimpleNamespace(
        config=types.SimpleNamespace(channel_first=channel_first),
        gymnasium_observation_space=images((3, 64, 64)),
    )
    assert envpool._channels_first(spec) == channel_first


def test_integers_become_one_hot_counted_from_their_start():
    space = gymnasium.spaces.Discrete(3, start=2)
    env = spaces.host_environment(
        "numbers", space, gymnasium.spaces.Discrete(2), dummy.CountingPool
    )
    sent = np.array([2, 3, 4], np.float32)
    np.testing.assert_array_equal(env.decode_observation(sent, sent), np.eye(3))


def test_seeds_are_the_environments_own():
    """The same seeds play the same games, and each environment its own."""
    env = envs.make_host_environment("envpool:CartPole-v1", {}, {})
    actions = np.random.default_rng(0).integers(0, 2, (50, 4), np.int32)
    one, again = (play(env, 50, (5, 6, 7, 8), actions) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, one, again)
    assert len(np.unique(one.timestep.observation[0], axis=0)) == 4
    shifted = play(env, 50, (6, 7, 8, 9), np.roll(actions, -1, 1))
    np.testing.assert_array_equal(
        shifted.timestep.observation[:, :3], one.timestep.observation[:, 1:]
    )


def test_counting_on_the_host_counts():
    out = play(dummy.make_host("counting", {}, {}), 100, seeds=range(4))
    count, first = out.timestep.observation[..., 0], out.timestep.first
    np.testing.assert_array_equal(count[1:], (count[:-1] + 1) * ~first[1:])
    np.testing.assert_array_equal(out.timestep.observation[0, :, 1], [5, 6, 7, 8])
