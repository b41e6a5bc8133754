"""The losses of PPO and V-trace against the papers' formulas in plain numpy, item by item."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import envs
from podracer.agents import AGENTS, kl_penalty, ppo, returns, surrogate, transitions, unrolls
from podracer.nets import actor_critic as nets
from podracer.nets.q_network import make_q_network
from podracer.types import ACTION_MASK, Devices, TimeStep, TrainState
from tests import references
from tests.helpers import make_config

ITEMS = 40


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def make(agent, **changes):
    config = make_config(agent=agent, entropy_cost=0.03, value_cost=0.7, **changes)
    env = envs.make_environment("dummy:sign", {}, {})
    network = nets.make_network(env.spec, config.network)
    made = AGENTS[agent].make(env.spec, config.settings, config.agent_config, Devices())
    return made, network, jax.jit(made.init)(jax.random.key(0)).params


def random_items(rng):
    return {
        "observation": rng.normal(size=(ITEMS, 1)).astype(np.float32),
        "action": rng.integers(0, 2, ITEMS),
        "log_prob": np.log(rng.uniform(0.2, 0.9, ITEMS)).astype(np.float32),
        "old_value": rng.normal(size=ITEMS).astype(np.float32),
        "advantage": rng.normal(size=ITEMS).astype(np.float32),
        "target": rng.normal(size=ITEMS).astype(np.float32),
        "valid": (rng.uniform(size=ITEMS) < 0.7).astype(np.float32),
    }


def ppo_batch(x):
    targets = returns.Targets(x["advantage"], x["target"], x["valid"])
    sample = ppo.Sample(
        x["observation"],
        np.zeros(ITEMS, bool),
        x["action"],
        x["log_prob"],
        x["old_value"],
        targets,
    )
    return (), jax.tree.map(lambda leaf: jnp.asarray(leaf)[:, None], sample)


@pytest.mark.parametrize("value_clip", [0.0, 0.1])
def test_ppo_is_equation_seven_with_value_and_entropy(value_clip):
    agent, network, params = make("ppo", ppo__value_clip=value_clip, ppo__clip=0.2)
    x = random_items(np.random.default_rng(0))
    _, logits, value = jax.jit(network.apply)(
        params, (), x["observation"][None], np.zeros((1, ITEMS), bool)
    )
    p, value = softmax(np.asarray(logits[0])), np.asarray(value[0])

    policy = values = entropy = 0.0
    clipped = np.zeros(ITEMS, bool)
    for i in range(ITEMS):
        if not x["valid"][i]:
            continue
        ratio = p[i, x["action"][i]] / np.exp(x["log_prob"][i])
        a = x["advantage"][i]
        policy -= min(ratio * a, min(max(ratio, 0.8), 1.2) * a)
        clipped[i] = (ratio > 1.2 and a > 0) or (ratio < 0.8 and a < 0)
        error = (value[i] - x["target"][i]) ** 2
        if value_clip:
            old = x["old_value"][i]
            moved = old + min(max(value[i] - old, -value_clip), value_clip)
            error = max(error, (moved - x["target"][i]) ** 2)
        values += 0.5 * error
        entropy -= (p[i] * np.log(p[i])).sum()
    total = (policy + 0.7 * values - 0.03 * entropy) / ITEMS

    loss, aux = jax.jit(agent.loss)(params, None, ppo_batch(x), None)
    np.testing.assert_allclose(loss, total, rtol=1e-4)
    np.testing.assert_allclose(aux.metrics["policy"], policy / ITEMS, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(aux.metrics["value"], values / ITEMS, rtol=1e-4)
    np.testing.assert_allclose(aux.metrics["entropy"], entropy / ITEMS, rtol=1e-4)
    assert 0 < clipped.sum() < ITEMS


@pytest.mark.parametrize("target_kl", [0.01, 1.0], ids=["beyond the cutoff", "below it"])
def test_the_kl_penalty_is_equation_eight_with_batch_ppo_s_cutoff(target_kl):
    penalty = {"ppo__objective": "kl_penalty", "ppo__target_kl": target_kl, "num_epochs": 2}
    agent, network, params = make("ppo", **penalty)
    x = random_items(np.random.default_rng(0))
    _, logits, _ = jax.jit(network.apply)(
        params, (), x["observation"][None], np.zeros((1, ITEMS), bool)
    )
    old = np.random.default_rng(1).normal(size=(ITEMS, 2)).astype(np.float32)
    new, before = softmax(np.asarray(logits[0])), softmax(old)
    carry, sample = ppo_batch(x)
    batch = (carry, sample.replace(old_policy=jnp.asarray(old)[:, None]))
    penalty = kl_penalty.Penalty(jnp.float32(0.7), jnp.float32(0))
    state = TrainState((), penalty, (), jnp.int32(0))

    def policy(new):
        ratio = new[np.arange(ITEMS), x["action"]] / np.exp(x["log_prob"])
        kl = (x["valid"] * (before * np.log(before / new)).sum(-1)).mean()
        gain = (x["valid"] * ratio * x["advantage"]).mean()
        return kl, -gain + 0.7 * kl + 1000 * max(kl - 2 * target_kl, 0) ** 2

    kl, expected = policy(new)
    assert (kl > 2 * target_kl) == (target_kl == 0.01)
    loss, aux = jax.jit(agent.loss)(params, state, batch, None)
    np.testing.assert_allclose(aux.metrics["kl"], kl, rtol=1e-4)
    np.testing.assert_allclose(aux.metrics["policy"], expected, rtol=1e-4)
    total = {k: float(aux.metrics[k]) for k in ("policy", "value", "entropy")}
    rest = 0.7 * total["value"] - 0.03 * total["entropy"]
    np.testing.assert_allclose(loss, total["policy"] + rest, rtol=1e-5)

    # The gradient of the policy's part, by differences, along the bias of the last layer.
    def shifted(shift):
        return policy(softmax(np.asarray(logits[0], np.float64) + shift))[1]

    only_policy = jax.grad(lambda p: agent.loss(p, state, batch, None)[1].metrics["policy"])
    gradient = jax.tree.leaves(jax.jit(only_policy)(params))
    bias = next(g for g in gradient if g.shape == (2,))
    for i, direction in enumerate(np.eye(2)):
        step = 1e-5 * direction
        slope = (shifted(step) - shifted(-step)) / 2e-5
        np.testing.assert_allclose(bias[i], slope, rtol=2e-2, atol=1e-5)


def test_the_coefficient_of_the_penalty_adapts_by_the_last_pass_of_an_update():
    """Updates of three passes over two minibatches; only the last two steps of each count."""
    target = kl_penalty.make_target(0.01, steps=6, last_pass=2)
    penalty, seen, step = target.init({}), [], 0
    last = [(0.02, 0.02), (0.01, 0.012), (0.002, 0.002), (0.001, 0.018), (0.0139, 0.0139)]
    for pair in last:
        for kl in (9.0, 9.0, 9.0, 9.0, *pair):
            step += 1
            penalty = target.update(penalty, {}, {"kl": jnp.float32(kl)}, jnp.int32(step))
        seen.append(float(penalty.coefficient))
        assert float(penalty.divergence) == 0
    np.testing.assert_allclose(seen, [1.5, 1.5, 1.0, 1.0, 1.5], rtol=1e-6)


def test_ppo_has_no_gradient_where_clipped_or_invalid():
    agent, _, params = make("ppo", ppo__value_clip=0.0)
    x = random_items(np.random.default_rng(1))
    gradient = jax.jit(jax.grad(lambda p, batch: agent.loss(p, None, batch, None)[0]))

    def same(a, b):
        leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
        return all(np.allclose(m, n, atol=1e-7) for m, n in leaves)

    before = gradient(params, ppo_batch(x))
    invalid = x["valid"] == 0
    other = {**x, **{k: np.where(invalid, 9, x[k]) for k in ("advantage", "target", "old_value")}}
    assert same(before, gradient(params, ppo_batch(other)))
    valid = {**x, "advantage": np.where(invalid, x["advantage"], 9).astype(np.float32)}
    assert not same(before, gradient(params, ppo_batch(valid)))
    # Ratios far beyond the clip: the policy loss has no gradient.
    far = {**x, "log_prob": np.full(ITEMS, -20, np.float32), "advantage": np.ones(ITEMS)}
    farther = {**far, "advantage": np.full(ITEMS, 7.0)}
    assert same(gradient(params, ppo_batch(far)), gradient(params, ppo_batch(farther)))


def test_ppo_normalises_advantages_that_are_far_from_zero():
    rng = np.random.default_rng(0)
    advantage = (5000 + rng.normal(size=(64, 8)) * 0.5).astype(np.float32)
    valid = np.ones_like(advantage)
    valid[:, 0] = 0
    out = np.asarray(surrogate.normalize(advantage, valid, lambda tree: tree))[:, 1:]
    assert abs(out.mean()) < 1e-2
    assert abs(out.std() - 1) < 1e-2


@pytest.mark.parametrize(
    ("clip", "normalize"),
    [(0.0, False), (0.2, False), (0.2, True), (0.0, True)],
    ids=["policy gradient", "clipped", "clipped, normalised", "normalised"],
)
def test_vtrace_is_the_actor_critic_of_the_paper(clip, normalize):
    # The first case caps the ratio of the policy gradient, the others do so as by default.
    cap = 1.0 if clip or normalize else 1.3
    changes = {
        "vtrace__clip": clip,
        "vtrace__normalize_advantages": normalize,
        "vtrace__clip_pg_rho": cap,
    }
    agent, network, params = make("vtrace", discount=0.9, **changes)
    rng = np.random.default_rng(3)
    stream = references.random_stream(rng, 12, 5, next_step=True, truncate=0.5)
    observation = rng.normal(size=(13, 5, 1)).astype(np.float32)
    first = np.asarray(stream.timestep.first)
    timestep = TimeStep(observation, stream.timestep.reward, stream.timestep.discount, first)
    action = rng.integers(0, 2, (12, 5))
    behaviour = np.log(rng.uniform(0.2, 0.9, (12, 5))).astype(np.float32)

    _, logits, values = jax.jit(network.apply)(params, (), observation, first)
    p, values = softmax(np.asarray(logits[:-1])), np.asarray(values)
    log_prob = np.log(np.take_along_axis(p, action[..., None], -1))[..., 0]
    rho = np.exp(log_prob - behaviour)
    advantage, target = references.vtrace(stream, values, rho, 0.9, 1.0, 1.0)
    valid = np.asarray(returns.valid(timestep))
    if normalize:
        advantage = (advantage - advantage[valid].mean()) / advantage[valid].std()
    assert (rho < cap).any()
    assert (rho > cap).any()
    gain = np.minimum(rho, cap) * advantage * log_prob
    if clip:
        gain = np.minimum(rho * advantage, np.clip(rho, 1 - clip, 1 + clip) * advantage)
    policy = -(valid * gain).mean()
    value = 0.5 * (valid * (values[:-1] - target) ** 2).mean()
    entropy = -(valid * (p * np.log(p)).sum(-1)).mean()
    assert 0 < valid.mean() < 1

    batch = unrolls.time_major((jax.tree.map(jnp.asarray, timestep), action, behaviour))
    loss, aux = jax.jit(agent.loss)(params, None, ((), batch), None)
    np.testing.assert_allclose(aux.metrics["policy"], policy, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(aux.metrics["value"], value, rtol=1e-3)
    np.testing.assert_allclose(aux.metrics["entropy"], entropy, rtol=1e-4)
    np.testing.assert_allclose(loss, policy + 0.7 * value - 0.03 * entropy, rtol=1e-3)


@pytest.mark.parametrize(("double", "huber"), [(True, 1.0), (False, 0.0)])
def test_dqn_bootstraps_from_the_best_legal_action(double, huber):
    config = make_config(agent="dqn", dqn__double=double, dqn__huber=huber)
    env = envs.make_environment("dummy:masked", {}, {})
    agent = AGENTS["dqn"].make(env.spec, config.settings, config.agent_config, Devices())
    network = make_q_network(env.spec, config.network, dueling=False)
    rng = np.random.default_rng(5)
    params, target = (
        jax.tree.map(
            lambda x: np.asarray(x) + rng.normal(size=x.shape).astype(np.float32),
            jax.jit(network.init)(key),
        )
        for key in jax.random.split(jax.random.key(0))
    )
    mask = rng.random((2, ITEMS, 4)) < 0.5
    mask[..., 0] |= ~mask.any(-1)
    observation = {"sign": rng.choice([-1.0, 1.0], (2, ITEMS, 1)), ACTION_MASK: mask}
    reward = rng.normal(size=ITEMS).astype(np.float32)
    discount = rng.uniform(0, 1, ITEMS).astype(np.float32)
    importance = rng.uniform(0.1, 1, ITEMS).astype(np.float32)
    valid = (rng.random(ITEMS) < 0.8).astype(np.float32)
    batch = transitions.Batch(
        jax.tree.map(jnp.asarray, observation),
        mask[0].argmax(-1),
        returns.NStep(reward, discount, np.ones(ITEMS, int), valid),
        importance,
    )
    state = TrainState((), target, (), jnp.int32(0))
    apply = jax.jit(network.apply)
    q, q_target = (
        np.asarray(apply(p, (), observation, np.zeros((2, ITEMS), bool), None)[1])
        for p in (params, target)
    )
    errors, unmasked = np.zeros(ITEMS), 0
    for i in range(ITEMS):
        legal = [a for a in range(4) if mask[1, i, a]]
        best = max(legal, key=lambda a: (q if double else q_target)[1, i, a])
        unmasked += len(legal) < 4
        value = reward[i] + discount[i] * q_target[1, i, best]
        errors[i] = valid[i] * (value - q[0, i, mask[0, i].argmax()])
    large = np.abs(errors) > (huber or np.inf)
    losses = np.where(large, huber * (np.abs(errors) - 0.5 * huber), 0.5 * errors**2)
    assert 0 < large.sum() < ITEMS or not huber
    loss, aux = jax.jit(agent.loss)(params, state, batch, None)
    np.testing.assert_allclose(loss, (importance * losses).mean(), rtol=1e-4)
    np.testing.assert_allclose(aux.priorities, np.abs(errors), rtol=1e-3, atol=1e-4)
    assert unmasked > ITEMS / 2
