"""PPO of CleanRL, Stoix and Brax, each by its own program, for the pages docs/coming_from_*.md.

    python benchmarks/peers.py cleanrl PATH --python=PYTHON --seeds=3

PATH is a clone of the project, and PYTHON an interpreter with the packages that it needs, whose
versions differ from podracer's. The project's program is run unchanged, one seed after another,
and its return is read from the TensorBoard file that it writes. For each seed a line is printed and
appended to docs/results_peers.jsonl, from which docs/results.md takes it. PureJaxRL,
which writes no such file, is run by purejaxrl.py.
"""

import argparse
import json
import os
import pathlib
import subprocess
import tempfile
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import results_lines


class Peer(NamedTuple):
    """A program of another project.

    Attributes:
      task: the name of its lines.
      arguments: those of Python, in which ``{seed}``, ``{path}`` (of the clone) and ``{folder}``
        (for what it writes) are replaced.
      tag: the name of its return in its TensorBoard file.
      packages: those whose versions affect its results.
      end: the step of its last return, if its program fails afterwards; 0 if it does not fail.
    """

    task: str
    arguments: tuple[str, ...]
    tag: str
    packages: tuple[str, ...]
    end: int = 0


PEERS = {
    "cleanrl": Peer(
        task="cleanrl-CartPole-v1",
        # Its defaults, but for fewer steps.
        arguments=(
            "{path}/cleanrl/ppo.py",
            "--total-timesteps=200000",
            "--no-cuda",
            "--seed={seed}",
        ),
        tag="charts/episodic_return",
        packages=("torch", "gymnasium", "numpy"),
    ),
    "stoix": Peer(
        task="stoix-CartPole-v1",
        # Its defaults, but for fewer environments and steps, and the place of its files.
        arguments=(
            "{path}/stoix/systems/ppo/anakin/ff_ppo.py",
            "arch.seed={seed}",
            "arch.total_num_envs=64",
            "arch.total_timesteps=500000",
            "logger.loggers.tensorboard.enabled=True",
            "logger.base_exp_path={folder}",
            "hydra.run.dir={folder}",
            "hydra.searchpath=[file://{path}/stoix/configs]",
        ),
        tag="actor/episode_return/mean",
        packages=("jax", "flax", "optax", "gymnax", "stoa-env"),
    ),
    "brax": Peer(
        task="brax-inverted_pendulum",
        # Those of its notebooks/training.ipynb, but for a sixteenth of the environments and of the
        # batch, fewer steps and evaluations.
        arguments=(
            "-m",
            "brax.training.learner",
            "--env=inverted_pendulum",
            "--backend=positional",
            "--total_env_steps=300000",
            "--num_evals=10",
            "--num_resets_per_eval=0",
            "--reward_scaling=10",
            "--episode_length=1000",
            "--normalize_observations",
            "--action_repeat=1",
            "--unroll_length=5",
            "--num_minibatches=32",
            "--num_updates_per_batch=4",
            "--discounting=0.97",
            "--learning_rate=3e-4",
            "--entropy_cost=1e-2",
            "--num_envs=128",
            "--batch_size=64",
            "--num_videos=0",
            "--seed={seed}",
            "--logdir={folder}",
        ),
        tag="eval/episode_reward",
        packages=("jax", "flax", "optax", "mujoco", "brax"),
        # It fails where it plays an episode for a video after training, even of no videos.
        end=368_640,
    ),
}


def read_returns(folder: pathlib.Path, tag: str) -> dict[str, np.ndarray]:
    """The columns "step", "wall_time" (absolute) and "return" of the only file with this tag."""
    from tensorboard.backend.event_processing import event_accumulator

    found: list[Any] = []
    for file in sorted(folder.rglob("events.out.tfevents.*")):
        # By default it keeps a sample of the values only.
        events = event_accumulator.EventAccumulator(str(file), size_guidance={"scalars": 0})
        events.Reload()
        if tag in events.Tags()["scalars"]:
            found.append(events.Scalars(tag))
    if len(found) != 1:
        raise SystemExit(f"{len(found)} files in {folder} have the tag {tag}; there should be one")
    columns = {"step": "step", "wall_time": "wall_time", "return": "value"}
    return {name: np.array([getattr(x, key) for x in found[0]]) for name, key in columns.items()}


def versions(peer: Peer, path: pathlib.Path, python: str) -> dict[str, str]:
    """The versions of Python and of packages of an interpreter, and the commit of the clone."""
    code = (
        "import importlib.metadata as m, json, platform, sys; "
        "print(json.dumps({'python': platform.python_version(), "
        "**{x: m.version(x) for x in sys.argv[1:]}}))"
    )
    found = subprocess.check_output([python, "-c", code, *peer.packages], text=True)
    commit = subprocess.check_output(["git", "-C", path, "rev-parse", "HEAD"], text=True)
    return {**json.loads(found), "commit": commit.strip()}


def train(name: str, path: pathlib.Path, python: str, seed: int) -> results_lines.Line:
    """Trains with a seed. The return is the mean of the last fiftieth of its curve."""
    peer, start = PEERS[name], time.time()
    with tempfile.TemporaryDirectory() as folder:
        arguments = [x.format(seed=seed, path=path, folder=folder) for x in peer.arguments]
        # Where modules of the clone are imported from, and where relative paths of files lead.
        env = {**os.environ, "PYTHONPATH": str(path)}
        subprocess.run(
            [python, *arguments],
            cwd=folder, env=env, stdout=subprocess.DEVNULL, check=not peer.end,
        )  # fmt: skip
        seconds = time.time() - start
        columns = read_returns(pathlib.Path(folder), peer.tag)
    returns, step = columns.pop("return"), columns["step"]
    if peer.end and step[-1] != peer.end:
        raise SystemExit(f"{name} ended at step {step[-1]:,}, before {peer.end:,}")
    columns["wall_time"] = columns["wall_time"] - start
    # A return before the first step belongs to no span of steps.
    columns = {key: column[step > 0] for key, column in columns.items()}
    curve = results_lines.thin(columns, returns[step > 0])
    return results_lines.Line(
        task=peer.task,
        seed=seed,
        command=f"python benchmarks/peers.py {name} PATH --python=PYTHON",
        config={"arguments": list(peer.arguments)},
        versions=versions(peer, path, python),
        hardware=results_lines.hardware(len(os.sched_getaffinity(0))),
        steps=int(step[-1]),
        seconds=round(seconds, 1),
        steps_per_second=round(int(step[-1]) / seconds),
        episode_return=curve["return"][-1],
        episodes=int((step > step[-1] * (1 - 1 / results_lines.POINTS)).sum()),
        curve=curve,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark; ``argv`` excludes the program's name."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("peer", choices=PEERS, help="name of the project")
    parser.add_argument("path", type=pathlib.Path, help="folder of a clone of it")
    parser.add_argument("--python", required=True, help="an interpreter with its packages")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds, from 1")
    args = parser.parse_args(argv)
    done = {(line.task, line.seed) for line in results_lines.read_lines(results_lines.PEERS)}
    for seed in range(1, args.seeds + 1):
        if (PEERS[args.peer].task, seed) not in done:
            line = train(args.peer, args.path.resolve(), args.python, seed)
            results_lines.append(line, results_lines.PEERS)
            print(json.dumps({**line._asdict(), "curve": None}), flush=True)


if __name__ == "__main__":
    main()
