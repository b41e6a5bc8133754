"""Measures the speed of Sebulba: training, and its environment pools alone.

    python benchmarks/sebulba.py --env=envpool:Pong-v5 --num_envs=256 --unroll_length=16

Prints one JSON line with steps per second. Without ``--config`` this is V-trace on Pong with one
epoch, and with a network so small that environments take most of the time: one hidden layer of 32
units, on every fourth pixel of images.

The ceiling is the speed of the same pools in the same number of threads under random actions.
Training and ceiling are measured in turn, so that other load on the machine affects both alike.
CPU seconds are compared as well, because they depend less on other load.
"""

import argparse
import collections
import json
import resource
import statistics
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import envpool
import jax
import numpy as np
from common import override, read_config, versions

from podracer import config as config_lib
from podracer.sebulba.setup import SebulbaSetup, make_actors, prepare
from podracer.sebulba.threads import Supervisor
from podracer.sebulba.trainer import compile_programs, make_supervisor, start_threads
from podracer.types import Discrete, Pool, Spec


def make_small(config: Any) -> None:
    """Changes a config to the benchmark's default: a small network on Pong."""
    config.env, config.agent = "envpool:Pong-v5", "vtrace"
    config.num_epochs = config.num_minibatches = 1
    config.network.hidden, config.network.shared = (32,), True
    # Two pools of 128 environments: larger batches mean fewer Python calls per step.
    config.num_envs, config.unroll_length = 256, 16


def random_actions(spec: Spec, batch: int, rng: np.random.Generator) -> np.ndarray:
    """Random actions ``[batch, ...]``, in the environment's units."""
    action = spec.action
    if isinstance(action, Discrete):
        return rng.integers(0, action.num_actions, batch, np.int32)
    low, high = (np.nan_to_num(x, posinf=1, neginf=-1) for x in (action.low, action.high))
    return rng.uniform(low, high, (batch, *action.shape)).astype(np.float32)


def ceiling(setup: SebulbaSetup, pools: list[Pool], seconds: float) -> tuple[float, float]:
    """Steps all pools under random actions, each in a thread of its own.

    Args:
      setup: setup of the run that the pools belong to.
      pools: environment pools that have been reset.
      seconds: how long to step them.

    Returns:
      Steps per second, and CPU seconds per thousand steps.
    """
    batch = setup.sizes.num_envs // len(pools)
    counts = [0] * len(pools)
    start, used = time.perf_counter(), time.process_time()

    def step(k: int) -> None:
        rng = np.random.default_rng(k)
        while time.perf_counter() - start < seconds:
            pools[k].step(random_actions(setup.env.spec, batch, rng))
            counts[k] += batch

    threads = [threading.Thread(target=step, args=(k,)) for k in range(len(pools))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    steps = sum(counts)
    used = time.process_time() - used
    return steps / (time.perf_counter() - start), 1e3 * used / steps


class Measured(NamedTuple):
    """Results of all rounds.

    Attributes:
      learn: steps per second and CPU seconds per thousand steps of training, by round.
      alone: the same of the pools alone, by round.
      breakdown: seconds of the last round of training, by activity.
      compile_seconds: time to compile.
    """

    learn: list[tuple[float, float]]
    alone: list[tuple[float, float]]
    breakdown: Mapping[str, float]
    compile_seconds: float


class Training:
    """A run whose threads work from the start, and whose learner does some updates at a time.

    Attributes:
      steps_per_update: environment steps of an update.
      compile_seconds: time to compile.
      host_seconds: what the updates since it was cleared took, by activity.
      row: this host's metrics of the last update.
    """

    def __init__(self, setup: SebulbaSetup, supervisor: Supervisor):
        start = time.perf_counter()
        compiled = compile_programs(setup)
        self.compile_seconds = time.perf_counter() - start
        self.steps_per_update = setup.sizes.steps_per_update
        self.host_seconds, self.row = collections.Counter(), {}
        self._state = compiled.state
        self._learner = start_threads(setup, compiled, compiled.state, supervisor)

    def update(self, count: int) -> float:
        """Does some updates, and returns the seconds that they took."""
        start = time.perf_counter()
        for _ in range(count):
            self._state, metrics = self._learner.step(self._state)
            self.row = dict(metrics.host)
            activities = [k for k in self.row if k.startswith(("time/actor_", "time/learner_"))]
            self.host_seconds.update({k: self.row[k] for k in activities})
        return time.perf_counter() - start


def measure(setup: SebulbaSetup, seconds: float, rounds: int) -> Measured:
    """Measures training and the pools alone in turn, each for ``seconds`` in every round."""
    pools = [actor.make_pool(0) for actor in make_actors(setup)]
    for pool in pools:
        pool.reset()
    learn, alone = [], []
    with make_supervisor(setup.config.sebulba, warnings.warn) as supervisor:
        training = Training(setup, supervisor)
        training.update(2)
        once = training.update(3) / 3
        count = max(3, round(seconds / once))
        for _ in range(rounds):
            # Actors are at most two unrolls ahead of the learner, and then wait for it.
            time.sleep(3 * once)
            alone.append(ceiling(setup, pools, seconds))
            # Not counted: these updates use unrolls from before the measurement.
            training.update(2)
            training.host_seconds.clear()
            used, steps = time.process_time(), count * training.steps_per_update
            rate = steps / training.update(count)
            learn.append((rate, 1e3 * (time.process_time() - used) / steps))
    for pool in pools:
        pool.close()
    # Actors paused while the ceiling was measured.
    breakdown = {
        k.removeprefix("time/"): v
        for k, v in training.host_seconds.items()
        if k != "time/actor_pause"
    }
    return Measured(learn, alone, breakdown, training.compile_seconds)


def frames(setup: SebulbaSetup) -> int:
    """The number of emulator frames per step."""
    suite, _, name = setup.config.env.partition(":")
    if suite != "envpool":
        return 1
    return getattr(envpool.make_spec(name, **setup.config.env_kwargs).config, "frame_skip", 1)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", help="config file; the arguments below replace its settings")
    parser.add_argument("--env", help="environment id")
    parser.add_argument("--agent", help="name of the agent")
    parser.add_argument("--num_envs", type=int, help="number of environments")
    parser.add_argument("--unroll_length", type=int, help="steps per unroll")
    parser.add_argument("--cpu_devices", type=int, help="number of CPU devices")
    parser.add_argument("--threads", type=int, help="actor threads per actor device")
    parser.add_argument("--pool_threads", type=int, help="envpool's threads per pool")
    parser.add_argument(
        "--newest_frame",
        action=argparse.BooleanOptionalAction,
        help="send only the newest frame to devices, and stack frames there",
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="time of a round; default: 4")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds; default: 5")
    args = parser.parse_args(argv)
    if args.rounds < 5:
        parser.error("--rounds must be at least 5, for a median")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark; ``argv`` excludes the program's name."""
    args = parse_arguments(argv)
    config = read_config(args.config)
    if not args.config:
        make_small(config)
    override(config, args, "env", "num_envs", "unroll_length", "cpu_devices", "agent")
    override(config.sebulba, args, "threads", "pool_threads", "newest_frame")
    # More updates than are ever timed, so that actors don't finish.
    config.total_steps, config.updates_per_call, config.anneal = 10**12, 1, False
    setup = prepare(config_lib.parse(config))
    if not args.config and len(getattr(setup.env.spec.observation, "shape", ())) == 3:
        config.network.torso = "pixels"
        setup = prepare(config_lib.parse(config))

    measured = measure(setup, args.seconds, args.rounds)
    (learn, used), (alone, used_alone) = (
        zip(*rounds, strict=True) for rounds in (measured.learn, measured.alone)
    )
    rate, top = statistics.median(learn), statistics.median(alone)
    print(
        json.dumps(
            {
                "env": setup.config.env,
                "agent": setup.config.agent,
                "num_envs": setup.config.num_envs,
                "unroll_length": setup.config.unroll_length,
                "newest_frame": setup.config.sebulba.newest_frame,
                "steps_per_second": round(rate),
                "steps_per_second_all": [round(x) for x in learn],
                "frames_per_second": round(rate * frames(setup)),
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
                "actors": f"{len(setup.split.actors)} x {setup.config.sebulba.threads} threads",
                "learners": len(setup.split.learners),
                "device": jax.devices()[0].device_kind,
                "versions": versions("podracer", "jax", "envpool"),
            }
        )
    )


if __name__ == "__main__":
    main()
