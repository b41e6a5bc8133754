"""Plays games between two saved runs: ``python -m podracer.match --workdir=A --opponent=B``.

Without an opponent, it rates all checkpoints of the run against each other and random moves.
"""

import json
import sys
from collections.abc import Sequence

from absl import flags

from podracer.errors import ConfigError, run_command
from podracer.training import command_line
from podracer.training.match import describe, describe_ratings, match, rate

__all__ = ["main", "match", "rate"]

SIMULATIONS = "Simulations of a search of alphazero; 0: the network alone. Default: as in the run"
FLAGS: dict[str, command_line.Flag] = {
    "workdir": (flags.DEFINE_string, None, "The folder of a run in a game of two players"),
    "opponent": (flags.DEFINE_string, None, "The other run's folder. Default: rate checkpoints"),
    "weights": (flags.DEFINE_string, "last", "Last, best, or the number of a checkpoint"),
    "opponent_weights": (flags.DEFINE_string, "last", "The same of the opponent"),
    "games": (flags.DEFINE_integer, 200, "Number of games, even; of each pair in ratings"),
    "opening": (flags.DEFINE_integer, 2, "Number of random moves at the beginning of a game"),
    "simulations": (flags.DEFINE_integer, None, SIMULATIONS),
    "opponent_simulations": (flags.DEFINE_integer, None, "The same of the opponent"),
    "seed": (flags.DEFINE_integer, 0, "Seed of the random moves"),
    "allow_env": (
        flags.DEFINE_string,
        None,
        "The runs' environment id: permits it to import the module or use the files it names",
    ),
    "json": (flags.DEFINE_bool, False, "Print a JSON object"),
}


def _command(argv: Sequence[str]) -> None:
    given = command_line.parse_flags("match --workdir=FOLDER [--opponent=FOLDER]", FLAGS, argv)
    as_json, workdir, opponent = (given.pop(name) for name in ("json", "workdir", "opponent"))
    if workdir is None:
        raise ConfigError("--workdir is missing; specify a run's folder")
    if opponent is not None:
        result, text = match(workdir, opponent, **given), describe
    else:
        for name in ("weights", "opponent_weights", "opponent_simulations"):
            if given.pop(name) != FLAGS[name][1]:
                raise ConfigError(f"--{name} needs --opponent; without it, all weights are rated")
        result, text = rate(workdir, **given), describe_ratings
    print(json.dumps(result) if as_json else text(result))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; ``argv`` includes the program's name. Returns the exit code."""
    return run_command(lambda: _command(sys.argv if argv is None else argv))


if __name__ == "__main__":
    sys.exit(main())
