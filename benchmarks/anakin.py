"""Steps a second of Anakin, learning included, and of its environment alone, as one JSON line.

    python benchmarks/anakin.py --env=gymnax:CartPole-v1 --num_envs=64 --unroll_length=128

Without ``--config`` this is PPO with separate policy and value networks of 2 x 64 tanh units,
4 epochs of 4 minibatches and clip 0.2: what is usually measured.
"""

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from common import override, read_config, versions
from jax import Array

from podracer import config as config_lib
from podracer import mesh as mesh_lib
from podracer import prng, rollout
from podracer.anakin.train import compile_program, prepare
from podracer.config import Sizes
from podracer.types import Environment


def random_steps(
    env: Environment, mesh: jax.sharding.Mesh, sizes: Sizes
) -> Callable[[Array, Array], Array]:
    """``(key, repeats) -> something of every step``: random actions, no agent and no learning."""

    def unroll(key: Array, ids: Array, state: Any) -> tuple[Any, Array]:
        keys = rollout.env_keys(key, ids, 2 * sizes.unroll_length)

        def step(state: Any, keys: Array) -> tuple[Any, Array]:
            action = rollout.random_actions(env.spec, keys[0])
            state, timestep = jax.vmap(env.step)(keys[1], state, action)
            # Of every part of a time step, or the compiler would leave it out.
            return state, jnp.stack(
                [x.astype(jnp.float32).sum() for x in jax.tree.leaves(timestep)]
            )

        return jax.lax.scan(step, state, keys.reshape(sizes.unroll_length, 2, -1))

    def local(key: Array, repeats: Array) -> Array:
        ids = mesh_lib.device_index() * sizes.envs_per_device + jnp.arange(sizes.envs_per_device)
        state, _ = jax.vmap(env.reset)(rollout.env_keys(key, ids, 1)[0])

        def body(i: Array, carry: tuple[Any, Array]) -> tuple[Any, Array]:
            state, sums = unroll(jax.random.fold_in(key, i), ids, carry[0])
            return state, carry[1] + sums.sum()

        _, total = jax.lax.fori_loop(0, repeats, body, (state, jnp.float32(0)))
        return mesh_lib.all_mean(total)

    replicated = mesh_lib.REPLICATED
    return jax.jit(mesh_lib.per_device(local, mesh, (replicated, replicated), replicated))


def seconds(function: Callable[[], Any]) -> float:
    """What one call takes until its result is there."""
    start = time.perf_counter()
    jax.block_until_ready(function())
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", help="a config file; sizes below replace those in it")
    parser.add_argument("--env")
    parser.add_argument("--agent")
    parser.add_argument("--num_envs", type=int)
    parser.add_argument("--unroll_length", type=int)
    parser.add_argument("--cpu_devices", type=int)
    parser.add_argument("--updates_per_call", type=int, default=16)
    parser.add_argument("--calls", type=int, default=7, help="timed calls, of about a second each")
    args = parser.parse_args()
    if args.calls < 5:
        parser.error("--calls must be at least 5, for a median")

    changed = read_config(args.config)
    override(changed, args, "env", "num_envs", "unroll_length", "cpu_devices", "agent")
    changed.updates_per_call = args.updates_per_call
    config = config_lib.parse(changed)
    program, sizes = prepare(config)
    start = time.perf_counter()
    compiled = compile_program(program, config)
    jax.block_until_ready(compiled.state)
    compile_seconds = time.perf_counter() - start

    state = compiled.state
    ceiling = random_steps(program.env, program.mesh, sizes)
    key = prng.key(config.seed)

    def learn(updates: int) -> Any:
        nonlocal state
        metrics = None
        for _ in range(updates):
            state, metrics = compiled.step(state)
        return metrics

    def act(updates: int) -> Any:
        return ceiling(key, jnp.int32(updates))

    per_call = {
        "learn": sizes.updates_per_call * sizes.steps_per_update,
        "act": sizes.steps_per_update,
    }
    rates: dict[str, list[float]] = {"learn": [], "act": []}
    counts = {}
    for name, function in (("learn", learn), ("act", act)):
        function(1)
        once = min(seconds(lambda f=function: f(2)) / 2 for _ in range(3))
        counts[name] = max(1, round(1.0 / once))
    for _ in range(args.calls):
        for name, function in (("learn", learn), ("act", act)):
            taken = seconds(lambda f=function, n=counts[name]: f(n))
            rates[name].append(counts[name] * per_call[name] / taken)

    median = {name: statistics.median(x) for name, x in rates.items()}
    memory = jax.local_devices()[0].memory_stats() or {}
    print(
        json.dumps(
            {
                "env": config.env,
                "agent": config.agent,
                "num_envs": config.num_envs,
                "unroll_length": config.unroll_length,
                "steps_per_second": round(median["learn"]),
                "steps_per_second_all": [round(x) for x in rates["learn"]],
                "ceiling_steps_per_second": round(median["act"]),
                "ceiling_ratio": round(median["learn"] / median["act"], 4),
                "compile_seconds": round(compile_seconds, 2),
                "peak_process_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                "peak_device_bytes": memory.get("peak_bytes_in_use"),
                "devices": f"{sizes.num_devices} x {jax.devices()[0].device_kind}",
                "versions": versions("podracer", "jax", "flax"),
            }
        )
    )


if __name__ == "__main__":
    main()
