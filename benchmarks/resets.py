"""Measures whether episodes should begin with states that are computed once in each unroll.

    python benchmarks/resets.py --env=brax:ant --num_envs=64 --unroll_length=128

Prints two JSON lines: environment steps per second with random actions, with the first state of the
next episode computed once in each unroll (``cached``) or in every step. No agent learns.
"""

import argparse
import importlib
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import jax
from common import versions

from podracer import envs
from podracer.acting.unroll import random_actions
from podracer.envs.autoreset import autoreset

# The modules in which adapters call ``autoreset``, where not in the suite's own.
MODULES = {"craftax": "gymnax", "playground": "brax"}


def make(env_id: str, *, cached: bool) -> Any:
    """The environment with starts that are cached or not, whatever its adapter has chosen."""
    suite = env_id.partition(":")[0]
    module = importlib.import_module(f"podracer.envs.{MODULES.get(suite, suite)}")

    def chosen(episodes: Any, spec: Any, **_: Any) -> Any:
        return autoreset(episodes, spec, cached=cached)

    with mock.patch.object(module, "autoreset", chosen):
        return envs.make_environment(env_id, {}, {})


def make_unroll(env: Any, num_envs: int, length: int) -> Callable[[Any, Any], Any]:
    """``(key, (state, timestep)) -> (state, timestep)`` after an unroll with random actions."""

    def step(carry: Any, key: Any) -> tuple[Any, None]:
        state, timestep = carry
        act, advance = jax.random.split(key, (2, num_envs))
        action = random_actions(env.spec, timestep.observation, act)
        return jax.vmap(env.step)(advance, state, action), None

    def unroll(key: Any, carry: Any) -> Any:
        state, timestep = carry
        refresh_key, key = jax.random.split(key)
        if env.refresh is not None:
            state = jax.vmap(env.refresh)(jax.random.split(refresh_key, num_envs), state)
        return jax.lax.scan(step, (state, timestep), jax.random.split(key, length))[0]

    return jax.jit(unroll)


def measure(env_id: str, num_envs: int, length: int, rounds: int) -> list[dict[str, Any]]:
    """Times both variants in turn; see ``main`` for the arguments."""
    runs = {}
    for cached in (True, False):
        env = make(env_id, cached=cached)
        start = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(0), num_envs))
        runs[cached] = partial(make_unroll(env, num_envs, length), jax.random.key(1)), start
    times: dict[bool, list[float]] = {True: [], False: []}
    # The first round compiles, and is not counted.
    for i in range(rounds + 1):
        for cached, (unroll, start) in runs.items():
            before = time.perf_counter()
            jax.block_until_ready(unroll(start))
            if i:
                times[cached].append(time.perf_counter() - before)
    return [
        {
            "env": env_id,
            "num_envs": num_envs,
            "unroll_length": length,
            "cached": cached,
            "steps_per_second": round(num_envs * length / statistics.median(seconds)),
            "steps_per_second_all": [round(num_envs * length / x) for x in seconds],
            "device": jax.devices()[0].device_kind,
            "versions": versions("podracer", "jax"),
        }
        for cached, seconds in times.items()
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark; ``argv`` excludes the program's name."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--env", default="brax:ant", help="environment to measure")
    parser.add_argument("--num_envs", type=int, default=64, help="environments stepped together")
    parser.add_argument("--unroll_length", type=int, default=128, help="steps of an unroll")
    parser.add_argument("--rounds", type=int, default=3, help="timed unrolls of each variant")
    args = parser.parse_args(argv)
    for result in measure(args.env, args.num_envs, args.unroll_length, args.rounds):
        print(json.dumps(result))


if __name__ == "__main__":
    main()
