"""R2D2 against the paper's formulas in plain numpy, and what the burn-in does."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import envs
from podracer.agents import normalization, r2d2, value_scale
from podracer.agents.q_learning import QCarry
from podracer.errors import ConfigError
from podracer.nets.q_network import make_q_network
from podracer.types import Devices, TrainState, Trajectory, Weights
from tests import references
from tests.helpers import make_config

N, BURN_IN, TRACE, ITEMS, ACTIONS, DISCOUNT = 3, 4, 9, 5, 2, 0.9
LENGTH = BURN_IN + TRACE
# Steps of an unroll. Two of them contain a sequence and the step after it.
UNROLL = TRACE


def h(x):
    return np.sign(x) * (np.sqrt(np.abs(x) + 1) - 1) + 1e-3 * x


def test_rescaling_has_its_inverse():
    x = np.linspace(-300, 300, 101)
    np.testing.assert_allclose(value_scale.rescale(x), h(x), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(value_scale.unscale(h(x)), x, rtol=1e-5, atol=1e-5)


def episodes_between(stream: references.Stream, start: int, end: int) -> references.Stream:
    """The part of a stream from one time step to another, with its episodes."""
    timestep = jax.tree.map(lambda x: x[start : end + 1], stream.timestep)
    episodes = []
    for b, *columns in stream.episodes:
        kept = [i for i, t in enumerate(columns[0]) if start <= t < end]
        index, rewards, discounts, leads = ([column[i] for i in kept] for column in columns)
        index, leads = ([x if x is None else x - start for x in xs] for xs in (index, leads))
        episodes.append((b, index, rewards, discounts, leads))
    return references.Stream(timestep, episodes)


class Case:
    """An agent with a recurrent network, and a batch of one random sequence an environment."""

    def __init__(
        self, *, rescale: bool = True, next_step: bool = True, reward_deviation: float = 0.0
    ):
        """Makes both.

        Args:
          rescale: ``r2d2.rescale``.
          next_step: whether an episode begins in the step after the end of the one before.
          reward_deviation: by which rewards are normalised; 0 does not normalise them.
        """
        config = make_config(
            agent="r2d2",
            discount=DISCOUNT,
            num_envs=ITEMS,
            unroll_length=UNROLL,
            network__core="lstm",
            replay__capacity=4 * UNROLL * ITEMS,
            replay__begin=1,
            replay__batch=ITEMS,
            replay__priority_exponent=1.0,
            r2d2__n_step=N,
            r2d2__burn_in=BURN_IN,
            r2d2__trace=TRACE,
            r2d2__rescale=rescale,
            normalize_rewards=reward_deviation > 0,
        )
        rng = np.random.default_rng(0)
        env = envs.make_environment("dummy:sign", {}, {})
        self.agent = r2d2.make(env.spec, config.settings, config.r2d2, Devices())
        self.loss = jax.jit(self.agent.loss)
        self.network = make_q_network(env.spec, config.network, dueling=True, extra=ACTIONS + 1)
        init = jax.jit(self.network.init)
        self.params, target = (init(jax.random.key(i)) for i in range(2))
        # Values of the target that differ much, so that mistakes show.
        target = jax.tree.map(lambda x: 3 * x, target)
        moments = normalization.init(jnp.float32(0)).replace(variance=reward_deviation**2)
        stats = {"observation": (), "reward": moments if reward_deviation else ()}
        self.state = TrainState(Weights(self.params, stats), target, (), jnp.int32(0))
        self._replay(rng, next_step)

    def _replay(self, rng, next_step):
        """Adds two unrolls, after which the first one is an item of each environment."""
        stream = references.random_stream(rng, 2 * UNROLL, ITEMS, next_step=next_step, truncate=0.5)
        observation = rng.normal(size=(2 * UNROLL + 1, ITEMS, 1)).astype(np.float32)
        timestep = stream.timestep.replace(observation=observation)
        self.action = rng.integers(0, ACTIONS, (2 * UNROLL, ITEMS))
        self.chosen, self.best = rng.normal(size=(2, 2 * UNROLL, ITEMS)).astype(np.float32)
        self.memory = jax.tree.map(
            lambda x: rng.normal(size=x.shape).astype(np.float32),
            self.network.initial_carry(ITEMS),
        )
        self.last = rng.integers(0, ACTIONS, ITEMS)
        total = np.zeros(ITEMS, np.float32) if self.state.weights.stats["reward"] else ()
        carry = QCarry(self.memory, self.last, np.zeros(ITEMS, np.float32), total)
        source, add = None, jax.jit(self.agent.source.add)
        for start in (0, UNROLL):
            part = slice(start, start + UNROLL)
            trajectory = Trajectory(
                jax.tree.map(lambda x, s=start: x[s : s + UNROLL + 1], timestep),
                self.action[part],
                {"chosen": self.chosen[part], "best": self.best[part]},
                carry,
                np.arange(ITEMS),
            )
            trajectory = jax.tree.map(jnp.asarray, trajectory)
            source = self.agent.source.init(trajectory) if source is None else source
            source, _ = add(source, self.state, trajectory, None)
            carry = carry.replace(memory=jax.tree.map(np.zeros_like, self.memory))
        self.source = source
        sample = jax.jit(self.agent.source.sample)
        batch, _, _ = sample(source, self.state, jax.random.key(0), 0)
        self.batch = batch.replace(importance=jnp.asarray(rng.uniform(0.2, 1, ITEMS)))
        self.timestep = jax.tree.map(lambda x: x[: LENGTH + 1], timestep)
        self.trace = episodes_between(stream, BURN_IN, LENGTH)


make_case = cache(Case)


def unrolled(case: Case, params) -> np.ndarray:
    """Values ``[trace + 1, items, actions]``, step by step, from inputs as they were collected."""
    memory, values, timestep = case.memory, [], case.timestep
    actions = np.concatenate([case.last[None], case.action])
    apply = jax.jit(case.network.apply)
    for t in range(LENGTH + 1):
        last = np.eye(ACTIONS, dtype=np.float32)[actions[t]]
        extra = np.concatenate([last, timestep.reward[t][:, None]], -1)
        extra[timestep.first[t]] = 0
        now = (timestep.observation[t], timestep.first[t], extra)
        memory, q = apply(params, memory, *(jnp.asarray(x)[None] for x in now))
        values.append(q[0])
    return np.stack(values)[BURN_IN:]


def paper_priority(error, valid):
    size = np.abs(error)
    return 0.9 * size.max(0) + 0.1 * size.sum(0) / valid.sum(0)


@pytest.mark.parametrize(
    ("rescaled", "next_step"),
    [(True, True), *(pytest.param(x, not x, marks=pytest.mark.slow) for x in (False, True))],
)
def test_the_loss_and_the_priorities_are_those_of_the_paper(rescaled, next_step):
    case = make_case(rescale=rescaled, next_step=next_step)
    scale = h if rescaled else lambda x: x
    unscale = (lambda x: np.asarray(value_scale.unscale(x))) if rescaled else lambda x: x
    q, q_target = unrolled(case, case.params), unrolled(case, case.state.target)
    bootstrap = np.take_along_axis(q_target, q.argmax(-1)[..., None], -1)[..., 0]
    target, valid = references.n_step(case.trace, unscale(bootstrap), N, DISCOUNT)
    action = case.action[BURN_IN:LENGTH, :, None]
    chosen = np.take_along_axis(q[:-1], action, -1)[..., 0]
    error = valid * (scale(target) - chosen)
    loss, aux = case.loss(case.params, case.state, case.batch, None)
    importance = np.asarray(case.batch.importance)
    assert 0 < valid.mean() < 1
    np.testing.assert_allclose(loss, np.mean(importance * 0.5 * error**2), rtol=1e-4)
    np.testing.assert_allclose(aux.priorities, paper_priority(error, valid), rtol=1e-4)
    # New items are ranked by the values that the actor had.
    part = slice(BURN_IN, LENGTH + 1)
    target, _ = references.n_step(case.trace, unscale(case.best[part]), N, DISCOUNT)
    error = valid * (scale(target) - case.chosen[part][:-1])
    found = case.source.priorities.items.reshape(ITEMS, -1)[:, 0]
    np.testing.assert_allclose(found, paper_priority(error, valid), rtol=1e-4)


def test_first_priorities_are_of_normalised_rewards():
    """Losses and the actor's values are on that scale."""
    case = make_case(rescale=False, reward_deviation=100.0)
    part = slice(BURN_IN, LENGTH + 1)
    stream = case.trace._replace(
        episodes=[(b, i, [r / 100 for r in rs], *x) for b, i, rs, *x in case.trace.episodes]
    )
    target, valid = references.n_step(stream, case.best[part], N, DISCOUNT)
    error = valid * (target - case.chosen[part][:-1])
    found = case.source.priorities.items.reshape(ITEMS, -1)[:, 0]
    np.testing.assert_allclose(found, paper_priority(error, valid), rtol=1e-3)


def test_nothing_is_learned_from_the_burn_in():
    case = make_case()

    def loss(batch):
        return case.loss(case.params, case.state, batch, None)[0]

    @jax.jit
    def gradient(batch):
        floats = (batch.observation, batch.memory)
        return jax.grad(lambda x: loss(batch.replace(observation=x[0], memory=x[1])))(floats)

    observation, memory = gradient(case.batch)
    assert not np.asarray(observation[:BURN_IN]).any()
    assert all(not np.asarray(x).any() for x in memory)
    assert np.asarray(observation[BURN_IN:]).any()
    # But the loss depends on it.
    changed = case.batch.replace(observation=case.batch.observation.at[BURN_IN - 1].add(1.0))
    assert float(loss(changed)) != float(loss(case.batch))


def test_the_state_after_the_burn_in_is_that_of_the_whole_unroll():
    case = make_case()
    unroll = jax.jit(partial(r2d2.burn_in_and_trace, case.network), static_argnums=2)
    values = [unroll(case.params, case.batch, burn_in)[-TRACE - 1 :] for burn_in in (0, BURN_IN)]
    np.testing.assert_allclose(*values, rtol=1e-5, atol=1e-6)


def test_steps_that_no_sequence_would_contain():
    with pytest.raises(ConfigError, match=r"r2d2\.n_step=6 is more than r2d2\.trace=5"):
        make_config(agent="r2d2", unroll_length=4, r2d2__trace=5, r2d2__n_step=6)
    with pytest.raises(ConfigError, match=r"r2d2\.trace=4 .* set unroll_length to at most 4"):
        make_config(agent="r2d2", unroll_length=5, r2d2__trace=4)
