"""Steps a second of Sebulba, learning included, and of its pools alone, as one JSON line.

    python benchmarks/sebulba.py --env=envpool:Pong-v5 --num_envs=256 --unroll_length=16

Without ``--config`` this is V-trace on Pong, one pass over each batch, with a network so small that
environments are what takes the time: a hidden layer of 32 units, on every fourth pixel of images.
The ceiling is that of the same pools in as many threads, under random actions. Learning and ceiling
take turns, so that a noisy machine is as noisy to both; their CPU seconds are compared as well, to
which other programs on it do less.
"""

import argparse
import collections
import json
import resource
import statistics
import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import envpool
import jax
import numpy as np
from common import override, read_config, versions

from podracer import config as config_lib
from podracer.sebulba.pipeline import Supervisor
from podracer.sebulba.train import Run, compile_run, launch, make_actors, prepare
from podracer.types import Discrete, Pool, Spec


def small(config: Any) -> None:
    """Sets what is small about the default."""
    config.env, config.agent = "envpool:Pong-v5", "vtrace"
    config.num_epochs = config.num_minibatches = 1
    config.network.hidden, config.network.shared = (32,), True
    # Python's share of a step is that of a call, which two pools of 128 environments share.
    config.num_envs, config.unroll_length = 256, 16


def random_actions(spec: Spec, batch: int, rng: np.random.Generator) -> np.ndarray:
    """Random actions of a batch, in the environment's units."""
    action = spec.action
    if isinstance(action, Discrete):
        return rng.integers(0, action.num_actions, batch, np.int32)
    low, high = (np.nan_to_num(x, posinf=1, neginf=-1) for x in (action.low, action.high))
    return rng.uniform(low, high, (batch, *action.shape)).astype(np.float32)


def ceiling(run: Run, pools: list[Pool], seconds: float) -> tuple[float, float]:
    """Steps a second of pools alone, each in its thread, and CPU seconds of a thousand steps."""
    batch = run.sizes.num_envs // len(pools)
    counts = [0] * len(pools)
    start, used = time.perf_counter(), time.process_time()

    def step(k: int) -> None:
        rng = np.random.default_rng(k)
        while time.perf_counter() - start < seconds:
            pools[k].step(random_actions(run.env.spec, batch, rng))
            counts[k] += batch

    threads = [threading.Thread(target=step, args=(k,)) for k in range(len(pools))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    steps = sum(counts)
    used = time.process_time() - used
    return steps / (time.perf_counter() - start), 1e3 * used / steps


def settle(supervisor: Supervisor) -> None:
    """Waits until actors have done all that they may do ahead of the learner."""
    quiet = 0
    while quiet < 3:
        time.sleep(0.1)
        supervisor.check()
        quiet = quiet + 1 if supervisor.idle() else 0


class Measured(NamedTuple):
    """Steps a second and CPU seconds of a thousand steps, by round, of learning and of pools alone;
    seconds by what the last round's learning went to, and of compilation."""

    learn: list[tuple[float, float]]
    alone: list[tuple[float, float]]
    breakdown: Mapping[str, float]
    compile_seconds: float


def measure(run: Run, seconds: float, rounds: int) -> Measured:
    """Learning and the pools alone, in turn."""
    start = time.perf_counter()
    compiled = compile_run(run)
    compile_seconds = time.perf_counter() - start
    pools = [actor.make_pool(0) for actor in make_actors(run)]
    for pool in pools:
        pool.reset()
    learn, alone, breakdown = [], [], collections.Counter()
    state = compiled.state
    with Supervisor(run.config.sebulba.timeout_s) as supervisor:
        learner = launch(run, compiled, supervisor)

        def update(count: int) -> float:
            nonlocal state
            begin = time.perf_counter()
            for _ in range(count):
                state, metrics = learner.step(state)
                breakdown.update(dict(metrics.host))
            return time.perf_counter() - begin

        update(2)
        once = update(3) / 3
        count = max(3, round(seconds / once))
        for _ in range(rounds):
            settle(supervisor)
            alone.append(ceiling(run, pools, seconds))
            # What they had done ahead is not counted.
            update(2)
            breakdown.clear()
            used, steps = time.process_time(), count * run.sizes.steps_per_update
            rate = steps / update(count)
            learn.append((rate, 1e3 * (time.process_time() - used) / steps))
    for pool in pools:
        pool.close()
    # Actors' pause is the time in which the ceiling was measured.
    seconds_by_what = {
        k.removeprefix("time/"): v
        for k, v in breakdown.items()
        if k.startswith(("time/actor_", "time/learner_")) and k != "time/actor_pause"
    }
    return Measured(learn, alone, seconds_by_what, compile_seconds)


def frames(run: Run) -> int:
    """Frames of the emulator to a step."""
    suite, _, name = run.config.env.partition(":")
    if suite != "envpool":
        return 1
    return getattr(envpool.make_spec(name, **run.config.env_kwargs).config, "frame_skip", 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", help="a config file; sizes below replace those in it")
    parser.add_argument("--env")
    for name in ("num_envs", "unroll_length", "cpu_devices"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--agent")
    parser.add_argument("--threads", type=int, help="actor threads to an actor device")
    parser.add_argument("--pool_threads", type=int)
    parser.add_argument("--newest_frame", action=argparse.BooleanOptionalAction)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each timed round")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if args.rounds < 5:
        parser.error("--rounds must be at least 5, for a median")

    config = read_config(args.config)
    if not args.config:
        small(config)
    override(config, args, "env", "num_envs", "unroll_length", "cpu_devices", "agent")
    override(config.sebulba, args, "threads", "pool_threads", "newest_frame")
    # More updates than are ever timed: actors must not run out of work.
    config.total_steps, config.updates_per_call, config.anneal = 10**12, 1, False
    run = prepare(config_lib.parse(config))
    if not args.config and len(run.env.spec.observation.shape) == 3:
        config.network.torso = "pixels"
        run = prepare(config_lib.parse(config))

    measured = measure(run, args.seconds, args.rounds)
    (learn, used), (alone, used_alone) = (
        zip(*rounds, strict=True) for rounds in (measured.learn, measured.alone)
    )
    rate, top = statistics.median(learn), statistics.median(alone)
    print(
        json.dumps(
            {
                "env": run.config.env,
                "agent": run.config.agent,
                "num_envs": run.config.num_envs,
                "unroll_length": run.config.unroll_length,
                "newest_frame": run.config.sebulba.newest_frame,
                "steps_per_second": round(rate),
                "steps_per_second_all": [round(x) for x in learn],
                "frames_per_second": round(rate * frames(run)),
                "ceiling_steps_per_second": round(top),
                "ceiling_steps_per_second_all": [round(x) for x in alone],
                "ceiling_ratio": round(
                    statistics.median(a / b for a, b in zip(learn, alone, strict=True)), 4
                ),
                "cpu_seconds_per_1000_steps": round(statistics.median(used), 4),
                "ceiling_cpu_seconds_per_1000_steps": round(statistics.median(used_alone), 4),
                "ceiling_cpu_ratio": round(
                    statistics.median(b / a for a, b in zip(used, used_alone, strict=True)), 4
                ),
                "breakdown": {name: round(x, 2) for name, x in measured.breakdown.items()},
                "compile_seconds": round(measured.compile_seconds, 2),
                "peak_process_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                "actors": f"{len(run.split.actors)} x {run.config.sebulba.threads} threads",
                "learners": len(run.split.learners),
                "device": jax.devices()[0].device_kind,
                "versions": versions("podracer", "jax", "envpool"),
            }
        )
    )


if __name__ == "__main__":
    main()
