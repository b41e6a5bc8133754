"""Measures the speed of Anakin: training, and its environment alone under random actions.

    python benchmarks/anakin.py --env=gymnax:CartPole-v1 --num_envs=64 --unroll_length=128

Prints one JSON line with steps per second; the ceiling is that of one agent's environments. Without
``--config`` this is PPO with separate policy and value networks of 2 x 64 tanh units, 4 epochs of 4
minibatches and clip 0.2, the settings that are usually measured.
"""

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from common import override, read_config, versions
from jax import Array

from podracer import config as config_lib
from podracer.acting import unroll
from podracer.anakin.trainer import compile_program, prepare
from podracer.config import Config
from podracer.config.sizes import Sizes
from podracer.distributed import mesh as mesh_lib
from podracer.types import Environment
from podracer.xla_cpu import prng


def make_random_steps(
    env: Environment, mesh: jax.sharding.Mesh, sizes: Sizes
) -> Callable[[Array, Array], Array]:
    """Compiles unrolls of the environment under random actions, without an agent.

    Returns:
      ``(key, num_unrolls) -> sum``, where the sum depends on all time steps of all unrolls, so that
      the compiler can't remove any computation.
    """

    def random_unroll(key: Array, env_ids: Array, now: Any) -> tuple[Any, Array]:
        keys = unroll.env_keys(key, env_ids, 2 * sizes.unroll_length)

        def step(now: Any, keys: Array) -> tuple[Any, Array]:
            state, observation = now
            action = unroll.random_actions(env.spec, observation, keys[0])
            state, timestep = jax.vmap(env.step)(keys[1], state, action)
            return (state, timestep.observation), jnp.stack(
                [x.astype(jnp.float32).sum() for x in jax.tree.leaves(timestep)]
            )

        return jax.lax.scan(step, now, keys.reshape(sizes.unroll_length, 2, -1))

    def on_device(key: Array, num_unrolls: Array) -> Array:
        first = mesh_lib.device_index() * sizes.envs_per_device
        env_ids = first + jnp.arange(sizes.envs_per_device)
        state, timestep = jax.vmap(env.reset)(unroll.env_keys(key, env_ids, 1)[0])
        now = (state, timestep.observation)

        def body(i: Array, carry: tuple[Any, Array]) -> tuple[Any, Array]:
            now, sums = random_unroll(jax.random.fold_in(key, i), env_ids, carry[0])
            return now, carry[1] + sums.sum()

        _, total = jax.lax.fori_loop(0, num_unrolls, body, (now, jnp.float32(0)))
        return mesh_lib.all_mean(total)

    replicated = mesh_lib.REPLICATED
    return jax.jit(mesh_lib.per_device(on_device, mesh, (replicated, replicated), replicated))


def seconds_of(function: Callable[[], Any]) -> float:
    """The time of one call, including the computation that it starts on devices."""
    start = time.perf_counter()
    jax.block_until_ready(function())
    return time.perf_counter() - start


def measure_rates(
    functions: dict[str, Callable[[int], Any]], rounds: int, seconds: float
) -> dict[str, list[float]]:
    """Calls per second of each function, by round; the functions take turns.

    Args:
      functions: functions of a number of calls to make.
      rounds: number of measurements of each function.
      seconds: approximate time of each measurement.
    """
    counts = {}
    for name, function in functions.items():
        function(1)
        once = min(seconds_of(lambda f=function: f(2)) / 2 for _ in range(3))
        counts[name] = max(1, round(seconds / once))
    rates: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            elapsed = seconds_of(lambda f=function, n=counts[name]: f(n))
            rates[name].append(counts[name] / elapsed)
    return rates


def measure(config: Config, calls: int, seconds: float) -> dict[str, Any]:
    """Measures a config; see ``parse_arguments`` for the other arguments."""
    program = prepare(config)
    sizes = program.sizes
    start = time.perf_counter()
    compiled = compile_program(program, config)
    compile_seconds = time.perf_counter() - start

    state = compiled.state
    random_steps = make_random_steps(program.env, program.mesh, sizes)
    key = prng.key(config.seed)

    def learn(num_calls: int) -> Any:
        nonlocal state
        metrics = None
        for _ in range(num_calls):
            # One call ahead, as in training: with dozens of calls that wait, an all-reduce between
            # CPU devices may never end.
            before, (state, metrics) = metrics, compiled.step(state)
            jax.block_until_ready(before)
        return metrics

    def act(num_unrolls: int) -> Any:
        return random_steps(key, jnp.int32(num_unrolls))

    rates = measure_rates({"learn": learn, "act": act}, calls, seconds)
    steps = sizes.updates_per_call * sizes.steps_per_update * len(config.members)
    learning = [x * steps for x in rates["learn"]]
    ceiling = statistics.median(rates["act"]) * sizes.steps_per_update
    memory = jax.local_devices()[0].memory_stats() or {}
    return {
        "env": config.env,
        "agent": config.agent,
        "num_envs": config.num_envs,
        "unroll_length": config.unroll_length,
        "agents": len(config.members),
        "steps_per_second": round(statistics.median(learning)),
        "steps_per_second_all": [round(x) for x in learning],
        "ceiling_steps_per_second": round(ceiling),
        "ceiling_ratio": round(statistics.median(learning) / ceiling, 4),
        "compile_seconds": round(compile_seconds, 2),
        "peak_process_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "peak_device_bytes": memory.get("peak_bytes_in_use"),
        "devices": f"{sizes.num_devices} x {jax.devices()[0].device_kind}",
        "versions": versions("podracer", "jax", "flax"),
    }


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", help="config file; the arguments below replace its settings")
    parser.add_argument("--env", help="environment id")
    parser.add_argument("--agent", help="name of the agent")
    parser.add_argument("--num_envs", type=int, help="number of environments")
    parser.add_argument("--unroll_length", type=int, help="steps per unroll")
    parser.add_argument("--num_seeds", type=int, help="agents, whose steps are added up")
    parser.add_argument("--cpu_devices", type=int, help="number of CPU devices")
    parser.add_argument("--updates_per_call", type=int, default=16, help="default: 16")
    parser.add_argument(
        "--gradient_steps",
        type=int,
        help="gradient steps after each unroll, of agents with a replay buffer",
    )
    parser.add_argument("--calls", type=int, default=7, help="timed rounds; default: 7")
    parser.add_argument("--seconds", type=float, default=1.0, help="time of a round; default: 1")
    args = parser.parse_args(argv)
    if args.calls < 5:
        parser.error("--calls must be at least 5, for a median")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark; ``argv`` excludes the program's name."""
    args = parse_arguments(argv)
    config = read_config(args.config)
    override(config, args, "env", "num_envs", "unroll_length", "num_seeds", "cpu_devices", "agent")
    config.updates_per_call = args.updates_per_call
    # Learning begins at once, so that all rounds measure it.
    config.replay.begin = 1
    if args.gradient_steps is not None:
        config.replay.gradient_steps = args.gradient_steps
    print(json.dumps(measure(config_lib.parse(config), args.calls, args.seconds)))


if __name__ == "__main__":
    main()
