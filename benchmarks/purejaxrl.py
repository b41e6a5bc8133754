"""PureJaxRL's PPO, as its own code trains it, in an environment of gymnax 1.0.

    python benchmarks/purejaxrl.py PATH --env=Asterix-MinAtar --seeds=5

PATH is a clone of https://github.com/luchris429/purejaxrl, whose ``purejaxrl/ppo.py`` is run at its
settings for the environment, MinAtar or CartPole, one seed after the other. For each seed a line is
printed and appended to docs/results_peers.jsonl, from which docs/results.md takes it. The programs
of other projects are run by peers.py.
"""

import argparse
import importlib
import json
import os
import pathlib
import sys
import time
import types
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import results_lines

from podracer.envs.gymnax import import_gymnax
from podracer.storage.versions import versions

# For MinAtar, by its notebook examples/brax_minatar.ipynb.
SETTINGS = {
    "LR": 5e-3,
    "NUM_ENVS": 64,
    "NUM_STEPS": 128,
    "UPDATE_EPOCHS": 4,
    "NUM_MINIBATCHES": 8,
    "GAMMA": 0.99,
    "GAE_LAMBDA": 0.95,
    "CLIP_EPS": 0.2,
    "ENT_COEF": 0.01,
    "VF_COEF": 0.5,
    "MAX_GRAD_NORM": 0.5,
    "ACTIVATION": "relu",
    "ANNEAL_LR": True,
}
# What differs in the file itself, which trains CartPole.
CARTPOLE = {"LR": 2.5e-4, "NUM_ENVS": 4, "NUM_MINIBATCHES": 4, "ACTIVATION": "tanh"}


class FiveValues:
    """An environment of gymnax 1.0 with the interface of before, which PureJaxRL expects."""

    def __init__(self, env: Any):
        self._env = env
        self.action_space, self.observation_space = env.action_space, env.observation_space
        self.reset = env.reset

    def step(self, key: jax.Array, state: Any, action: jax.Array, params: Any):
        observation, state, reward, terminated, truncated, _ = self._env.step(
            key, state, action, params
        )
        return observation, state, reward, terminated | truncated, {}


def gymnax_make(name: str) -> tuple[FiveValues, Any]:
    """What PureJaxRL takes for ``gymnax.make``."""
    env, params = import_gymnax().make(name)
    return FiveValues(env), params


def load(path: pathlib.Path, make: Callable[[str], Any]) -> Any:
    """PureJaxRL's module ``ppo``, with a ``gymnax.make`` of ours.

    What only its other algorithms need is left out.
    """
    names = ("brax", "brax.envs", "brax.envs.wrappers", "brax.envs.wrappers.training", "navix")
    unused = {name: mock.MagicMock() for name in names}
    folder = str(path / "purejaxrl")
    # Before: what is first imported under the patch is forgotten after it.
    import_gymnax()
    with mock.patch.dict(sys.modules, unused), mock.patch("sys.path", [folder, *sys.path]):
        module: Any = importlib.import_module("ppo")
    module.gymnax = types.SimpleNamespace(make=make)
    return module


def train(module: Any, env: str, steps: int, seed: int) -> results_lines.Line:
    """Trains with a seed.

    The return is that of the last episode of each environment, in training: it has no evaluation.
    """
    changes = CARTPOLE if env == "CartPole-v1" else {}
    config: dict[str, Any] = {**SETTINGS, **changes, "ENV_NAME": env, "TOTAL_TIMESTEPS": steps}
    # ``make_train`` adds numbers to the config that it is given.
    run, start = module.make_train({**config}), time.perf_counter()

    def mean_returns(key: jax.Array) -> jax.Array:
        return jnp.mean(run(key)["metrics"]["returned_episode_returns"], (1, 2))

    compiled = jax.jit(mean_returns).lower(jax.random.key(seed)).compile()
    begin = time.perf_counter()
    returns = np.asarray(compiled(jax.random.key(seed)))
    end = time.perf_counter()
    done = np.arange(1, len(returns) + 1) / len(returns)
    return results_lines.Line(
        task=f"purejaxrl-{env}",
        seed=seed,
        command=f"python benchmarks/purejaxrl.py PATH --env={env} --total_steps={steps}",
        config=config,
        versions=versions(),
        hardware=results_lines.hardware(len(os.sched_getaffinity(0))),
        steps=steps,
        seconds=round(end - start, 1),
        steps_per_second=round(steps / (end - begin)),
        episode_return=float(returns[-1]),
        episodes=int(config["NUM_ENVS"]),
        # It tells no times of updates, which are taken as equally long.
        curve=results_lines.thin(
            {"step": (done * steps).astype(int), "wall_time": done * (end - start)}, returns
        ),
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark; ``argv`` excludes the program's name."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=pathlib.Path, help="folder of a clone of PureJaxRL")
    parser.add_argument("--env", required=True, help="gymnax's id, such as Asterix-MinAtar")
    parser.add_argument("--total_steps", type=int, default=10_000_000)
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds, from 0")
    args = parser.parse_args(argv)
    module = load(args.path, gymnax_make)
    done = {(line.task, line.seed) for line in results_lines.read_lines(results_lines.PEERS)}
    for seed in range(args.seeds):
        if (f"purejaxrl-{args.env}", seed) not in done:
            line = train(module, args.env, args.total_steps, seed)
            results_lines.append(line, results_lines.PEERS)
            print(json.dumps({**line._asdict(), "curve": None}), flush=True)


if __name__ == "__main__":
    main()
