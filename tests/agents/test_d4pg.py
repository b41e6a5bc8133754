"""D4PG against its formulas in plain numpy, its two groups of parameters, its noise, its errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer.agents import d4pg, transitions
from podracer.errors import ConfigError
from podracer.learning.ring import Window
from podracer.nets.policy_critic import make_policy_critic
from podracer.types import Box, Devices, Discrete, Spec, TrainState
from tests import references
from tests.helpers import make_config, make_run

N_STEP, ATOMS, V_MIN, V_MAX, GAMMA = 3, 7, -2.0, 1.5, 0.9
BOX = Box((2,), -np.ones(2, np.float32), np.full(2, 3.0, np.float32))
VECTOR = Spec(jax.ShapeDtypeStruct((1,), jnp.float32), BOX)
IMAGE = Spec(jax.ShapeDtypeStruct((8, 8, 1), jnp.uint8), BOX)
SMALL = {"policy_hidden": (8, 8), "critic_hidden": (8,)}


def make(spec=VECTOR, seed=0, **changes):
    """The agent, its network, its weights, and its settings."""
    defaults = {
        "n_step": N_STEP,
        "atoms": ATOMS,
        "v_min": V_MIN,
        "v_max": V_MAX,
        **SMALL,
    }
    settings = {f"d4pg__{key}": value for key, value in defaults.items()}
    config = make_config(agent="d4pg", discount=GAMMA, **{**settings, **changes})
    agent = d4pg.make(spec, config.settings, config.agent_config, Devices())
    critics = config.agent_config.critics
    network = make_policy_critic(spec, config.network, critics=critics, atoms=ATOMS, **SMALL)
    return agent, network, jax.jit(agent.init)(jax.random.key(seed)), config.settings


def spread(params, scale=30.0):
    """The same parameters with larger last layers, so that outputs differ clearly."""
    params = jax.tree.map(lambda x: x, params)
    for head in (params["policy"], *params["critic"]):
        head["last"]["kernel"] *= scale
    return params


def windows(stream, action, importance):
    """An item from each step ``[T, B]`` of a stream on."""
    time, batch = stream.timestep.first.shape
    count = time - N_STEP
    t = np.repeat(np.arange(count), batch) + np.arange(N_STEP + 1)[:, None]
    b = np.tile(np.arange(batch), count)
    read = jax.tree.map(lambda x: jnp.asarray(x)[t, b], stream.timestep)

    def observe(offsets):
        return read.observation[offsets, np.arange(len(b))]

    return Window(read.replace(observation=()), action[t, b], (), (), importance, observe)


def project(reward, factor, probabilities):
    """Algorithm 1 of https://arxiv.org/abs/1707.06887, atom by atom."""
    width = (V_MAX - V_MIN) / (ATOMS - 1)
    out = np.zeros(ATOMS)
    for j in range(ATOMS):
        value = min(max(reward + factor * (V_MIN + j * width), V_MIN), V_MAX)
        place = min(max((value - V_MIN) / width, 0), ATOMS - 1)
        low = int(np.floor(place))
        out[low] += probabilities[j] * (1 - (place - low))
        if place > low:
            out[low + 1] += probabilities[j] * (place - low)
    return out


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize(("critics", "next_step"), [(1, False), (1, True), (2, True)])
def test_the_loss_is_the_paper_s_at_ends_of_all_kinds(critics, next_step):
    agent, network, weights, settings = make(d4pg__critics=critics)
    rng = np.random.default_rng(0)
    stream = references.random_stream(rng, 14, 6, next_step=next_step, truncate=0.5)
    observation = rng.normal(size=stream.timestep.observation.shape).astype(np.float32)
    stream = stream._replace(timestep=stream.timestep.replace(observation=observation))
    params = spread(weights.params)
    target = spread(make(seed=1, d4pg__critics=critics)[2].params)
    train_state = TrainState(weights, target, (), jnp.int32(0))
    action = jnp.asarray(rng.uniform(-1, 1, (15, 6, 2)), jnp.float32)
    importance = rng.uniform(0.5, 1, (15 - N_STEP) * 6).astype(np.float32)
    importance[::7] = 0  # Draws that found no item.
    window = windows(stream, action, importance)
    item = transitions.make_item(settings, Devices(), N_STEP)
    read = item.read(train_state, window)
    loss, aux = jax.jit(agent.loss)(params, train_state, read, None)

    @jax.jit
    def logits(params, action=None):
        features = network.features(params, jnp.asarray(observation))
        action = network.policy(params, features) if action is None else action
        return network.critic(params, features, action)

    # Probabilities ``[critics, T, B, atoms]`` of all observations and actions.
    later, best, now = (
        softmax(np.asarray(x, np.float64))
        for x in (logits(target), logits(params), logits(params, action))
    )
    # The return is linear in the value to bootstrap from: this yields its factor and its place.
    zeros, index = np.zeros(observation.shape[:2]), np.arange(15.0)[:, None] + np.zeros((1, 6))
    reward, valid = references.n_step(stream, zeros, N_STEP, GAMMA)
    factor = references.n_step(stream, zeros + 1, N_STEP, GAMMA)[0] - reward
    place = references.n_step(stream, index, N_STEP, GAMMA)[0] - reward
    atoms = np.linspace(V_MIN, V_MAX, ATOMS)
    critic = policy = 0.0
    errors = []
    for i, (t, b) in enumerate(np.ndindex(15 - N_STEP, 6)):
        q = (best[0, t, b] * atoms).sum()
        learned = valid[t, b] * (importance[i] > 0)
        policy -= learned * q
        bootstrap = round(place[t, b] / factor[t, b]) if factor[t, b] > 0 else 0
        least = min(later[:, bootstrap, b], key=lambda x: (x * atoms).sum())
        expected = project(reward[t, b], factor[t, b], least)
        errors.append(-learned * sum((expected * np.log(x)).sum() for x in now[:, t, b]))
        critic += importance[i] * errors[-1]
    assert 0 < valid.mean() < 1
    assert (factor[valid > 0] == 0).any()
    assert len(np.unique(np.round(factor, 4))) > 3
    np.testing.assert_allclose(aux.metrics["critic"], critic / len(errors), rtol=1e-4)
    np.testing.assert_allclose(aux.metrics["policy"], policy / len(errors), rtol=1e-4)
    np.testing.assert_allclose(loss, (critic + policy) / len(errors), rtol=1e-4)
    np.testing.assert_allclose(aux.priorities, np.array(errors), rtol=1e-4)


def random_batch(rng, spec):
    def noise(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    observation = rng.integers(0, 255, (2, 5, *spec.observation.shape)).astype(np.uint8)
    target = transitions.returns.NStep(noise(5), jnp.full(5, 0.7), jnp.ones(5), jnp.ones(5))
    return transitions.Batch(jnp.asarray(observation), noise(5, 2), target, jnp.ones(5))


def test_each_group_learns_from_its_own_loss_only():
    agent, _, weights, _ = make(IMAGE, network__torso="minatar", d4pg__critics=2)
    params = spread(weights.params)
    train_state = TrainState(weights, params, (), jnp.int32(0))
    batch = random_batch(np.random.default_rng(0), IMAGE)

    @jax.jit
    @jax.jacrev
    def gradients(params):
        total, aux = agent.loss(params, train_state, batch, None)
        return total, aux.metrics["critic"], aux.metrics["policy"]

    total, critic, policy = gradients(params)
    labels = agent.labels(params)
    assert {name: set(jax.tree.leaves(x)) for name, x in labels.items()} == {
        "torso": {"critic"}, "critic": {"critic"}, "policy": {"policy"}
    }  # fmt: skip
    assert dict(agent.rates).keys() == {"critic", "policy"}
    for label, t, c, p in zip(*map(jax.tree.leaves, (labels, total, critic, policy)), strict=True):
        own, other = (c, p) if label == "critic" else (p, c)
        np.testing.assert_allclose(t, own, atol=1e-7)
        assert np.abs(own).max() > 0
        assert np.abs(other).max() == 0


def test_noise_belongs_to_environments_and_actions_stay_in_the_box():
    agent, _, weights, _ = make(d4pg__noise=0.5)
    observation = jnp.zeros((400, 1))
    keys = jax.random.split(jax.random.key(0), 400)

    def act(part, greedy=False):
        timestep = references.TimeStep(observation[part], (), (), ())
        carry = agent.carry(jnp.arange(400)[part])
        return np.asarray(agent.act(weights, carry, timestep, keys[part], greedy=greedy)[1])

    everywhere, greedy = act(slice(None)), act(slice(None), greedy=True)
    np.testing.assert_array_equal(everywhere[100:200], act(slice(100, 200)))
    assert len(np.unique(everywhere[:, 0])) > 350
    assert np.abs(everywhere).max() == 1
    noise = (everywhere - greedy)[np.abs(everywhere) < 1]
    # Normal with a deviation of 0.5, cut at 2 deviations.
    assert noise.std() == pytest.approx(0.44, abs=0.03)
    assert len(np.unique(greedy, axis=0)) == 1


def test_target_networks_move_by_a_rate_or_are_copied():
    for rate, after_one, after_two in ((1.0, 4.0, 4.0), (0.25, 1.0, 1.75)):
        agent, *_ = make(d4pg__target_rate=rate, d4pg__target_period=3)
        target = {"x": jnp.zeros(())}
        seen = []
        for step in range(1, 7):
            target = agent.target.update(target, {"x": jnp.float32(4)}, {}, step)
            seen.append(float(target["x"]))
        assert seen == [0, 0, after_one, after_one, after_one, after_two]


@pytest.mark.parametrize("spec", [VECTOR, IMAGE])
def test_outputs_are_float32_whatever_layers_compute_in(spec):
    torso = "mlp" if spec is VECTOR else "minatar"
    _, network, weights, _ = make(spec, network__torso=torso, network__dtype="bfloat16")
    params = weights.params
    features = network.features(params, jnp.zeros((1, 4, *spec.observation.shape)))
    action = network.policy(params, features)
    assert (action.shape, action.dtype) == ((1, 4, 2), jnp.float32)
    logits = network.critic(params, features, action)
    assert (logits.shape, logits.dtype) == ((1, 1, 4, ATOMS), jnp.float32)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}


@pytest.mark.slow
def test_devices_do_not_change_the_update():
    config = make_config(
        agent="d4pg",
        env="gymnax:Pendulum-v1",
        normalize_observations=True,
        normalize_rewards=True,
        updates_per_call=20,
        replay__begin=64,
        replay__batch=32,
        replay__gradient_steps=2,
        replay__priority_exponent=0.6,
        d4pg__policy_hidden=(16,),
        d4pg__critic_hidden=(16,),
        d4pg__target_period=3,
    )
    runs = []
    for devices in (1, 2, 8):
        _, _, state, step = make_run(config, devices)
        runs.append(jax.device_get(step(state)))
    (one, metrics), *others = runs
    assert metrics.learner.losses["critic"][-1] > 0
    for other, other_metrics in others:
        for a, b in ((one.train, other.train), (one.rollout.timestep, other.rollout.timestep)):
            jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 1e-4, 1e-3), a, b)
        q, other_q = (x.learner.losses["policy"] for x in (metrics, other_metrics))
        np.testing.assert_allclose(other_q, q, atol=1e-3)


@pytest.mark.slow
def test_actions_are_learned_from_pixels():
    """The best action is the place of a bright column; one action for all earns 0.57 at most."""
    config = make_config(
        agent="d4pg",
        env="dummy:stripe",
        env_kwargs={"continuous": True},
        network__torso="minatar",
        network__activation="relu",
        num_envs=64,
        updates_per_call=250,
        learning_rate=1e-3,
        anneal=False,
        evaluation__episodes=64,
        replay__batch=64,
        replay__gradient_steps=2,
        d4pg__n_step=1,
        d4pg__v_min=-4.0,
        d4pg__v_max=2.0,
        d4pg__policy_hidden=(32,),
        d4pg__critic_hidden=(32,),
    )
    program, _, state, step = make_run(config)
    assert float(program.evaluate(state).ret.mean()) < 0.6
    for _ in range(2):
        state, _ = step(state)
    assert float(program.evaluate(state).ret.mean()) > 0.95


UNBOUNDED = Box((3,), np.array([-1, -np.inf, -1]), np.array([1, 1, np.inf]))


@pytest.mark.parametrize(
    ("action", "changes", "message"),
    [
        (Discrete(4), {}, "4 discrete actions; use agent='dqn' or agent='ppo'"),
        (UNBOUNDED, {}, "2 of its 3 dimensions have no lower or no upper bound"),
        (BOX, {"network__core": "lstm"}, "network.core='lstm' needs sequences"),
        (BOX, {"d4pg__v_min": 1.5}, "v_min less than d4pg.v_max, got 7, 1.5 and 1.5"),
        (BOX, {"d4pg__atoms": 1}, "d4pg.atoms must be at least 2"),
        (BOX, {"d4pg__n_step": 0}, "d4pg.n_step must be positive, got 0"),
        (BOX, {"d4pg__noise": -0.1}, "d4pg.noise must not be negative, got -0.1"),
        (BOX, {"d4pg__target_rate": 0.0}, r"d4pg.target_rate must be in \(0, 1\], got 0.0"),
        (BOX, {"d4pg__policy_hidden": ()}, r"d4pg.policy_hidden must be one or more .* got \(\)"),
        (BOX, {"replay__capacity": 1000, "replay__begin": 1, "num_envs": 500}, "of 3 steps needs"),
    ],
)
def test_what_can_t_be(action, changes, message):
    with pytest.raises(ConfigError, match=message):
        make(VECTOR._replace(action=action), **changes)
