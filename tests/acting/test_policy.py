"""A policy called from Python acts as the evaluation of the same weights does."""

import dataclasses

import envpool
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import envs
from podracer.acting import evaluation, unroll
from podracer.acting.policy import Policy
from podracer.agents import normalization
from podracer.envs import spaces
from podracer.errors import ConfigError
from podracer.training import builder
from tests.helpers import make_config


def make_agent(config, env):
    """The config's agent, and weights with which actions differ between observations."""
    agent = builder.make_agent(config, env.spec)
    weights = jax.jit(agent.init)(jax.random.key(config.seed))
    # A policy's last layer begins near zero and without bias: continuous actions would be tiny.
    policy = jax.tree.map(lambda x: 400 * x, weights.params["policy"])
    weights = weights.replace(params={**weights.params, "policy": policy})
    if config.normalize_observations:
        moments = weights.stats["observation"]
        batch = jax.tree.map(
            lambda x: 0.1 + 0.3 * jax.random.normal(jax.random.key(9), (64, *x.shape)), moments.mean
        )
        moments = normalization.update(moments, batch, lambda x: x)
        weights = weights.replace(stats={**weights.stats, "observation": moments})
    return agent, weights


def evaluated(env, agent, weights, config, episodes, key):
    """Observations and actions of an evaluation, ``[T, B, ...]``, and where episodes begin."""
    ids = jnp.arange(episodes)

    @jax.jit
    def step(state):
        now = state.rollout
        keys = unroll.env_keys(key, ids, 1)[0]
        _, action, _ = agent.act(weights, now.carry, now.timestep, keys, greedy=True)
        action = spaces.to_environment(action, env.spec.action)
        new = evaluation.advance(env, agent, config.evaluation, weights, key, state)
        return new, (now.timestep.observation, action, now.timestep.first)

    state, steps = jax.jit(lambda: evaluation.begin(env, agent, key, ids))(), []
    while evaluation.running(config.evaluation, state):
        state, seen = step(state)
        steps.append(jax.device_get(seen))
    return jax.tree.map(lambda *x: np.stack(x), *steps)


@pytest.mark.parametrize(
    ("changes", "recurrent"),
    [
        ({"env": "gymnax:CartPole-v1", "normalize_observations": True}, False),
        ({"env": "dummy:memory", "network__core": "gru", "agent": "vtrace"}, True),
        ({"env": "gymnax:Pendulum-v1", "network__core": "lstm"}, True),
        ({"env": "dummy:masked", "normalize_observations": True}, False),
    ],
    ids=["cartpole", "memory", "pendulum", "masked"],
)
def test_greedy_actions_are_those_of_the_evaluation(changes, recurrent):
    config = make_config(**changes, seed=2, evaluation__max_steps=20)
    env = envs.make_environment(config.env, config.env_kwargs, config.env_params)
    agent, weights = make_agent(config, env)
    seen = evaluated(env, agent, weights, config, 6, jax.random.key(1))
    observations, expected, first = seen
    policy, forgetful = Policy(agent, weights, env), Policy(agent, weights, env)
    actions, without_memory = [], []
    for i in range(first.shape[1]):
        for t in range(first.shape[0]):
            if first[t, i]:
                policy.reset()
            observation = jax.tree.map(lambda x, place=(t, i): x[place], observations)
            actions.append(policy(observation))
            forgetful.reset()
            without_memory.append(forgetful(observation))
    expected = np.swapaxes(expected, 0, 1).reshape(-1, *expected.shape[2:])
    np.testing.assert_allclose(actions, expected, atol=1e-5)
    assert np.allclose(without_memory, expected, atol=1e-3) != recurrent
    assert len(np.unique(expected)) > 1
    if isinstance(actions[0], np.ndarray):
        # Pendulum's own units: torques from -2 to 2.
        assert np.abs(expected).max() > 1
        assert actions[0].dtype == np.float32
    else:
        assert type(actions[0]) is int


def test_sampled_actions_follow_the_seed():
    config = make_config(env="dummy:one")
    env = envs.make_environment(config.env, config.env_kwargs, config.env_params)
    agent = builder.make_agent(config, env.spec)
    weights = jax.jit(agent.init)(jax.random.key(0))

    def play(seed):
        policy = Policy(agent, weights, env, greedy=False, seed=seed)
        return [policy([0.0]) for _ in range(40)]

    assert play(1) == play(1) != play(2)
    # Untrained, both actions are about equally probable.
    assert 8 < sum(play(1)) < 32
    # A new episode does not repeat the actions of the last one.
    policy = Policy(agent, weights, env, greedy=False)
    before = [policy([0.0]) for _ in range(40)]
    policy.reset()
    assert [policy([0.0]) for _ in range(40)] != before


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("CartPole-v1", {}),
        # Observed as integers, which agents see one-hot.
        ("Taxi-v3", {"network__core": "gru"}),
        # Observed as [frames, height, width], of which a run sends the newest alone.
        (
            "Pong-v5",
            {
                "network__torso": "pixels",
                "env_kwargs": {"img_height": 12, "img_width": 10},
                "sebulba__newest_frame": True,
            },
        ),
    ],
)
def test_observations_are_taken_as_envpool_returns_them(name, changes):
    config = make_config(env=f"envpool:{name}", **changes)
    env = envs.make_host_environment(
        config.env, config.env_kwargs, {}, newest_frame=config.sebulba.newest_frame
    )
    agent, weights = make_agent(config, env)
    policy = Policy(agent, weights, env)
    pool = envpool.make(name, env_type="gymnasium", num_envs=1, env_seed=[3], **config.env_kwargs)
    ours = env.make_pool([3], 1)
    arrival = ours.reset().timestep
    observation, _ = pool.reset()
    seen = np.zeros((1, *env.spec.observation.shape), env.spec.observation.dtype)
    carry = agent.carry(np.zeros(1, np.int32))
    act = jax.jit(lambda carry, timestep: agent.act(
        weights, carry, timestep, jax.random.split(jax.random.key(0), 1), greedy=True
    ))  # fmt: skip
    for _ in range(8):
        seen = env.decode_observation(arrival.observation, seen)
        carry, expected, _ = act(carry, arrival.replace(observation=seen))
        action = policy(observation[0])
        assert action == int(expected[0])
        arrival = ours.step(np.array([action])).timestep
        observation, *_ = pool.step(np.array([action]))
    ours.close()
    pool.close()


def test_integer_observations_are_taken_as_gymnax_returns_them():
    config = make_config(env="gymnax:FrozenLake-misc")
    env = envs.make_environment(config.env, {}, {})
    agent, weights = make_agent(config, env)
    theirs, params = gymnax.make("FrozenLake-misc")
    observation, _ = theirs.reset(jax.random.key(0), params)
    assert np.ndim(observation) == 0
    assert Policy(agent, weights, env)(observation) in range(4)


@pytest.mark.parametrize("agent", ["ppo", "dqn"])
def test_a_policy_takes_no_illegal_action(agent):
    config = make_config(env="dummy:masked", agent=agent, dqn__evaluation_epsilon=1.0)
    env = envs.make_environment(config.env, {}, {})
    made = builder.make_agent(config, env.spec)
    weights = jax.jit(made.init)(jax.random.key(0))
    rng, taken = np.random.default_rng(0), set()
    for greedy in (True, False):
        policy = Policy(made, weights, env, greedy=greedy)
        for _ in range(60):
            mask = rng.random(4) < 0.4
            mask[rng.integers(4)] = True
            action = policy({"sign": [1.0], "action_mask": mask})
            assert mask[action]
            taken.add(action)
    assert taken == {0, 1, 2, 3}
    with pytest.raises(
        ValueError, match=r"becomes \{'sign': 'float32\[1\]'\} for the agent, which"
    ):
        policy({"sign": np.zeros(1, np.float32)})
    with pytest.raises(ValueError, match=r"an observation float32\[1\] becomes float32\[1\] for"):
        policy(np.zeros(1, np.float32))


def test_a_dictionary_that_lacks_a_value_is_rejected():
    name, params = "gymnasium:tests.envs.dictionaries:Dictionary-v0", {"channels": "first"}
    env = envs.make_host_environment(name, {}, params)
    made = builder.make_agent(make_config(network__torso="minatar"), env.spec)
    policy = Policy(made, jax.jit(made.init)(jax.random.key(0)), env)
    with pytest.raises(ConfigError, match=r"an observation \{.*\} is not one of this"):
        policy({"image": np.zeros((3, 6, 5), np.uint8)})


def test_weights_and_observations_of_other_shapes_are_rejected():
    config = make_config(env="gymnax:CartPole-v1")
    env = envs.make_environment(config.env, {}, {})
    agent, weights = make_agent(config, env)
    policy = Policy(agent, weights, env)
    with pytest.raises(ValueError, match=r"float32\[3\] for the agent, which expects float32\[4\]"):
        policy(np.zeros(3))
    several = jax.tree.map(lambda x: jnp.stack([x, x]), weights)
    with pytest.raises(ValueError, match="num_seeds > 1, pass one agent's"):
        Policy(agent, several, env)
    other = dataclasses.replace(config, network=dataclasses.replace(config.network, shared=True))
    with pytest.raises(ValueError, match="structure differs"):
        Policy(agent, builder.make_agent(other, env.spec).init(jax.random.key(0)), env)
