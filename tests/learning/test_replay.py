"""The replay against a list of all steps, and its draws against their probabilities."""

import itertools
from collections.abc import Sequence
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer.errors import ConfigError
from podracer.learning import priorities as priorities_lib
from podracer.learning import replay
from podracer.learning.replay import ReplayConfig
from podracer.learning.ring import Item, Kept, Ring
from podracer.types import Devices, TimeStep, Trajectory
from podracer.xla_cpu import prng
from tests import helpers

T, FRAMES = 4, 3


def item(length: int, stride: int = 1, **fields) -> Item:
    """Items whose batch is the window itself; those of single transitions may be invalid."""

    def valid(window):
        first, discount = window.timestep.first, window.timestep.discount
        return ~first[1] | (discount[1] == 0)

    return Item(
        length,
        stride,
        read=lambda train_state, window: window,
        update_stats=lambda train_state, trajectory: (),
        keep=lambda trajectory: Kept(trajectory.extras, trajectory.carry),
        valid=valid if stride == 1 else None,
        **fields,
    )


class World:
    """Steps of B environments whose numbers say which they are, with ends of all kinds."""

    def __init__(self, envs: int, seed: int = 0, frames: int = 1):
        self.rng, self.envs, self.frames = np.random.default_rng(seed), envs, frames
        self.steps = [self._step(None)]

    def _step(self, last):
        t = 0 if last is None else last["number"] + 1
        ended = np.zeros(self.envs, bool) if last is None else last["ended"]
        kind = self.rng.integers(0, 8, self.envs)
        first = np.full(self.envs, True) if last is None else ended | (kind == 1) | (kind == 3)
        frame = (100 * np.arange(self.envs) + t).astype(np.float32)
        stack = np.repeat(frame[:, None], self.frames, 1)
        if last is not None:
            # A lost life begins an episode too, but its stack goes on.
            again = ~first | (kind == 2)
            shifted = np.concatenate([last["stack"][:, 1:], frame[:, None]], 1)
            stack = np.where(again[:, None], shifted, stack)
        return {
            "number": t,
            "first": first,
            # Terminated before the step that resets, or in the same step (first). Others are
            # truncated likewise.
            "discount": np.where((kind == 0) | (first & (kind == 1)), 0, 1).astype(np.float32),
            "ended": (kind == 0) | (kind == 4),
            "reward": self.rng.normal(size=self.envs).astype(np.float32),
            "action": self.rng.integers(0, 3, self.envs),
            "stack": stack.astype(np.float32),
        }

    def unroll(self) -> Trajectory:
        start = len(self.steps) - 1
        for _ in range(T):
            self.steps.append(self._step(self.steps[-1]))
        rows = self.steps[start:]

        def stacked(key, rows):
            return jnp.asarray(np.stack([row[key] for row in rows]))

        observation = stacked("stack", rows)
        return Trajectory(
            TimeStep(
                observation if self.frames > 1 else observation[..., 0],
                *(stacked(key, rows) for key in ("reward", "discount", "first")),
            ),
            stacked("action", rows[:-1]),
            {"twice": 2 * stacked("action", rows[:-1])},
            jnp.full(self.envs, start, jnp.int32),
            jnp.arange(self.envs),
        )

    def valid(self, t: int) -> np.ndarray:
        return ~self.steps[t + 1]["first"] | (self.steps[t + 1]["discount"] == 0)


def make(
    envs: int,
    capacity: int,
    length: int,
    stride: int = 1,
    frames: int = 1,
    unrolls: int | None = None,
    **settings,
):
    config = ReplayConfig(capacity=capacity * envs, begin=1, **{"batch": envs, **settings})
    source = replay.make_source(
        item(length, stride),
        config,
        Devices(),
        num_envs=envs,
        num_unrolls=unrolls or envs,
        unroll_length=T,
        frames=frames,
    )
    return source._replace(add=jax.jit(source.add), update=jax.jit(source.update))


@pytest.mark.parametrize(
    ("length", "stride", "frames"),
    [
        pytest.param(1, 1, 1, marks=pytest.mark.slow),
        pytest.param(3, 1, 1, marks=pytest.mark.slow),
        pytest.param(8, T, 1, marks=pytest.mark.slow),
        pytest.param(8, T, FRAMES, marks=pytest.mark.slow),
        pytest.param(6, 1, FRAMES, marks=pytest.mark.slow),
        *((6, T, FRAMES), (10, T, 1)),
    ],
)
def test_items_are_those_of_a_list_of_all_steps(length, stride, frames):
    envs, slots = 2, 5 * T
    world = World(envs, frames=frames)
    source = make(envs, slots, length, stride, frames)
    state = None
    for unrolls in range(1, 13):
        trajectory = world.unroll()
        state = source.init(trajectory) if state is None else state
        state, _ = source.add(state, None, trajectory, None)
        newest = unrolls * T - 1
        oldest = max(0, newest + 1 - slots)
        expected = {
            (b, t)
            for b in range(envs)
            for t in range(oldest + frames - 1, newest - length + 1)
            if t % stride == 0 and (stride > 1 or world.valid(t)[b])
        }
        leaves = np.asarray(state.priorities.items)
        drawable = leaves.reshape(envs, -1)[:, : slots // stride]
        found = {(b, int(i)) for b, i in zip(*np.nonzero(drawable), strict=True)}
        assert found == {(b, t % slots // stride) for b, t in expected}
        np.testing.assert_array_equal(state.priorities.sums, leaves.sum(-1))
        if expected:
            # Always as many, so that reading is compiled once.
            some = list(itertools.islice(itertools.cycle(sorted(expected)), envs * slots // stride))
            check_contents(world, state, some, length, stride, frames, slots)
    assert len(expected) > envs


def check_contents(world, state, expected, length, stride, frames, slots):
    ring = Ring(item(length, stride), slots, T, frames)
    env, start = (np.array(x) for x in zip(*expected, strict=True))
    window = ring.read(state.ring, env, start % slots // stride, np.ones(len(env)))
    offsets = np.arange(length + 1)

    def real(key):
        return np.stack([
            np.stack([world.steps[t + o][key][b] for b, t in expected]) for o in offsets
        ])  # fmt: skip

    for key in ("reward", "discount", "first"):
        np.testing.assert_array_equal(getattr(window.timestep, key), real(key))
    np.testing.assert_array_equal(window.action[:-1], real("action")[:-1])
    np.testing.assert_array_equal(window.extras["twice"], 2 * window.action)
    stack = real("stack")
    np.testing.assert_array_equal(
        window.observe(jnp.arange(length + 1)), stack if frames > 1 else stack[..., 0]
    )
    some = np.random.default_rng(0).integers(0, length + 1, (2, len(env)))
    chosen = np.take_along_axis(stack, some[..., None], 0)
    np.testing.assert_array_equal(window.observe(some), chosen if frames > 1 else chosen[..., 0])
    np.testing.assert_array_equal(window.carry, start // T * T)


def test_a_stack_of_frames_is_stored_once_and_as_it_is():
    envs, slots, frames = 2, 5 * T, 4
    ring = Ring(item(6, T), slots, T, frames)
    trajectory = World(envs, frames=frames).unroll()
    image = jnp.zeros((T + 1, envs, 84, 84, frames), jnp.uint8)
    timestep = trajectory.timestep.replace(observation=image)
    state = ring.init(trajectory.replace(timestep=timestep), envs)
    images = [x for x in jax.tree.leaves(state) if x.dtype == jnp.uint8]
    assert sum(x.nbytes for x in images) == envs * slots * 84 * 84
    assert sum(x.nbytes for x in jax.tree.leaves(state)) < 1.01 * envs * slots * 84 * 84


def ranked(envs: int, items: int, seed: int = 0, batch: int = 8):
    """Priorities at random, a third of them zero, and their layout."""
    rng = np.random.default_rng(seed)
    layout = priorities_lib.make_layout(envs, batch, items)
    values = rng.uniform(size=(envs, items)) * (rng.uniform(size=(envs, items)) < 2 / 3)
    env, number = (x.ravel() for x in np.indices((envs, items)))
    priorities = jax.jit(priorities_lib.assign)(
        priorities_lib.init(layout, envs), env, number, jnp.asarray(values.ravel(), jnp.float32)
    )
    return priorities, layout, values


@pytest.mark.parametrize("batch", [1, 2, 12])
def test_items_are_drawn_in_proportion_to_their_priority(batch):
    envs, draws = 4, 20_000
    priorities, layout, values = ranked(envs, 37, batch=batch)
    keys = jax.random.split(prng.key(0), draws)
    draw = jax.vmap(lambda key: priorities_lib.draw(priorities, layout, key, 0))
    drawn = jax.jit(draw)(keys)
    count = np.zeros(values.shape)
    np.add.at(count, (np.asarray(drawn.env), np.asarray(drawn.item)), 1)
    groups = values.reshape(layout.groups, -1)
    expected = (groups / groups.sum(-1, keepdims=True) / layout.groups).reshape(values.shape)
    assert (count[values == 0] == 0).all()
    np.testing.assert_allclose(count / count.sum(), expected, atol=0.003)
    np.testing.assert_allclose(drawn.probability, expected[drawn.env, drawn.item], rtol=1e-5)


def test_devices_draw_what_one_would():
    envs = 8
    priorities, layout, _ = ranked(envs, 100, batch=16)
    draw = jax.jit(partial(priorities_lib.draw, layout=layout, key=prng.key(1)))
    whole = draw(priorities, device_index=0)
    for devices in (2, 4, 8):
        share = envs // devices
        shares = jax.tree.map(lambda x, n=devices: jnp.split(x, n), priorities)
        split = [
            priorities_lib.Priorities(*part) for part in zip(shares.items, shares.sums, strict=True)
        ]
        parts = [draw(part, device_index=d) for d, part in enumerate(split)]
        env = np.concatenate([part.env + d * share for d, part in enumerate(parts)])
        np.testing.assert_array_equal(env, whole.env)
        np.testing.assert_array_equal(np.concatenate([x.item for x in parts]), whole.item)
        probability = np.concatenate([x.probability for x in parts])
        np.testing.assert_allclose(probability, whole.probability, rtol=1e-6)


def test_a_weight_of_zero_is_never_chosen():
    """Not even where rounding puts the place beyond the sum, or on the edge of a weight."""
    weights = jnp.asarray([[0, 0.1, 0, 0.2, 0], [0, 0, 0, 0, 1e-30]], jnp.float32)
    for place in (0.0, 1 / 3, 0.1 / 0.3, 0.9999999, 1.0):
        chosen = priorities_lib._choose(weights, jnp.full(2, place, jnp.float32))
        assert (np.take_along_axis(np.asarray(weights), np.asarray(chosen)[:, None], 1) > 0).all()


@pytest.mark.slow
def test_sums_are_exact_after_a_million_updates():
    envs, items = 4, 1000
    priorities, _, _ = ranked(envs, items)

    def change(i, priorities):
        env_key, item_key, key = jax.random.split(jax.random.fold_in(prng.key(2), i), 3)
        env = jax.random.randint(env_key, (256,), 0, envs)
        number = jax.random.randint(item_key, (256,), 0, items)
        # One value for an item that occurs twice, over ten powers of ten.
        value = 10.0 ** (10 * jax.random.uniform(key, (envs, items)) - 5)[env, number]
        return priorities_lib.assign(priorities, env, number, value)

    priorities = jax.jit(lambda x: jax.lax.fori_loop(0, 4000, change, x))(priorities)
    exact = np.asarray(priorities.items, np.float64).sum(-1)
    np.testing.assert_allclose(priorities.sums, exact, rtol=3e-7)


def test_new_items_get_the_largest_priority_and_losses_set_them():
    envs, slots = 2, 10 * T
    world = World(envs)
    source = make(envs, slots, 1, priority_exponent=0.5, importance_exponent=1.0, batch=4)
    state = source.init(trajectory := world.unroll())
    state, _ = source.add(state, None, trajectory, None)
    batch, ticket, _ = source.sample(state, None, prng.key(0), 0)
    np.testing.assert_allclose(batch.importance, 1)
    state = source.update(state, ticket, jnp.full(4, 9.0))
    set_to = state.priorities.items.reshape(envs, -1)[ticket.env, ticket.item]
    np.testing.assert_allclose(set_to, 3)
    # An update that diverges gives the least priority, and leaves the others and the largest.
    diverged = source.update(state, ticket, jnp.full(4, jnp.nan))
    np.testing.assert_array_equal(diverged.largest, state.largest)
    set_to = diverged.priorities.items.reshape(envs, -1)[ticket.env, ticket.item]
    assert ((set_to > 0) & (set_to < 0.1)).all()
    state, _ = source.add(state, None, world.unroll(), None)
    items = np.asarray(state.priorities.items).reshape(envs, -1)
    new = [items[b, t] for b in range(envs) for t in range(T - 1, 2 * T - 1) if world.valid(t)[b]]
    np.testing.assert_allclose(new, 3)
    # The rarest item of a batch has the weight 1: those of priority 3 a third of those of 1.
    many = make(envs, slots, 1, priority_exponent=0.5, importance_exponent=1.0, batch=64)
    batch, ticket, metrics = many.sample(state, None, prng.key(0), 0)
    p = items[ticket.env, ticket.item]
    assert len(set(p.tolist())) == 2
    total = items.sum(1)[ticket.env]
    np.testing.assert_allclose(batch.importance, (total / p) / (total / p).max(), rtol=1e-5)
    np.testing.assert_allclose(metrics["replay/importance"], batch.importance.mean(), rtol=1e-6)
    np.testing.assert_allclose(metrics["replay/priority"], (p**2).mean(), rtol=1e-6)


@pytest.mark.parametrize(
    ("length", "stride", "frames"), [(6, 1, FRAMES), (10, T, 1), (1, 1, 1), (8, T, FRAMES)]
)
def test_unrolls_go_to_their_environments_in_any_order(length, stride, frames):
    envs, slots, unrolls = 3, 6 * T, 8
    own = [World(1, seed, frames) for seed in range(envs)]
    source = make(envs, slots, length, stride, frames, unrolls, batch=envs)
    alone = make(1, slots, length, stride, frames, batch=1)
    first = [world.unroll() for world in own]
    state = source.init(numbered([first[0]] * unrolls, [0] * unrolls))
    expected = [alone.init(x) for x in first]
    rng = np.random.default_rng(0)
    # The second environment is fast, at last so fast that it overwrites its own unrolls.
    updates = [[0, 1, 1, 2, 1, 1, 0, 1], *rng.integers(0, envs, (8, unrolls)), [1] * 8, [1] * 8]
    for numbers in updates:
        new = [own[i].unroll() for i in numbers]
        state, _ = source.add(state, None, numbered(new, numbers), None)
        for i, x in zip(numbers, new, strict=True):
            expected[i], _ = alone.add(expected[i], None, x, None)
        stacked = jax.tree.map(lambda *x: np.concatenate(x), *expected)
        # Laid out differently, because the places of a row depend on the number of environments.
        items = [
            np.asarray(x.priorities.items).reshape(envs, -1)[:, : slots // stride]
            for x in (state, stacked)
        ]
        np.testing.assert_array_equal(*items)
        chex.assert_trees_all_equal(state.ring, stacked.ring)
    assert items[0].any(1).all()


def numbered(unrolls: list[Trajectory], numbers: Sequence[int]) -> Trajectory:
    """Unrolls of one environment each as one trajectory, with these numbers of environments."""
    joined = jax.tree.map(jnp.asarray, helpers.join(unrolls))
    return joined.replace(env_id=jnp.asarray(numbers))


# The mean of 55 equal numbers, as XLA computes it, is a little less than the number.
@pytest.mark.parametrize("envs", [2, 55])
def test_the_replay_is_ready_when_enough_is_in_it(envs):
    world = World(envs)
    source = replay.make_source(
        item(3),
        ReplayConfig(capacity=100 * envs, begin=13 * envs, batch=envs),
        Devices(),
        num_envs=envs,
        num_unrolls=envs,
        unroll_length=T,
        frames=1,
    )
    state, ready, fill = source.init(world.unroll()), [], []
    for _ in range(5):
        state, _ = source.add(state, None, world.unroll(), None)
        ready.append(bool(source.ready(state)))
        fill.append(float(source.finish(state)[1]["replay/fill"]))
    assert ready == [False, False, False, True, True]
    np.testing.assert_allclose(fill, np.arange(1, 6) / 25)


def test_ages_are_counted_in_updates():
    source = make(1, 10 * T, 1, batch=1)
    world = World(1)
    state = source.init(world.unroll())
    for _ in range(13):
        state, _ = source.add(state, None, world.unroll(), None)
    ring = Ring(item(1), 10 * T, T, 1)
    newest = (13 * T - 1) % (10 * T)
    ages = ring.age(state.ring, jnp.zeros(3, int), jnp.array([newest, newest - T, newest + 1]))
    np.testing.assert_allclose(ages, [0, 1, 10 - 1 / T])


def test_impossible_settings():
    with pytest.raises(ConfigError, match=r"keeps 4 steps .* of 9 steps needs 16; .* least 32"):
        make(2, 4, 9)
    for changes, match in (
        ({"capacity": 0}, "replay.capacity must be positive, got 0"),
        ({"batch": 0}, "replay.batch must be positive"),
        ({"priority_exponent": 1.5}, r"must be in \[0, 1\], got 1.5"),
        ({"begin": 200_000}, "must not be more than replay.capacity=100000"),
    ):
        with pytest.raises(ConfigError, match=match):
            ReplayConfig(**changes)
    world = World(2)
    four = make(4, 25_000, 1, batch=1)
    with pytest.raises(ConfigError, match=r"4 environments .* divisor 1, .* divides 1, or"):
        four.init(world.unroll())
