"""Measures Sebulba with remote environments beside Sebulba with environments in its own process.

    python benchmarks/remote.py --workers=2 --num_envs=256 --unroll_length=16

Both train V-trace on Pong with the small network of ``sebulba.py``, on the same cores: one with
``--workers`` worker processes on this machine, which hold as many environments as the other has.
They are measured in turn, so that other load on the machine affects both alike. Prints one JSON
line with steps per second of both, and with what the wire carried.
"""

import argparse
import contextlib
import json
import statistics
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from common import override, read_config, versions
from sebulba import Training, make_small

from podracer import config as config_lib
from podracer.sebulba.setup import SebulbaSetup, prepare
from podracer.sebulba.trainer import make_supervisor


def make_setup(args: argparse.Namespace, *, remote: bool) -> SebulbaSetup:
    """The setup of one of the two runs."""
    config: Any = read_config(None)
    make_small(config)
    override(config, args, "env", "num_envs", "unroll_length", "cpu_devices")
    override(config.sebulba, args, "threads", "newest_frame")
    if not args.vector:
        config.network.torso = "pixels"
    # More updates than are ever timed, so that actors don't finish.
    config.total_steps, config.updates_per_call, config.anneal = 10**12, 1, False
    if remote:
        config.remote.num_envs = args.places or config.num_envs
        config.remote.local_workers = args.workers
        override(config.remote, args, "batch", "wait_ms")
    return prepare(config_lib.parse(config))


@contextlib.contextmanager
def run(setup: SebulbaSetup) -> Iterator[Training]:
    """A run that has done its first updates."""
    with make_supervisor(setup.config.sebulba, warnings.warn) as supervisor:
        training = Training(setup, supervisor)
        training.update(3)
        yield training


def measure(training: Training, seconds: float) -> float:
    """Steps per second of training for about this many seconds, from new unrolls."""
    once = training.update(3) / 3
    count = max(3, round(seconds / once))
    training.host_seconds.clear()
    return count * training.steps_per_update / training.update(count)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--env", help="environment id; default: Pong")
    parser.add_argument("--vector", action="store_true", help="its observations are no images")
    parser.add_argument("--num_envs", type=int, help="environments, and unrolls of an update")
    parser.add_argument("--places", type=int, help="remote environments; default: --num_envs")
    parser.add_argument("--unroll_length", type=int, help="steps per unroll")
    parser.add_argument("--cpu_devices", type=int, help="number of CPU devices")
    parser.add_argument("--threads", type=int, help="actor threads per actor device")
    parser.add_argument("--newest_frame", action=argparse.BooleanOptionalAction)
    parser.add_argument("--workers", type=int, default=2, help="worker processes; default: 2")
    parser.add_argument("--batch", type=int, help="environments that are acted on at once")
    parser.add_argument("--wait_ms", type=float, help="how long the first of these waits")
    parser.add_argument("--seconds", type=float, default=4.0, help="time of a round; default: 4")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds; default: 5")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark; ``argv`` excludes the program's name."""
    args = parse_arguments(argv)
    rates: list[tuple[float, float]] = []
    setups = [make_setup(args, remote=remote) for remote in (True, False)]
    with run(setups[0]) as remote, run(setups[1]) as local:
        for _ in range(args.rounds):
            rates.append((measure(remote, args.seconds), measure(local, args.seconds)))
        wire = {k: x for k, x in remote.row.items() if k.startswith("remote/")}
        wire |= remote.host_seconds
    config = setups[0].config
    there, here = zip(*rates, strict=True)
    print(
        json.dumps(
            {
                "env": config.env,
                "num_envs": config.num_envs,
                "unroll_length": config.unroll_length,
                "newest_frame": config.sebulba.newest_frame,
                "workers": args.workers,
                "places": config.remote.num_envs,
                "batch": config.remote.batch,
                "remote_steps_per_second": round(statistics.median(there)),
                "remote_steps_per_second_all": [round(x) for x in there],
                "local_steps_per_second": round(statistics.median(here)),
                "local_steps_per_second_all": [round(x) for x in here],
                "ratio": round(statistics.median(a / b for a, b in rates), 4),
                "last_round": {name: round(x, 3) for name, x in wire.items()},
                "versions": versions("podracer", "jax", "envpool", "grpcio"),
            }
        )
    )


if __name__ == "__main__":
    main()
