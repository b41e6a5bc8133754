"""The wrapper that resets environments, against a slow reference, and gymnax's old interface."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from podracer import envs
from podracer.envs import old_gymnax
from podracer.envs.autoreset import Arrival, Episodes, autoreset
from podracer.errors import ConfigError
from podracer.types import Discrete, Spec
from podracer.xla_cpu import prng

LIMIT, EDGE = 5, 3
SPEC = Spec(jax.ShapeDtypeStruct((2,), jnp.float32), Discrete(2))


def walk(place, time, action):
    """A step on a line whose ends terminate, and where time is limited: numbers in, numbers out."""
    place, time = place + 2 * action - 1, time + 1
    return place, time, abs(place) >= EDGE, time >= LIMIT


def begin(key):
    place = jax.random.randint(key, (), -EDGE + 1, EDGE)
    return jnp.array([place, 0.0]), (place, jnp.int32(0))


def advance(key, state, action):
    place, time, terminated, truncated = walk(*state, action)
    observation = jnp.array([place, time], jnp.float32)
    return Arrival(observation, jnp.float32(place), terminated, truncated), (place, time)


def start_of(key):
    return int(jax.jit(begin)(key)[1][0])


def reference(key, keys, actions, refreshed):
    """(observation, reward, discount, first) of each arrival; ``refreshed`` is None or by step."""
    place, time, truncated = start_of(key), 0, False
    cached = start_of(jax.random.fold_in(key, 1))
    for i, action in enumerate(actions):
        if refreshed and i in refreshed:
            cached = start_of(refreshed[i])
        fresh = cached if refreshed is not None else start_of(jax.random.split(keys[i])[1])
        if truncated:
            place, time, truncated = fresh, 0, False
            yield (place, time), 0, 1, True
            continue
        place, time, terminated, late = walk(place, time, int(action))
        reward, truncated = place, late and not terminated
        if terminated:
            place, time = fresh, 0
        yield (place, time), reward, 1 - terminated, terminated


@pytest.mark.parametrize("cached", [False, True])
def test_a_random_walk_agrees_with_a_slow_reference(cached):
    env = autoreset(Episodes(begin, advance), SPEC, cached=cached)
    assert (env.refresh is not None) == cached
    steps, key = 200, prng.key(0)
    keys = jax.random.split(prng.key(1), steps)
    actions = np.random.default_rng(0).integers(0, 2, steps)
    refreshed = {i: jax.random.fold_in(key, 1000 + i) for i in (40, 80, 120)} if cached else None
    state, timestep = env.reset(key)
    np.testing.assert_array_equal(timestep.observation, [start_of(key), 0])
    assert (float(timestep.reward), float(timestep.discount)) == (0, 1)
    assert bool(timestep.first)
    step, ends = jax.jit(env.step), set()
    for i, expected in enumerate(reference(key, keys, actions, refreshed)):
        if refreshed and i in refreshed:
            state = env.refresh(refreshed[i], state)
        state, timestep = step(keys[i], state, actions[i])
        observation, reward, discount, first = expected
        np.testing.assert_array_equal(timestep.observation, observation)
        assert (float(timestep.reward), float(timestep.discount)) == (reward, discount), i
        assert bool(timestep.first) == first, i
        ends.add((first, discount, observation[1] == LIMIT))
    # Steps, terminations, truncations and the resets after these.
    assert ends == {(False, 1, False), (True, 0, False), (False, 1, True), (True, 1, False)}


def test_episodes_of_an_unroll_begin_alike_only_where_starts_are_cached():
    for cached in (False, True):
        env = autoreset(Episodes(begin, advance), SPEC, cached=cached)
        state, _ = env.reset(prng.key(0))
        step, starts = jax.jit(env.step), set()
        for key in jax.random.split(prng.key(1), 60):
            state, timestep = step(key, state, 1)
            if timestep.first:
                starts.add(float(timestep.observation[0]))
        assert (len(starts) == 1) == cached


class OldState(struct.PyTreeNode):
    place: int
    time: int


class OldParams(struct.PyTreeNode):
    max_steps_in_episode: int = 4
    goal: int = 10


class OldCorridor:
    """A user's environment for gymnax before 1.0; ``done`` includes the time limit."""

    name = "OldCorridor"
    default_params = OldParams()

    def __init__(self, stride: int = 1):
        self.stride = stride

    def reset_env(self, key, params):
        return jnp.zeros(2), OldState(jnp.int32(0), jnp.int32(0))

    def step_env(self, key, state, action, params):
        state = OldState(state.place + self.stride * action, state.time + 1)
        observation = jnp.array([state.place, state.time], jnp.float32)
        return observation, state, -1.0, self.is_terminal(state, params), {}

    def is_terminal(self, state, params):
        return (state.place >= params.goal) | (state.time >= params.max_steps_in_episode)

    def action_space(self, params):
        return SimpleNamespace(n=2, shape=(), dtype=np.int32)

    def observation_space(self, params):
        return SimpleNamespace(low=0, high=np.inf, shape=(2,), dtype=np.float32)


class Half:
    """Has a part of the old interface only, and must not be made."""

    def __init__(self):
        raise AssertionError("called")

    def step_env(self):
        pass


OLD = "tests.envs.test_autoreset:OldCorridor"


@pytest.mark.parametrize(
    ("goal", "arrivals"),
    [
        # Too far: truncated at the true final observation, then reset.
        (10, [((1, 1), 1, False), ((2, 2), 1, False), ((3, 3), 1, False), ((4, 4), 1, False),
              ((0, 0), 1, True), ((1, 1), 1, False)]),
        # Reached before the limit, and exactly at it: terminated.
        (2, [((1, 1), 1, False), ((0, 0), 0, True), ((1, 1), 1, False)]),
        (4, [((1, 1), 1, False), ((2, 2), 1, False), ((3, 3), 1, False), ((0, 0), 0, True)]),
    ],
)  # fmt: skip
def test_the_old_interface_tells_terminations_from_truncations(goal, arrivals):
    env = envs.make_environment(OLD, {}, {"goal": goal})
    state, _ = env.reset(prng.key(0))
    for observation, discount, first in arrivals:
        state, timestep = env.step(prng.key(0), state, jnp.int32(1))
        np.testing.assert_array_equal(timestep.observation, observation)
        assert (float(timestep.discount), bool(timestep.first)) == (discount, first)


def test_the_old_interface_takes_arguments_and_may_have_no_limit():
    env = envs.make_environment(OLD, {"stride": 3}, {})
    state, _ = env.reset(prng.key(0))
    _, timestep = env.step(prng.key(0), state, jnp.int32(1))
    np.testing.assert_array_equal(timestep.observation, [3, 1])
    done = jnp.bool_(True)
    ended = old_gymnax.ending(None, SimpleNamespace(place=1), done, SimpleNamespace(goal=1))
    assert [bool(x) for x in ended] == [True, False]


@pytest.mark.parametrize(
    ("env", "kwargs", "params", "message"),
    [
        ("tests.envs.test_autoreset:Half", {}, {}, "or one with step_env, reset_env, is_terminal"),
        (OLD, {"strid": 3}, {}, "does not take env_kwargs"),
        (OLD, {}, {"gaol": 3}, "did you mean goal"),
    ],
)
def test_errors_of_the_old_interface(env, kwargs, params, message):
    with pytest.raises(ConfigError, match=message):
        envs.make_environment(env, kwargs, params)
