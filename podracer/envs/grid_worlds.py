"""Small grid worlds, drawn at random, in which update rules are learned.

After the tabular grid worlds of https://arxiv.org/abs/2007.08794: the agent walks over
a square with walls and collects objects, each of which has a reward, may end the episode, and comes
back after a while. What it observes is the number of its state.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from podracer.envs.autoreset import Arrival, Episodes, autoreset
from podracer.errors import ConfigError, check_kwargs
from podracer.types import Array, Discrete, Environment, Spec

# Up, down, left and right, as changes of row and column.
MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))


class World(struct.PyTreeNode):
    """What distinguishes one world of a family from the others.

    Attributes:
      wall: ``[cells]`` bool, whether a cell can't be entered.
      place: ``[objects]`` int32, the cell of each object.
      reward: ``[objects]`` float32, for collecting it.
      end: ``[objects]`` float32, the probability that this ends the episode.
      back: ``[objects]`` float32, the probability in each step that it comes back.
    """

    wall: Array
    place: Array
    reward: Array
    end: Array
    back: Array


class GridState(struct.PyTreeNode):
    """The state of an episode.

    Attributes:
      cell: ``[]`` int32, where the agent is.
      present: ``[objects]`` bool, which objects are there.
      count: ``[]`` int32, steps taken.
    """

    cell: Array
    present: Array
    count: Array


class Family(NamedTuple):
    """Worlds of the same size.

    Attributes:
      size: number of cells in a row, and of rows.
      objects: number of objects.
      walls: number of cells that can't be entered.
      length: steps after which an episode is truncated.
    """

    size: int
    objects: int = 2
    walls: int = 0
    length: int = 30

    @property
    def states(self) -> int:
        """Number of distinguishable states."""
        return self.size**2 * 2**self.objects

    @property
    def spec(self) -> Spec:
        """The spaces; the observation is the state, one-hot."""
        return Spec(jax.ShapeDtypeStruct((self.states,), jnp.float32), Discrete(len(MOVES)))

    def draw(self, key: Array) -> World:
        """A world. Its first object has a reward of 1, the others of -1 to 1."""
        keys = jax.random.split(key, 4)
        cells = jax.random.permutation(keys[0], self.size**2)
        wall = jnp.zeros(cells.shape, bool).at[cells[: self.walls]].set(True)
        place = cells[self.walls : self.walls + self.objects]
        reward = jax.random.uniform(keys[1], place.shape, minval=-1.0).at[0].set(1.0)
        end = 10 ** jax.random.uniform(keys[2], place.shape, minval=-2.0, maxval=0.0)
        back = 10 ** jax.random.uniform(keys[3], place.shape, minval=-2.0, maxval=-0.5)
        return World(wall, place, reward, end, back)

    def environment(self, world: World) -> Environment:
        """A world as an environment; the world may be traced."""

        def observe(state: GridState) -> Array:
            bits = (state.present * 2 ** jnp.arange(self.objects)).sum()
            return jax.nn.one_hot(state.cell * 2**self.objects + bits, self.states)

        def reset(key: Array) -> tuple[Array, GridState]:
            free = jnp.where(world.wall, -jnp.inf, 0.0)
            cell = jax.random.categorical(key, free).astype(jnp.int32)
            state = GridState(cell, jnp.ones(self.objects, bool), jnp.int32(0))
            return observe(state), state

        def step(key: Array, state: GridState, action: Array) -> tuple[Arrival, GridState]:
            end_key, back_key = jax.random.split(key)
            row, column = jnp.divmod(state.cell, self.size)
            move = jnp.asarray(MOVES)[action]
            row, column = jnp.clip(jnp.stack([row, column]) + move, 0, self.size - 1)
            cell = row * self.size + column
            cell = jnp.where(world.wall[cell], state.cell, cell)
            found = state.present & (world.place == cell)
            ends = jax.random.bernoulli(end_key, world.end * found).any()
            returns = jax.random.bernoulli(back_key, world.back) & ~state.present
            state = GridState(cell, (state.present & ~found) | returns, state.count + 1)
            truncated = state.count >= self.length
            return Arrival(observe(state), (found * world.reward).sum(), ends, truncated), state

        return autoreset(Episodes(reset, step), self.spec)


def parse(name: str, kwargs: Mapping[str, Any]) -> Family:
    """The family of a name such as "5x5", with these values of its other fields.

    Raises:
      ConfigError: no such name or field, or too many objects and walls for the cells.
    """
    rows, _, columns = name.partition("x")
    if not rows.isdecimal() or rows != columns or int(rows) < 2:
        raise ConfigError(f'grid:{name}: the size of a grid world is written as "5x5", and square')
    check_kwargs(f"grid:{name}", Family, {"size": int(rows), **kwargs})
    family = Family(int(rows), **kwargs)
    if min(family.objects, family.length) < 1 or not 0 <= family.walls < family.size**2:
        raise ConfigError(
            f"grid:{name} needs an object, a step and a cell without a wall: {family}"
        )
    if family.objects + family.walls >= family.size**2:
        raise ConfigError(
            f"grid:{name} has {family.size**2} cells, too few for {family.objects} objects, "
            f"{family.walls} walls and the agent"
        )
    return family


def make(name: str, kwargs: Mapping[str, Any], params: Mapping[str, Any]) -> Environment:
    """One world of a family, whose number is ``env_kwargs.world``.

    Raises:
      ConfigError: as ``parse``, there are parameters, as worlds have none, or ``env_kwargs.world``
        is no number of a world.
    """
    if params:
        raise ConfigError(f"grid:{name} has no env_params, got {dict(params)}")
    world = kwargs.get("world", 0)
    if not isinstance(world, int) or not 0 <= world < 2**32:
        raise ConfigError(
            f"grid:{name}: env_kwargs.world is a whole number from 0 to 2^32 - 1, got {world!r}"
        )
    others = {key: x for key, x in kwargs.items() if key != "world"}
    family = parse(name, others)
    return family.environment(family.draw(jax.random.key(world)))
