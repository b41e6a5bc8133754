"""Suites written in JAX, against their own functions. Each test needs the suite to be installed."""

import importlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import envs
from podracer.envs import jumanji as jumanji_adapter
from podracer.errors import ConfigError, TransientError
from podracer.types import Box, Discrete
from podracer.xla_cpu import prng
from tests.helpers import make_config, make_run

slow = pytest.mark.slow
# For each suite: its module, and an environment that compiles quickly, if it has one.
MODULES = {
    "brax": "brax.envs",
    "craftax": "craftax.craftax_env",
    "jumanji": "jumanji",
    "navix": "navix",
    "pgx": "pgx",
    "playground": "mujoco_playground",
    "xminigrid": "xminigrid",
}
QUICK = (
    "brax:fast",
    "jumanji:Snake-v1",
    "navix:Navix-Empty-5x5-v0",
    "pgx:tic_tac_toe",
    "xminigrid:MiniGrid-Empty-5x5",
)
SLOW = (
    "brax:ant",
    "craftax:Craftax-Classic-Symbolic-v1",
    "jumanji:TSP-v1",
    "navix:Navix-DoorKey-8x8-v0",
    "pgx:connect_four",
    "playground:CartpoleBalance",
    "xminigrid:XLand-MiniGrid-R4-9x9",
)
ALL = [*QUICK, *(pytest.param(name, marks=slow) for name in SLOW)]


def suite(env_id: str) -> Any:
    name = env_id.partition(":")[0]
    reason = f"the suite is not installed: pip install -e '.[{name}]'"
    return pytest.importorskip(MODULES[name], reason=reason)


def make(env_id, kwargs=None, params=None):
    suite(env_id)
    return envs.make_environment(env_id, kwargs or {}, params or {})


def some_action(env):
    if isinstance(env.spec.action, Discrete):
        return jnp.int32(env.spec.action.num_actions - 1)
    return jnp.full(env.spec.action.shape, 0.5)


def weights(state):
    """All weights of a state, in one array."""
    leaves = jax.tree.leaves(jax.device_get(state.train.weights.params))
    return np.concatenate([np.ravel(x) for x in leaves])


def shapes(tree):
    return jax.tree.map(lambda x: (tuple(x.shape), np.dtype(x.dtype)), tree)


@pytest.mark.parametrize("env_id", ALL)
def test_observations_match_the_spec(env_id):
    """Traced, not compiled, so that two steps have the types of one."""
    env = make(env_id)
    key = prng.key(0)
    state, timestep = jax.eval_shape(env.reset, key)
    assert shapes(timestep.observation) == shapes(env.spec.observation)
    after, timestep = jax.eval_shape(env.step, key, state, some_action(env))
    assert shapes(timestep.observation) == shapes(env.spec.observation)
    # Records of NAVIX compare their fields as arrays, so leaves are compared here.
    assert jax.tree.structure(after) == jax.tree.structure(state)
    types = [[(x.shape, x.dtype) for x in jax.tree.leaves(tree)] for tree in (state, after)]
    assert types[0] == types[1]
    # Orbax can't save an array without elements.
    assert all(x.size for x in jax.tree.leaves(state))
    assert {x.dtype.name for x in jax.tree.leaves(timestep.observation)} <= {"float32", "bool"}


@pytest.mark.parametrize("env_id", ALL)
def test_each_suite_trains_for_two_updates(env_id):
    suite(env_id)
    config = make_config(env=env_id, num_envs=4, updates_per_call=2)
    _, _, state, step = make_run(config)
    after, metrics = step(state)
    assert int(after.train.step) == 2
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(metrics))
    assert np.abs(weights(after) - weights(state)).max() > 0


@pytest.mark.parametrize("env_id", ["brax:fast", pytest.param("jumanji:Snake-v1", marks=slow)])
def test_devices_do_not_change_what_a_suite_trains(env_id):
    suite(env_id)
    config = make_config(env=env_id, updates_per_call=2)
    one, many = (
        weights(step(state)[0]) for _, _, state, step in (make_run(config, 1), make_run(config, 2))
    )
    np.testing.assert_allclose(many, one, atol=2e-5, rtol=1e-5)


class Own(NamedTuple):
    """A suite's own functions: ``reset(key)`` and ``step(key, state, action)``, which return a
    state, the observation, the reward, and whether the episode is truncated."""

    reset: Callable[..., tuple]
    step: Callable[..., tuple]


def brax_own(name, **kwargs):
    env = importlib.import_module("brax.envs").create(
        name, episode_length=3, auto_reset=False, **kwargs
    )

    def view(state):
        return state, state.obs, state.reward, state.info["truncation"] == 1

    return Own(lambda key: view(env.reset(key)), lambda _, s, a: view(env.step(s, a)))


def playground_own(name):
    playground = importlib.import_module("mujoco_playground")
    env = playground.registry.load(name, config_overrides={"impl": "jax"})

    def view(state):
        return state, state.obs, state.reward, state.info["count"] >= 3

    def count(state, n):
        return state.replace(info={**state.info, "count": n})

    def step(_, state, action):
        return view(count(env.step(state, action), state.info["count"] + 1))

    return Own(lambda key: view(count(env.reset(key), 0)), step)


def navix_own(name):
    env = importlib.import_module("navix").make(name, max_steps=3)

    def view(timestep):
        return timestep, timestep.observation, timestep.reward, timestep.is_truncation()

    return Own(lambda key: view(env.reset(key)), lambda _, s, a: view(env.step(s, a)))


def xminigrid_own(name):
    env, params = importlib.import_module("xminigrid").make(name, max_steps=3)
    env = importlib.import_module("xminigrid.wrappers").DirectionObservationWrapper(env)

    def view(timestep):
        truncated = timestep.last() & (timestep.discount == 1)
        return timestep, timestep.observation, timestep.reward, truncated

    return Own(
        lambda key: view(env.reset(params, key)), lambda _, s, a: view(env.step(params, s, a))
    )


def craftax_own(name):
    make = importlib.import_module("craftax.craftax_env").make_craftax_env_from_name
    env = make(name, auto_reset=False)
    params = env.default_params.replace(max_timesteps=3)

    def reset(key):
        observation, state = env.reset_env(key, params)
        return state, observation, 0, False

    def step(key, state, action):
        # The wrapper takes the first half of a step's key.
        key = jax.random.split(key)[0]
        observation, state, reward, done, _ = env.step_env(key, state, action, params)
        return state, observation, reward, done

    return Own(reset, step)


@pytest.mark.parametrize(
    ("env_id", "own", "kwargs", "params"),
    [
        ("brax:fast", brax_own, {}, {"episode_length": 3}),
        ("navix:Navix-Empty-5x5-v0", navix_own, {"max_steps": 3}, {}),
        ("xminigrid:MiniGrid-Empty-5x5", xminigrid_own, {}, {"max_steps": 3}),
        pytest.param("brax:ant", brax_own, {}, {"episode_length": 3}, marks=slow),
        pytest.param(
            "craftax:Craftax-Classic-Symbolic-v1",
            craftax_own, {}, {"max_timesteps": 3}, marks=slow,
        ),
        pytest.param(
            "playground:CartpoleBalance", playground_own, {}, {"episode_length": 3}, marks=slow
        ),
    ],
)  # fmt: skip
def test_truncation_shows_the_true_final_observation(env_id, own, kwargs, params):
    """Three steps against the suite's own, then the reset, which has no reward."""
    env, own = make(env_id, kwargs, params), own(env_id.partition(":")[2])
    action, key = some_action(env), prng.key(3)
    step, own_step = jax.jit(env.step), jax.jit(own.step)
    state, timestep = jax.jit(env.reset)(key)
    start = timestep.observation
    theirs, observation, _, truncated = jax.jit(own.reset)(key)
    for i in range(3):
        jax.tree.map(np.testing.assert_array_equal, timestep.observation, env.observe(observation))
        assert not bool(truncated)
        keys = jax.random.fold_in(key, i)
        state, timestep = step(keys, state, action)
        theirs, observation, reward, truncated = own_step(keys, theirs, action)
        assert float(timestep.reward) == pytest.approx(float(reward), rel=1e-5)
        assert (float(timestep.discount), bool(timestep.first)) == (1, False)
    # As computed in two programs.
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4),
        timestep.observation,
        env.observe(observation),
    )
    assert bool(truncated)
    state, timestep = step(jax.random.fold_in(key, 3), state, action)
    assert (float(timestep.reward), float(timestep.discount)) == (0, 1)
    assert bool(timestep.first)
    assert shapes(timestep.observation) == shapes(start)
    _, timestep = step(jax.random.fold_in(key, 4), state, action)
    assert not bool(timestep.first)


@pytest.mark.parametrize(
    ("env_id", "actions"),
    [
        # To the goal in the opposite corner; the world has only one start.
        ("navix:Navix-Empty-5x5-v0", (2, 2, 1, 2, 2)),
        ("xminigrid:MiniGrid-Empty-5x5", (0, 0, 1, 0, 0)),
    ],
)
def test_a_reached_goal_terminates_in_the_same_step(env_id, actions):
    env = make(env_id)
    state, start = env.reset(prng.key(0))
    step = jax.jit(env.step)
    for action in actions:
        state, timestep = step(prng.key(0), state, jnp.int32(action))
    assert (float(timestep.discount), bool(timestep.first)) == (0, True)
    assert float(timestep.reward) > 0.5
    jax.tree.map(np.testing.assert_array_equal, timestep.observation, start.observation)


def test_jumanjis_observations_and_masks():
    """Random legal steps in Snake until it dies, against Jumanji's own observations."""
    jumanji = suite("jumanji:")
    size = {"num_rows": 4, "num_cols": 4}
    env, theirs = make("jumanji:Snake-v1", size), jumanji.make("Snake-v1", **size)
    key, rng = prng.key(0), np.random.default_rng(0)
    state, timestep = env.reset(key)
    their_state, their_timestep = theirs.reset(key)
    step, their_step, masks = jax.jit(env.step), jax.jit(theirs.step), set()
    for _ in range(200):
        observation, expected = timestep.observation, their_timestep.observation
        assert observation.keys() == {"grid", "step_count", "action_mask"}
        np.testing.assert_array_equal(observation["action_mask"], expected.action_mask)
        np.testing.assert_array_equal(observation["grid"], expected.grid)
        assert float(observation["step_count"]) == pytest.approx(int(expected.step_count) / 3999)
        legal = np.flatnonzero(observation["action_mask"])
        masks.add(tuple(legal))
        action = jnp.int32(rng.choice(legal) if legal.size else 0)
        state, timestep = step(key, state, action)
        their_state, their_timestep = their_step(their_state, action)
        assert float(timestep.reward) == float(their_timestep.reward)
        if their_timestep.last():
            break
    assert (float(timestep.discount), bool(timestep.first)) == (0, True)
    assert len(masks) > 2


def test_a_jumanji_environment_that_truncates():
    """No registered one with actions that agents can take does, so Snake is cut off here."""
    jumanji = suite("jumanji:")
    types = importlib.import_module("jumanji.types")

    class Cut(importlib.import_module("jumanji.wrappers").Wrapper):
        def step(self, state, action):
            state, timestep = super().step(state, action)
            cut = types.truncation(timestep.reward, timestep.observation)
            late = state.step_count >= 2
            uncut = timestep.replace(extras={})
            return state, jax.tree.map(lambda x, y: jnp.where(late, x, y), cut, uncut)

    theirs = jumanji.make("Snake-v1", num_rows=6, num_cols=6)
    env = jumanji_adapter.adapt(Cut(theirs), "jumanji:Cut")
    key = prng.key(1)
    state, _ = env.reset(key)
    their_state, timestep = theirs.reset(key)
    step = jax.jit(env.step)
    for _ in range(2):
        action = jnp.argmax(timestep.observation.action_mask)
        state, ours = step(key, state, action)
        their_state, timestep = theirs.step(their_state, action)
        assert (float(ours.discount), bool(ours.first)) == (1, False)
    np.testing.assert_array_equal(ours.observation["grid"], timestep.observation.grid)
    _, ours = step(key, state, jnp.int32(0))
    assert (float(ours.reward), float(ours.discount), bool(ours.first)) == (0, 1, True)


def test_numbers_of_jumanji_are_scaled_and_categories_are_one_hot():
    env = make("jumanji:TSP-v1", {}, {})
    observation = jax.device_get(jax.jit(env.reset)(prng.key(0))[1].observation)
    assert {key: x.shape for key, x in observation.items()} == {
        "coordinates": (20, 2), "position": (20,), "trajectory": (20,), "action_mask": (20,),
    }  # fmt: skip
    assert observation["trajectory"].min() >= 0
    assert observation["trajectory"].max() <= 1


def test_actions_of_brax_are_held_and_their_rewards_are_added():
    """Its simplest environment accelerates by 0.02 in each of its steps of 0.02 seconds."""
    env = make("brax:fast", {}, {"action_repeat": 2, "episode_length": 4})
    assert isinstance(env.spec.action, Box)
    state, _ = env.reset(prng.key(0))
    place, speed = 0.0, 0.0
    for last in (False, True):
        state, timestep = env.step(prng.key(0), state, jnp.ones(1))
        reward = 0.0
        for _ in range(2):
            speed += 0.02
            place += speed * 0.02
            reward += place
        assert float(timestep.reward) == pytest.approx(reward, rel=1e-5)
        np.testing.assert_allclose(timestep.observation, [place, speed], rtol=1e-5)
        assert bool(state.truncated) == last


def test_agents_do_not_see_what_only_value_functions_may():
    kwargs = {"obs_mode": "dict_state", "asymmetric_obs": True}
    assert make("brax:fast", kwargs).spec.observation.shape == (2,)
    kwargs = {"obs_mode": "dict_pixels_state", "asymmetric_obs": True}
    observation = make("brax:fast", kwargs).spec.observation
    assert set(observation) == {"state", "pixels/view_0", "pixels/view_1"}


def test_a_step_of_brax_leaves_the_state_that_it_is_given_as_it_is():
    """Brax itself writes to the dictionaries of the state."""
    env = make("brax:fast")
    state, _ = env.reset(prng.key(0))
    before = jax.tree.map(np.array, state)
    env.step(prng.key(0), state, jnp.ones(1))
    jax.tree.map(np.testing.assert_array_equal, state, before)


def test_navix_and_xminigrid_show_each_cell_one_hot():
    for env_id, cells, ones in (
        ("navix:Navix-Empty-5x5-v0", (5, 5, 21), 3),
        ("xminigrid:MiniGrid-Empty-5x5", (7, 7, 25), 2),
    ):
        env = make(env_id)
        observation = env.reset(prng.key(0))[1].observation
        grid = observation["img"] if isinstance(observation, dict) else observation
        assert grid.shape == cells
        np.testing.assert_array_equal(grid.sum(-1), np.full(cells[:2], ones))


def test_navix_has_other_views():
    make("navix:Navix-Empty-5x5-v0")
    for view, shape in (
        ("symbolic_first_person", (7, 7, 21)),
        ("categorical", (5, 5, 11)),
        ("rgb", (40, 40, 3)),
    ):
        env = make("navix:Navix-Empty-5x5-v0", {"observation_fn": view})
        assert env.spec.observation.shape == shape
    assert env.spec.observation.dtype == np.uint8
    state, timestep = env.reset(prng.key(0))
    np.testing.assert_array_equal(timestep.observation, env.render(state))
    state, timestep = env.step(prng.key(0), state, jnp.int32(2))
    np.testing.assert_array_equal(timestep.observation, env.render(state))


def test_tasks_of_xland_are_drawn_in_each_episode(monkeypatch):
    """Two tasks that differ in the one object that they put into the world."""
    xminigrid = suite("xminigrid:")
    tiles = jnp.array([[[3, 1]], [[4, 2]]], jnp.uint8)
    zeros = jnp.zeros((2, 5), jnp.uint8)
    benchmark = importlib.import_module("xminigrid.benchmarks").Benchmark(
        zeros, zeros[:, None], tiles, jnp.zeros(2, jnp.int32)
    )
    monkeypatch.setattr(xminigrid, "load_benchmark", lambda name: benchmark)
    env = make("xminigrid:XLand-MiniGrid-R1-9x9", {"benchmark": "trivial-21k"})
    grids = jax.jit(jax.vmap(env.reset))(jax.random.split(prng.key(0), 16))[0].env.state.grid
    balls, squares = ((grids[..., 0] == kind).any((1, 2)) for kind in (3, 4))
    assert (balls ^ squares).all()
    assert 0 < balls.sum() < 16


@pytest.mark.parametrize(
    ("env_id", "shape"),
    [
        ("navix:Navix-Empty-5x5-v0", (40, 40, 3)),
        ("xminigrid:MiniGrid-Empty-5x5", (160, 160, 3)),
        ("jumanji:Snake-v1", (1000, 1000, 3)),
        pytest.param("craftax:Craftax-Classic-Symbolic-v1", (144, 144, 3), marks=slow),
    ],
)
def test_drawings(env_id, shape):
    env = make(env_id)
    image = env.render(jax.device_get(jax.jit(env.reset)(prng.key(0))[0]))
    assert (image.shape, image.dtype) == (shape, np.uint8)
    assert image.std() > 1


@pytest.mark.parametrize("name", MODULES)
def test_a_suite_that_is_not_installed_is_named_with_its_extra(name, monkeypatch):
    for module in [
        x for x in sys.modules if x.partition(".")[0] == MODULES[name].partition(".")[0]
    ]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, MODULES[name].partition(".")[0], None)
    with pytest.raises(ConfigError, match=rf"'{name}:\.\.\.' needs packages .*-e '\.\[{name}\]'"):
        envs.make_environment(f"{name}:anything", {}, {})


def test_suites_are_imported_only_when_they_are_used():
    tops = {module.partition(".")[0] for module in MODULES.values()}
    code = f"import sys, podracer.envs; sys.exit(len({tops} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("env_id", "kwargs", "params", "message"),
    [
        ("brax:ants", {}, {}, "did you mean ant"),
        ("brax:ant", {"backen": "spring"}, {}, "env_kwargs 'backen'; did you mean backend"),
        ("brax:fast", {"obs_mode": "nothing"}, {}, "can't be made with env_kwargs="),
        ("brax:ant", {}, {"episode_lengt": 9}, "did you mean episode_length"),
        ("brax:fast", {}, {"episode_length": 0}, "must be a positive number, got 0"),
        ("craftax:Craftax-Clasic-v1", {}, {}, "did you mean Craftax-Classic"),
        ("craftax:Craftax-Symbolic-v1", {"map_siz": (9, 9)}, {}, "did you mean map_size"),
        ("craftax:Craftax-Symbolic-v1", {}, {"max_timestep": 9}, "did you mean max_timesteps"),
        ("jumanji:Snek-v1", {}, {}, "did you mean Snake-v1"),
        ("jumanji:Snake-v1", {"num_row": 9}, {}, "did you mean num_rows"),
        ("jumanji:Snake-v1", {}, {"num_rows": 9}, "has no env_params, got {'num_rows': 9}"),
        ("jumanji:BinPack-v2", {}, {}, r"actions of shape \(2,\) in a MultiDiscreteArray of int32"),
        ("navix:Navix-Empty-5x5", {}, {}, "did you mean Navix-Empty-5x5-v0"),
        ("navix:Navix-Empty-5x5-v0", {"max_step": 9}, {}, "did you mean max_steps"),
        ("navix:Navix-Empty-5x5-v0", {"height": 9}, {}, "can't be made with env_kwargs="),
        ("navix:Navix-Empty-5x5-v0", {"observation_fn": "rbg"}, {}, "did you mean rgb"),
        ("playground:CartpoleBalanc", {}, {}, "did you mean CartpoleBalance"),
        ("playground:CartpoleBalance", {"x": 1}, {}, "has no env_kwargs"),
        ("playground:CartpoleBalance", {}, {"sim_d": 1.0}, "did you mean sim_dt"),
        ("playground:CartpoleBalance", {}, {"sim_dt": "a"}, "can't be made with env_params="),
        ("xminigrid:MiniGrid-Empty", {}, {}, "did you mean MiniGrid-Empty"),
        ("xminigrid:MiniGrid-Empty-5x5", {"x": 1}, {}, "has no env_kwargs"),
        ("xminigrid:MiniGrid-Empty-5x5", {}, {"max_step": 1}, "did you mean max_steps"),
        ("xminigrid:MiniGrid-Empty-5x5", {}, {"view_size": 4}, "must be odd and 3 or more, got 4"),
        ("xminigrid:XLand-MiniGrid-R1-9x9", {"benchmark": "trivial"}, {}, "mean trivial-21k"),
    ],
)
def test_errors(env_id, kwargs, params, message):
    with pytest.raises(ConfigError, match=message):
        make(env_id, kwargs, params)


def test_downloads_that_fail_may_be_tried_again(monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("no network in this test")

    suite("xminigrid:")
    monkeypatch.setattr("xminigrid.load_benchmark", refuse)
    with pytest.raises(TransientError, match=r"data set 'small-1m'.*no network in this test"):
        make("xminigrid:XLand-MiniGrid-R1-9x9", {"benchmark": "small-1m"})


def test_robots_of_playground_that_can_not_be_downloaded(monkeypatch):
    def refuse():
        raise subprocess.CalledProcessError(128, ["git", "clone"])

    suite("playground:")
    module = importlib.import_module("mujoco_playground._src.mjx_env")
    monkeypatch.setattr(module, "ensure_menagerie_exists", refuse)
    with pytest.raises(TransientError, match=r"mujoco_menagerie.*status 128"):
        make("playground:Go1JoystickFlatTerrain")
