"""Steps per second of Anakin beside PureJaxRL's PPO, learning included.

    python benchmarks/purejaxrl_speed.py PATH

PATH is a clone of https://github.com/luchris429/purejaxrl. Both train separate policy and value
networks of 2 x 64 tanh units, with 4 epochs of 4 minibatches, in the same environments and with the
same version of JAX. Rounds of both programs alternate, each in a process of its own. A table is
printed, in Markdown.
"""

import argparse
import multiprocessing
import pathlib
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import anakin
import common
import jax
import purejaxrl

from podracer import config as config_lib


class Size(NamedTuple):
    """A row of the table.

    Attributes:
      env: gymnax's id.
      num_envs: number of environments.
      unroll_length: steps of an unroll.
      updates_per_call: of podracer, so that a call takes a second or less.
    """

    env: str
    num_envs: int
    unroll_length: int
    updates_per_call: int = 16


SIZES = (
    Size("CartPole-v1", 4, 128),
    Size("CartPole-v1", 64, 128),
    Size("CartPole-v1", 2048, 32),
    Size("Breakout-MinAtar", 64, 128, updates_per_call=4),
    Size("Breakout-MinAtar", 2048, 32, updates_per_call=2),
)
# Timed calls of a round, whose speed is their median.
CALLS = 5


def podracers(path: pathlib.Path, size: Size) -> float:
    """Steps per second of podracer; ``path`` is there because ``purejaxrls`` takes it."""
    config = common.read_config(None)
    config.env = f"gymnax:{size.env}"
    config.num_envs, config.unroll_length = size.num_envs, size.unroll_length
    config.updates_per_call = size.updates_per_call
    return anakin.measure(config_lib.parse(config), CALLS, 1.0)["steps_per_second"]


def purejaxrls(path: pathlib.Path, size: Size) -> float:
    """Steps per second of PureJaxRL, whose clone is at ``path``, in calls of 2^18 steps."""
    steps = 2**18
    config = {
        **purejaxrl.SETTINGS,
        **purejaxrl.CARTPOLE,
        "ENV_NAME": size.env,
        "NUM_ENVS": size.num_envs,
        "NUM_STEPS": size.unroll_length,
        "TOTAL_TIMESTEPS": steps,
    }
    run = purejaxrl.load(path, purejaxrl.gymnax_make).make_train(config)
    key = jax.random.key(0)
    compiled = jax.jit(lambda key: run(key)["metrics"]).lower(key).compile()
    jax.block_until_ready(compiled(key))
    times = [anakin.seconds_of(lambda: compiled(key)) for _ in range(CALLS)]
    return steps / statistics.median(times)


def measure_alone(program: Callable[[pathlib.Path, Size], float], *arguments) -> float:
    """What a program returns in a new process."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context) as pool:
        return pool.submit(program, *arguments).result()


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark; ``argv`` excludes the program's name."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=pathlib.Path, help="folder of a clone of PureJaxRL")
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    parser.add_argument(
        "--num_envs",
        type=int,
        choices=sorted({x.num_envs for x in SIZES}),
        help="leave out rows with other numbers of environments",
    )
    args = parser.parse_args(argv)
    print("| environment | environments x steps | podracer | PureJaxRL | ratio |")
    print("|---|---|---|---|---|", flush=True)
    for size in (x for x in SIZES if args.num_envs in (None, x.num_envs)):
        rounds = [
            [measure_alone(program, args.path, size) for program in (podracers, purejaxrls)]
            for _ in range(args.rounds)
        ]
        ours, theirs = (
            ", ".join(f"{x / 1000:.0f} K" for x in rates) for rates in zip(*rounds, strict=True)
        )
        ratios = ", ".join(f"{ours / theirs:.2f}" for ours, theirs in rounds)
        shape = f"{size.num_envs} x {size.unroll_length}"
        print(f"| {size.env} | {shape} | {ours} | {theirs} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
