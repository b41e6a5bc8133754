"""Searches in a known model: what they find, and the settings that they follow."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer.agents.search import (
    Roots,
    SearchConfig,
    _completed_values,
    lib,
    outcome,
    search,
)
from podracer.agents.search_entropy import EntropyConfig, update


@pytest.mark.parametrize("policy", ["gumbel", pytest.param("muzero", marks=pytest.mark.slow)])
def test_a_search_finds_the_best_action_and_its_value(policy):
    """Each action pays its own number for ever, and the prior knows nothing."""
    pays = jnp.array([0.0, 1.0, 0.3])

    def step(params, key, action, state):
        output = outcome(
            pays[action],
            jnp.full(action.shape, 0.5),
            jnp.zeros((*action.shape, 3)),
            jnp.zeros(action.shape),
        )
        return output, state + 1

    config = SearchConfig(policy=policy, simulations=64)
    keys = jax.random.split(jax.random.key(0), 5)
    roots = Roots(jnp.zeros((5, 3)), jnp.zeros(5), jnp.zeros((5, 1)))
    found = jax.jit(lambda: search(config, step, (), keys, roots, noise=False))()
    np.testing.assert_array_equal(found.action, 1)
    np.testing.assert_array_equal(found.policy.argmax(-1), 1)
    # At best 1 + 1/2 + 1/4 + ...; the mean over all simulations is less.
    assert ((found.value > 1.0) & (found.value < 2.0)).all()
    assert ((found.depth >= 3) & (found.depth <= 64)).all()
    # An illegal action is neither taken nor learned.
    legal = roots.replace(legal=jnp.array([[True, False, True]] * 5))
    found = jax.jit(lambda: search(config, step, (), keys, legal))()
    assert (found.action != 1).all()
    np.testing.assert_array_equal(found.policy[:, 1], 0)


@pytest.mark.parametrize("policy", ["gumbel", "muzero"])
def test_the_value_of_a_search_is_that_of_its_policy(policy):
    """One action of nine pays 1, the others -1; a Gumbel search tries all of them alike."""

    def step(params, key, action, state):
        output = outcome(
            jnp.where(action == 4, 1.0, -1.0),
            jnp.zeros(action.shape),
            jnp.zeros((*action.shape, 9)),
            jnp.zeros(action.shape),
        )
        return output, state

    keys = jax.random.split(jax.random.key(0), 20)
    roots = Roots(jnp.zeros((20, 9)), jnp.zeros(20), jnp.zeros((20, 1)))
    config = SearchConfig(policy=policy, simulations=16)
    found = jax.jit(lambda: search(config, step, (), keys, roots))()
    expected = found.policy[:, 4] - (1 - found.policy[:, 4])
    assert policy == "muzero" or (expected > 0).all()
    # The mean of all simulations has the network's own value in it.
    np.testing.assert_allclose(found.value, expected, atol=1e-5 if policy == "gumbel" else 0.2)


def test_actions_that_were_not_tried_have_the_value_of_the_paper():
    """v_mix, as mctx computes it for itself."""
    rng = np.random.default_rng(0)
    pays = jnp.asarray(rng.normal(size=9), jnp.float32)

    def step(params, key, action, state):
        output = outcome(
            pays[action],
            jnp.full(action.shape, 0.5),
            jnp.broadcast_to(pays, (*action.shape, 9)),
            pays[action],
        )
        return output, state

    root = lib.RootFnOutput(
        prior_logits=jnp.asarray(rng.normal(size=(3, 9)), jnp.float32),
        value=jnp.asarray(rng.normal(size=3), jnp.float32),
        embedding=jnp.zeros((3, 1)),
    )
    policy = partial(lib.gumbel_muzero_policy, max_num_considered_actions=4)
    output = jax.jit(policy, static_argnums=(3, 4))((), jax.random.key(0), root, step, 5)
    tree: Any = output.search_tree
    visits = tree.children_visits[:, 0]
    assert (visits == 0).any()
    ours = jax.jit(_completed_values)(tree)
    for i in range(3):
        # Its transformation multiplies by the number of visits; this undoes it.
        theirs = lib.qtransform_completed_by_mix_value(
            jax.tree.map(lambda x, i=i: x[i], tree), 0, value_scale=1.0,
            maxvisit_init=1.0 - float(visits[i].max()), rescale_values=False,
        )  # fmt: skip
        np.testing.assert_allclose(ours[i], theirs, atol=1e-5)


def test_policies_get_the_wanted_entropy_whatever_the_unit_of_rewards():
    """``least_range`` moves until they have it: at first less than at the end."""
    config = EntropyConfig(start=0.4, end=0.7, steps=50_000)
    pays, keys = jnp.array([0.0, 0.1, 0.3]), jax.random.split(jax.random.key(0), 16)
    roots = Roots(jnp.zeros((16, 3)), jnp.zeros(16), jnp.zeros((16, 1)))

    def shares(unit):
        def step(params, key, action, state):
            one = jnp.ones(action.shape)
            output = outcome(unit * pays[action], 0 * one, jnp.zeros((*action.shape, 3)), 0 * one)
            return output, state

        def one(least_range, steps):
            searches = SearchConfig(value_scale=1.0)
            found = search(searches, step, (), keys, roots, least_range=least_range)
            new = update(config, 1.0, least_range, steps, found.policy, lambda x: x)
            entropy = jax.scipy.special.entr(found.policy).sum(-1).mean()
            return new, (entropy / jnp.log(3), new)

        return jax.lax.scan(one, jnp.float32(1.0), jnp.linspace(0, 1e6, 2000))[1]

    (small, small_range), (large, large_range) = (jax.jit(shares)(x) for x in (1.0, 10.0))
    for share in (small, large):
        np.testing.assert_allclose(share[-1], 0.7, atol=0.01)
    np.testing.assert_allclose(large_range[-1], 10 * small_range[-1], rtol=0.05)
    np.testing.assert_allclose(config.at(jnp.float32(25_000)), 0.55)
    np.testing.assert_allclose(EntropyConfig(start=0.4).at(jnp.float32(25_000)), 0.4)


def test_the_range_stays_where_entropies_cannot_follow_it():
    """Policies that are certain whatever the range, as where one action alone is legal."""
    certain = jnp.eye(3)[None, :2]

    def after(config, policy, count):
        def one(_, old):
            return update(config, 0.5, old, jnp.float32(0), policy, lambda x: x)

        return jax.lax.fori_loop(0, count, one, jnp.float32(0.5))

    wanted = EntropyConfig(start=0.5)
    np.testing.assert_allclose(after(wanted, certain, 10_000), 500.0, rtol=1e-5)
    np.testing.assert_allclose(after(wanted, jnp.ones((2, 3)) / 3, 10_000), 5e-4, rtol=1e-5)
    np.testing.assert_allclose(after(wanted, jnp.ones((2, 1)), 1), 0.5 * np.exp(0.01), rtol=1e-5)
    assert after(EntropyConfig(), certain, 10) == 0.5


def test_the_temperature_follows_the_steps_of_the_run():
    config = SearchConfig(
        policy="muzero", temperature=1.0, final_temperature=0.2, temperature_steps=100
    )
    temperatures = [float(config.temperature_at(jnp.float32(x))) for x in (0, 50, 100, 1000)]
    np.testing.assert_allclose(temperatures, [1.0, 0.6, 0.2, 0.2], atol=1e-6)
