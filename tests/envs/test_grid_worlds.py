"""Grid worlds beside a walk in Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import envs
from podracer.envs.grid_worlds import Family, GridState, World, parse
from podracer.errors import ConfigError
from podracer.types import Discrete

FAMILY = Family(3, objects=2, walls=1, length=8)
# A wall in the middle; what ends the episode, and what comes back at once or never, is certain.
WORLD = World(
    jnp.arange(9) == 4,
    jnp.array([2, 6]),
    jnp.array([1.0, -0.5]),
    jnp.array([0.0, 1.0]),
    jnp.array([0.0, 1.0]),
)
MOVES = [(-1, 0), (1, 0), (0, -1), (0, 1)]


def test_a_walk_is_that_of_a_loop():
    env = FAMILY.environment(WORLD)
    rng = np.random.default_rng(0)
    step = jax.jit(env.step)
    state, timestep = jax.jit(env.reset)(jax.random.key(0))
    cell, present, count, over = int(state.env.cell), [True, True], 0, "no"
    seen = set()
    for i in range(300):
        place = int(np.argmax(timestep.observation))
        assert float(timestep.observation.sum()) == 1
        assert place == cell * 4 + present[0] + 2 * present[1]
        action = int(rng.integers(4))
        state, timestep = step(jax.random.key(i), state, action)
        if over == "truncated":
            assert timestep.first
            assert (timestep.reward, timestep.discount) == (0, 1)
            cell, present, count, over = int(state.env.cell), [True, True], 0, "no"
            continue
        row, column = (x + d for x, d in zip(divmod(cell, 3), MOVES[action], strict=True))
        new = min(max(row, 0), 2) * 3 + min(max(column, 0), 2)
        cell, count = (cell if new == 4 else new), count + 1
        found = [there and cell == at for there, at in zip(present, (2, 6), strict=True)]
        assert float(timestep.reward) == found[0] - 0.5 * found[1]
        present = [present[0] and not found[0], True]
        assert float(timestep.discount) == 1 - found[1]
        assert bool(timestep.first) == found[1]
        over = "truncated" if count == 8 and not found[1] else "no"
        seen |= {*np.flatnonzero(found), over}
        if found[1]:
            cell, present, count = int(state.env.cell), [True, True], 0
    assert seen == {0, 1, "no", "truncated"}


def test_worlds_of_a_family_differ_and_start_on_free_cells():
    family = Family(5, objects=3, walls=4)
    worlds = jax.vmap(family.draw)(jax.random.split(jax.random.key(0), 50))
    assert (worlds.wall.sum(1) == 4).all()
    assert len({tuple(x) for x in np.asarray(worlds.place)}) == 50
    assert not np.take_along_axis(np.asarray(worlds.wall), np.asarray(worlds.place), 1).any()
    assert (worlds.reward[:, 0] == 1).all()

    def start(world: World, key: jax.Array) -> jax.Array:
        state: GridState = family.environment(world).reset(key)[0].env
        return world.wall[state.cell]

    assert not jax.vmap(start)(worlds, jax.random.split(jax.random.key(1), 50)).any()


def test_a_world_is_an_environment_of_its_own():
    one, other = (envs.make_environment("grid:4x4", {"world": i}, {}) for i in range(2))
    assert one.spec.observation.shape == (4 * 4 * 4,)
    assert other.spec.action == Discrete(4)


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("5", {}, 'written as "5x5"'),
        ("5x4", {}, "and square"),
        ("5x5", {"doors": 1}, "does not take env_kwargs"),
        ("2x2", {"objects": 2, "walls": 2}, "has 4 cells, too few for 2 objects, 2 walls"),
        ("5x5", {"objects": 0}, "needs an object"),
    ],
)
def test_impossible_families_are_rejected(name, kwargs, message):
    with pytest.raises(ConfigError, match=message):
        parse(name, kwargs)


@pytest.mark.parametrize("world", [-1, 1.5, 2**32, "a"])
def test_impossible_worlds_are_rejected(world):
    with pytest.raises(ConfigError, match=r"env_kwargs\.world is a whole number from 0"):
        envs.make_environment("grid:3x3", {"world": world}, {})
