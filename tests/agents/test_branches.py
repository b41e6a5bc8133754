"""Searches among actions that were drawn from the policy (Sampled MuZero)."""

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats

from podracer.agents.branches import make_branches
from podracer.agents.search import Planner, SearchConfig
from podracer.agents.value_scale import Support
from podracer.nets.model import Model
from podracer.types import Box


def drawn_planner(pays, size: int, count: int, config: SearchConfig) -> Planner:
    """Searches among actions of a number of numbers, in a model whose policy is a standard normal
    distribution everywhere, and whose rewards are ``pays(action)``."""
    space, support = Box((size,), -np.ones(size), np.ones(size)), Support(5.0, 51)

    def predict(params, state):
        policy = jnp.zeros((state.shape[0], size))
        return (policy, policy), jnp.zeros((state.shape[0], 51))

    model = Model(
        init=lambda key: {},
        represent=lambda params, observation: observation,
        step=lambda params, state, action: (state, jnp.log(support.encode(pays(action)) + 1e-9)),
        predict=predict,
    )
    return Planner(config, model, support, 0.9, make_branches(space, count))


def test_a_search_among_drawn_actions_prefers_what_pays():
    """The reward of an action is minus its squared distance to (0.4, 0.4)."""
    count, batch = 16, 6

    def pays(action):
        return -((action - 0.4) ** 2).sum(-1)

    planner = drawn_planner(pays, 2, count, SearchConfig(simulations=32, least_range=1.0))
    keys = jax.random.split(jax.random.key(0), batch)
    found = jax.jit(planner.search)({}, keys, jnp.zeros((batch, 1)))
    assert found.actions.shape == (batch, count, 2)
    assert len(np.unique(found.actions)) == found.actions.size
    # What is taken is one of the actions that were drawn, and better than most of them.
    chosen = (found.actions == found.action[:, None]).all(-1)
    np.testing.assert_array_equal(chosen.sum(-1), 1)
    assert (pays(found.action) > jnp.median(pays(found.actions), -1)).all()
    assert ((found.policy * pays(found.actions)).sum(-1) > pays(found.actions).mean(-1)).all()

    def error(mean, log_std):
        policy = jnp.full((batch, 2), mean), jnp.full((batch, 2), log_std)
        return planner.branches.error(policy, found.policy, found.actions)

    density = scipy.stats.norm.logpdf(np.asarray(found.actions), 0.2, np.exp(-0.5)).sum(-1)
    np.testing.assert_allclose(error(0.2, -0.5), -(found.policy * density).sum(-1), rtol=1e-4)


def test_the_noise_of_a_search_is_not_what_its_actions_were_drawn_with():
    """All actions pay alike, so that the noise decides: not always for the largest."""
    planner = drawn_planner(lambda action: 0 * action[:, 0], 1, 16, SearchConfig(simulations=1))
    keys = jax.random.split(jax.random.key(0), 64)
    found = jax.jit(planner.search)({}, keys, jnp.zeros((64, 1)))
    largest = (found.action == found.actions.max(1)).mean()
    np.testing.assert_allclose(largest, 1 / 16, atol=0.12)
