"""Environments written in JAX: all of gymnax, a user's own, and the counting one."""

import dataclasses
import sys
from typing import Any
from urllib.error import URLError

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import envs
from podracer.anakin.trainer import prepare
from podracer.envs import dummy, spaces
from podracer.envs.gymnax import import_gymnax
from podracer.errors import ConfigError, TransientError
from podracer.types import Box, Discrete
from podracer.xla_cpu import prng
from tests.helpers import make_config, make_run

gymnax = import_gymnax()
OFFLINE = "MNISTBandit-bsuite"


# One of each kind of observation and action; the others take as long to compile.
FEW = (
    "CartPole-v1",
    "Pendulum-v1",
    "Breakout-MinAtar",
    "DeepSea-bsuite",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", [x for x in gymnax.registered_envs if x not in (*FEW, OFFLINE)])
def test_a_gymnax_environment_fits_an_agent(name):
    """Traced, not compiled."""
    program = prepare(make_config(env=f"gymnax:{name}", num_envs=8, cpu_devices=8))
    assert program.env.spec.observation


@pytest.mark.parametrize("name", FEW)
def test_a_gymnax_environment_trains_for_two_updates(name):
    config = make_config(env=f"gymnax:{name}", num_envs=4, updates_per_call=2)
    _, _, state, step = make_run(config)
    before = jax.device_get(state.train.weights.params)
    state, metrics = step(state)
    assert int(state.train.step) == 2
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(metrics))
    changed = jax.tree.map(lambda a, b: (a != b).any(), before, state.train.weights.params)
    assert any(jax.tree.leaves(changed))


def test_gymnax_has_as_many_environments_as_these_tests_know():
    assert len(gymnax.registered_envs) == 26


def test_a_download_that_fails_may_be_tried_again(monkeypatch):
    def refuse(*args, **kwargs):
        raise URLError("no network in this test")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    monkeypatch.setattr("urllib.request.urlretrieve", refuse)
    with pytest.raises(TransientError, match=r"downloads its data set.*no network in this test"):
        envs.make_environment(f"gymnax:{OFFLINE}", {}, {})


def test_truncation_shows_the_true_final_observation_then_resets():
    """CartPole cut off after 3 steps, against gymnax's own step."""
    env = envs.make_environment("gymnax:CartPole-v1", {}, {"max_steps_in_episode": 3})
    theirs, params = gymnax.make("CartPole-v1")
    params = params.replace(max_steps_in_episode=3)
    key = prng.key(0)
    state, timestep = env.reset(key)
    their_observation, their_state = theirs.reset_env(key, params)
    np.testing.assert_array_equal(timestep.observation, their_observation)
    for i in range(3):
        keys = jax.random.fold_in(key, i)
        state, timestep = jax.jit(env.step)(keys, state, jnp.int32(1))
        step_key, _ = jax.random.split(keys)
        their_observation, their_state, *_ = theirs.step_env(step_key, their_state, 1, params)
        np.testing.assert_allclose(timestep.observation, their_observation, rtol=1e-6)
        assert (float(timestep.discount), bool(timestep.first)) == (1.0, False)
    state, timestep = env.step(jax.random.fold_in(key, 9), state, jnp.int32(1))
    assert (float(timestep.reward), float(timestep.discount)) == (0.0, 1.0)
    assert bool(timestep.first)
    assert np.abs(timestep.observation).max() <= 0.05
    _, timestep = env.step(jax.random.fold_in(key, 10), state, jnp.int32(1))
    assert not bool(timestep.first)


def test_termination_resets_in_the_same_step():
    env = envs.make_environment("gymnax:CartPole-v1", {}, {})
    key = prng.key(1)
    state, timestep = env.reset(key)
    for i in range(50):
        state, timestep = env.step(jax.random.fold_in(key, i), state, jnp.int32(1))
        if bool(timestep.first):
            break
    assert (float(timestep.reward), float(timestep.discount)) == (1.0, 0.0)
    assert np.abs(timestep.observation).max() <= 0.05


def test_integer_observations_become_one_hot():
    env = envs.make_environment("gymnax:FrozenLake-misc", {}, {})
    _, timestep = env.reset(prng.key(0))
    assert timestep.observation.shape == env.spec.observation.shape
    assert timestep.observation.sum() == 1


class Corridor(gymnax.environments.environment.Environment):
    """A user's own environment: walk right for ``length`` steps."""

    def __init__(self, length: int = 4):
        self.length = length

    def step_env(self, key, state, action, params):
        place = jnp.maximum(state.time + 2 * action - 1, 0)
        state = dataclasses.replace(state, time=place)
        return self.get_obs(state), state, -1.0, place >= self.length, {}

    def reset_env(self, key, params):
        state = gymnax.EnvState(time=jnp.int32(0))
        return self.get_obs(state), state

    def get_obs(self, state, params=None, key=None) -> Any:
        return jnp.array([state.time / self.length])

    def is_truncated(self, state, params):
        return jnp.bool_(False)

    def action_space(self, params):
        return gymnax.environments.spaces.Discrete(2)

    def observation_space(self, params):
        return gymnax.environments.spaces.Box(0, 1, (1,))


class Unlimited(Corridor):
    """A corridor with gymnax' limit, which is 1."""

    is_truncated = gymnax.environments.environment.Environment.is_truncated


class Wide(Corridor):
    def observation_space(self, params):
        return gymnax.environments.spaces.Box(0, 1, (3,))


class Growing(Corridor):
    def step_env(self, key, state, action, params) -> Any:
        observation, *rest = super().step_env(key, state, action, params)
        return jnp.append(observation, 0), *rest


class Rounded(Corridor):
    def reset_env(self, key, params):
        observation, state = super().reset_env(key, params)
        return observation.astype(jnp.int32), state


class Rewarding(Corridor):
    def step_env(self, key, state, action, params) -> Any:
        *before, reward, done, info = super().step_env(key, state, action, params)
        return *before, jnp.full(1, reward), done, info


class Vague(Corridor):
    def is_truncated(self, state, params):
        return jnp.float32(0)


class Drawn(Corridor):
    def render(self, state, params):
        return np.full((4, 6, 3), 10 * state.time, np.uint8)


class DrawnToo(Drawn):
    pass


class Flat(Corridor):
    def render(self, state, params):
        return np.zeros((4, 6))


class Old(Corridor):
    def step_env(self, key, state, action, params) -> Any:
        return super().step_env(key, state, action, params)[:4]


class Still(gymnax.environments.environment.Environment):
    def reset_env(self, key, params):
        return jnp.zeros(1), gymnax.EnvState(time=jnp.int32(0))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Unlimited", "ends each episode after max_steps_in_episode=1 step; define is_truncated"),
        ("Wide", r"observation_space of shape \(3,\), but reset_env observes \(1,\)"),
        ("Growing", r"observation of reset_env has the shape \(1,\), that of step_env \(2,\)"),
        ("Rounded", "observation of reset_env has the dtype int32, that of step_env float32"),
        ("Rewarding", r"reward of step_env has the shape \(1,\); it must be a single number"),
        ("Vague", r"is_truncated returns float32\[\]; it must return a single bool"),
        ("Old", "step_env returns 4 values; they must be"),
        ("Still", "does not define action_space"),
    ],
)
def test_an_own_environment_that_contradicts_itself_is_named(name, message):
    with pytest.raises(ConfigError, match=message):
        envs.make_environment(f"{__name__}:{name}", {}, {})


class Shop(Corridor):
    """A corridor that is observed as a dictionary, whose first action is only legal at times."""

    def get_obs(self, state, params=None, key=None):
        legal = jnp.array([state.time % 2 == 0, True])
        return {"place": {"time": state.time}, "shelf": jnp.zeros((2, 2)), "action_mask": legal}

    def observation_space(self, params):
        space = gymnax.environments.spaces
        place = space.Dict({"time": space.Discrete(5)})
        mask = space.Box(0, 1, (2,), bool)
        return space.Dict({"place": place, "shelf": space.Box(0, 1, (2, 2)), "action_mask": mask})


class Pair(Corridor):
    """Observes a tuple."""

    def get_obs(self, state, params=None, key=None):
        return (state.time, state.time)


class NoEnvironment:
    pass


def test_a_users_environment_by_importable_path():
    env = envs.make_environment("tests.envs.test_envs:Corridor", {"length": 2}, {})
    assert env.spec.action == Discrete(2)
    state, _ = env.reset(prng.key(0))
    for _ in range(2):
        state, timestep = env.step(prng.key(0), state, jnp.int32(1))
    assert (float(timestep.discount), bool(timestep.first)) == (0.0, True)


def test_an_own_environment_may_draw_itself():
    env = envs.make_environment(f"{__name__}:DrawnToo", {}, {})
    state, _ = env.reset(prng.key(0))
    state, _ = env.step(prng.key(0), state, jnp.int32(1))
    assert env.render is not None
    np.testing.assert_array_equal(env.render(state), np.full((4, 6, 3), 10))
    flat = envs.make_environment(f"{__name__}:Flat", {}, {})
    assert flat.render is not None
    with pytest.raises(
        ConfigError, match=r"render returns float64\[4, 6\]; it must return an image"
    ):
        flat.render(state)


def test_an_environment_of_a_script_or_notebook_is_in_main(monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "Corridor", Corridor, raising=False)
    # A script's module has no specification.
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    env = envs.make_environment("__main__:Corridor", {"length": 2}, {})
    assert env.spec.action == Discrete(2)


def test_a_users_environment_may_observe_a_dictionary():
    env = envs.make_environment("tests.envs.test_envs:Shop", {}, {})
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype.name), env.spec.observation)
    assert shapes == {
        "place": {"time": ((5,), "float32")},
        "shelf": ((2, 2), "float32"),
        "action_mask": ((2,), "bool"),
    }
    state, _ = env.reset(prng.key(0))
    _, timestep = env.step(prng.key(0), state, jnp.int32(1))
    np.testing.assert_array_equal(timestep.observation["place"]["time"], np.eye(5)[1])
    np.testing.assert_array_equal(timestep.observation["action_mask"], [False, True])


def test_bandits_are_the_same_in_jax_and_on_the_host():
    for name, kwargs in (("parts", {}), ("masked", {}), ("parts", {"continuous": True})):
        env = envs.make_environment(f"dummy:{name}", kwargs, {})
        host = dummy.make_host(name, kwargs, {})
        state, timestep = env.reset(prng.key(2))
        pool = host.make_pool([int(state[0])], 1)
        ours, step, rewards = [timestep], jax.jit(env.step), set()
        theirs = [pool.reset().timestep]
        actions = np.random.default_rng(0).integers(0, 4, 40)
        if kwargs:
            # The discrete actions' places in the box.
            actions = (actions[:, None] * 2 / 3 - 1).astype(np.float32)
        for action in actions:
            state, timestep = step(prng.key(0), state, action)
            ours.append(timestep)
            theirs.append(pool.step(np.array([action])).timestep)
            rewards.add(round(float(timestep.reward), 4))
        for a, b in zip(ours, theirs, strict=True):
            jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y[0], strict=True), a, b)
        # Four steps, and one that begins the next episode.
        assert [bool(x.first) for x in ours] == [i % 5 == 0 for i in range(41)]
        if kwargs:
            # Squared distances of the four actions from the best one.
            assert rewards == {0.0, *(round(1 - (i * 2 / 3) ** 2, 4) for i in range(4))}
        else:
            assert rewards == {0.0, 1.0} | ({-100.0} if name == "masked" else set())


@pytest.mark.parametrize(
    ("env", "kwargs", "params", "message"),
    [
        ("gymnax:CartPol-v1", {}, {}, "did you mean CartPole-v1"),
        ("CartPole-v1", {}, {}, "names no suite"),
        ("gymnx:CartPole-v1", {}, {}, "gymnax"),
        ("dummy:countin", {}, {}, "counting"),
        ("dummy:one", {}, {"x": 1}, "has no env_params"),
        ("gymnax:CartPole-v1", {}, {"gravit": 1.0}, "did you mean gravity"),
        ("gymnax:CartPole-v1", {"size": 3}, {}, "does not take env_kwargs"),
        ("tests.envs.test_envs:Corrido", {}, {}, "did you mean Corridor"),
        ("tests.envs.test_envs:NoEnvironment", {}, {}, "must be a class derived from"),
        ("tests.envs.test_envs:Corridor", {"size": 3}, {}, "does not take env_kwargs"),
        ("tests.envs.test_envs:Pair", {}, {}, "observes a tuple; agents observe an array or a"),
    ],
)
def test_unknown_names_are_reported(env, kwargs, params, message):
    with pytest.raises(ConfigError, match=message):
        envs.make_environment(env, kwargs, params)


def test_a_class_that_is_not_an_environment_is_not_called(tmp_path):
    marker = tmp_path / "made"
    with pytest.raises(ConfigError, match="'subprocess:Popen' is not a gymnax environment"):
        envs.make_environment("subprocess:Popen", {"args": ["touch", str(marker)]}, {})
    assert not marker.exists()


def test_box_actions_span_the_box():
    box = Box((3,), np.array([-2.0, 0.0, -np.inf]), np.array([2.0, 1.0, np.inf]))
    ours = jnp.array([[-1.0, -1.0, -7.0], [0.0, 0.0, 0.0], [3.0, 3.0, 7.0]])
    theirs = [[-2, 0, -7], [0, 0.5, 0], [2, 1, 7]]
    np.testing.assert_allclose(spaces.to_box(ours, box), theirs)


@pytest.mark.parametrize("name", dummy.PROBES)
def test_dummy_environments_take_their_arguments(name):
    """Each is the environment of its name, with the arguments that it is given."""
    kwargs = {"length": 2, "vary": 0} if name == "counting" else {"continuous": True}
    env = envs.make_environment(f"dummy:{name}", kwargs, {})
    # Rewards of an episode in which 0.5, half way to a cue of +1, is always the action.
    action = jnp.int32(0) if name == "counting" else jnp.full(1, 0.5)
    state, timestep = env.reset(prng.key(3))
    observed = np.ravel(timestep.observation)
    cue, column, rewards = float(observed[0]), observed[:8].argmax(), []
    for _ in range(5):
        state, timestep = env.step(prng.key(3), state, action)
        rewards.append(float(timestep.reward))
        if timestep.first:
            break
    agreement = 1 - (0.5 - 0.5 * cue) ** 2
    assert (
        rewards
        == {
            "counting": [1, 2],
            "one": [1],
            "sign": [cue],
            "delayed": [0, 1],
            "choice": [agreement],
            "memory": [0, 0, agreement],
            "stripe": pytest.approx([1 - (0.5 - (column / 3.5 - 1)) ** 2]),
        }[name]
    )


def test_a_misspelt_dummy_environment_is_named():
    with pytest.raises(ConfigError, match="did you mean memory"):
        dummy.make("memry", {}, {})


def test_agents_see_only_the_components_that_are_observed():
    whole, part = (
        envs.make_environment("gymnax:CartPole-v1", {}, {}, observed=x) for x in ((), (2, 0))
    )
    assert part.spec.observation.shape == (2,)
    keys = jax.random.split(jax.random.key(0), 2)
    (state, start), (_, seen) = whole.reset(keys[0]), part.reset(keys[0])
    np.testing.assert_array_equal(seen.observation, start.observation[np.array([2, 0])])
    (_, after), (_, seen) = (env.step(keys[1], state, jnp.int32(1)) for env in (whole, part))
    np.testing.assert_array_equal(seen.observation, after.observation[np.array([2, 0])])
    np.testing.assert_array_equal(part.observe(jnp.arange(4.0)), [2, 0])
    host = envs.make_host_environment("dummy:counting", {}, {}, observed=(1,))
    transferred = np.array([[3.0, 7.0]])
    np.testing.assert_array_equal(host.decode_observation(transferred, None), [[7]])
    for name, observed, match in (
        ("gymnax:CartPole-v1", (0, 4), r"observed=\(0, 4\) .* from 0 to 3"),
        ("gymnax:Breakout-MinAtar", (0,), "needs observations with one axis"),
    ):
        with pytest.raises(ConfigError, match=match):
            envs.make_environment(name, {}, {}, observed=observed)
