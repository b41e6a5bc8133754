"""Evaluates a saved run: ``python -m podracer.evaluate --workdir=FOLDER``.

Prints returns and lengths of whole episodes played with the weights of one of the run's
checkpoints; ``--gif=FILE`` draws one episode.
"""

import json
import sys
from collections.abc import Sequence

from absl import flags

from podracer.errors import ConfigError, run_command
from podracer.training import command_line
from podracer.training.saved_run import GIF_FRAMES, describe, evaluate

__all__ = ["evaluate", "main"]

FLAGS: dict[str, command_line.Flag] = {
    "workdir": (flags.DEFINE_string, None, "The run's folder"),
    "weights": (flags.DEFINE_string, "last", "Last, best, or the number of a checkpoint"),
    "member": (flags.DEFINE_string, "0", "Which agent of a run with several, from 0; or best"),
    "episodes": (flags.DEFINE_integer, None, "Number of episodes; default: as in the run"),
    "greedy": (
        flags.DEFINE_bool,
        None,
        "Act without exploration; --nogreedy acts as in training. Default: as in the run",
    ),
    "seed": (flags.DEFINE_integer, None, "Seed of the episodes; default: the member's"),
    "gif": (flags.DEFINE_string, None, "GIF file to write an episode to"),
    "gif_frames": (flags.DEFINE_integer, GIF_FRAMES, "Maximum number of frames in that file"),
    "allow_env": (
        flags.DEFINE_string,
        None,
        "The run's environment id: permits it to import the module or use the files it names",
    ),
    "json": (flags.DEFINE_bool, False, "Print a JSON object"),
}


def _command(argv: Sequence[str]) -> None:
    given = command_line.parse_flags("evaluate --workdir=FOLDER", FLAGS, argv)
    as_json, workdir = given.pop("json"), given.pop("workdir")
    if workdir is None:
        raise ConfigError(
            "--workdir is missing; specify a run's folder, as in --workdir=runs/cartpole"
        )
    result = evaluate(workdir, num_episodes=given.pop("episodes"), **given)
    print(json.dumps(result) if as_json else describe(result))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; ``argv`` includes the program's name. Returns the exit code."""
    return run_command(lambda: _command(sys.argv if argv is None else argv))
