"""Updates of PPO, beside those of PureJaxRL's own code, from the same weights and experience.

    python benchmarks/conformance.py PATH

PATH is a clone of https://github.com/luchris429/purejaxrl, whose ``purejaxrl/ppo.py`` is run. It
collects the experience of two updates of four epochs, and learns from it; podracer's learner then
starts from the same weights and learns from the same experience. Printed are the largest change of
a weight, and the largest difference between the two results.
"""

import argparse
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gymnax.environments import spaces
from purejaxrl import SETTINGS, load

from podracer import config as config_lib
from podracer import envs
from podracer.agents import ppo
from podracer.learning.learner import make_update
from podracer.learning.optimizer import make_optimizer, make_schedule
from podracer.nets import actor_critic as nets
from podracer.types import ArrayTree, Devices, Discrete, TimeStep, TrainState, Trajectory

ENV = "gymnax:CartPole-v1"
ENVS, LENGTH, UPDATES, EPOCHS = 8, 128, 2, 4


class Recorded:
    """The environment, with the interface that PureJaxRL expects, and everything that it returns
    in ``info``, where PureJaxRL keeps it."""

    def __init__(self):
        self._env = envs.make_environment(ENV, {}, {})

    def action_space(self, params: None) -> spaces.Discrete:
        action = self._env.spec.action
        assert isinstance(action, Discrete)
        return spaces.Discrete(action.num_actions)

    def observation_space(self, params: None) -> spaces.Box:
        return spaces.Box(-np.inf, np.inf, self._env.spec.observation.shape)

    def reset(self, key: jax.Array, params: None) -> tuple[jax.Array, ArrayTree]:
        state, timestep = self._env.reset(key)
        return timestep.observation, (state, timestep)

    def step(self, key: jax.Array, state: ArrayTree, action: jax.Array, params: None):
        before, (state, timestep) = state[1], self._env.step(key, state[0], action)
        # It takes every end for a termination: there must be no other.
        info = {"before": before, "after": timestep, "action": action}
        done = timestep.first
        return timestep.observation, (state, timestep), timestep.reward, done, info


def peer_run(module: Any, updates: int) -> dict[str, Any]:
    """What PureJaxRL's training returns after this many updates."""
    config = {
        **SETTINGS,
        "ENV_NAME": ENV,
        "LR": 2.5e-4,
        "NUM_ENVS": ENVS,
        "NUM_STEPS": LENGTH,
        "TOTAL_TIMESTEPS": updates * ENVS * LENGTH,
        "UPDATE_EPOCHS": EPOCHS,
        # A single one, so that the order of the transitions does not matter.
        "NUM_MINIBATCHES": 1,
        "ACTIVATION": "tanh",
    }
    return jax.jit(module.make_train(config))(jax.random.key(0))


def our_config() -> config_lib.Config:
    """podracer's defaults are PureJaxRL's settings but for these."""
    config: Any = config_lib.default_config()
    config.num_envs, config.unroll_length = ENVS, LENGTH
    config.total_steps = UPDATES * ENVS * LENGTH
    config.num_epochs, config.num_minibatches = EPOCHS, 1
    config.ppo.advantage_normalization = "minibatch"
    return config_lib.parse(config)


def our_params(peer: ArrayTree) -> ArrayTree:
    """PureJaxRL's parameters in podracer's order."""
    layers = [peer["params"][f"Dense_{i}"] for i in range(6)]
    return {
        "actor": {"torso": {"layers": {0: layers[0], 1: layers[1]}}},
        "critic": {"torso": {"layers": {0: layers[3], 1: layers[4]}}},
        "policy": {"logits": layers[2]},
        "value": {"value": layers[5]},
    }


def trajectories(info: dict[str, Any]) -> list[tuple[TimeStep, jax.Array]]:
    """Time steps ``[T+1, B]`` and actions ``[T, B]`` of each update."""
    steps = jax.tree.map(
        lambda before, after: jnp.concatenate([before[:, :1], after], axis=1),
        info["before"],
        info["after"],
    )
    return [
        (jax.tree.map(lambda x, i=i: x[i], steps), info["action"][i])
        for i in range(info["action"].shape[0])
    ]


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Prints and returns the comparison; ``argv`` excludes the program's name."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=pathlib.Path, help="folder of a clone of PureJaxRL")
    module = load(parser.parse_args(argv).path, lambda name: (Recorded(), None))
    first, last = peer_run(module, 0), peer_run(module, UPDATES)
    start, theirs = (our_params(run["runner_state"][0].params) for run in (first, last))

    config = our_config()
    env = envs.make_environment(ENV, {}, {})
    network = nets.make_network(env.spec, config.network)
    agent = ppo.make(env.spec, config.settings, config.ppo, Devices())
    optimizer = make_optimizer(config.optimization, agent)
    schedule = make_schedule(config.optimization, UPDATES, ENVS * LENGTH)
    update = jax.jit(make_update(agent, optimizer, schedule=schedule, devices=Devices()))
    key, carry = jax.random.key(0), agent.carry(jnp.arange(ENVS))
    weights = agent.init(key).replace(params=start)
    train = TrainState(weights, (), optimizer.init(start), jnp.int32(0))
    for timestep, action in trajectories(last["metrics"]):
        assert (timestep.first[1:] == (timestep.discount[1:] == 0)).all(), "a truncated episode"
        now = (timestep.observation[:-1], timestep.first[:-1])
        _, policy, _ = network.apply(train.weights.params, (), *now)
        log_prob = network.distribution(policy).log_prob(action)
        numbers = jnp.arange(action.shape[1])
        trajectory = Trajectory(timestep, action, {"log_prob": log_prob}, carry, numbers)
        train, _, _ = update(train, (), trajectory, key)
    ours = train.weights.params

    def largest(a: ArrayTree, b: ArrayTree) -> float:
        return max(jax.tree.leaves(jax.tree.map(lambda x, y: float(jnp.abs(x - y).max()), a, b)))

    result = {"change": largest(ours, start), "difference": largest(ours, theirs)}
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
