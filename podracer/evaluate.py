"""Judges what a run has learned: ``python -m podracer.evaluate --workdir=FOLDER``.

Returns and lengths of whole episodes, by the weights of one of the run's checkpoints, and one
episode as an animated GIF.
"""

import dataclasses
import json
import os
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from etils import epath

from podracer import checkpoint, cli, envs, episodes, parts, prng, render
from podracer import config as config_lib
from podracer import mesh as mesh_lib
from podracer.config import Config
from podracer.episodes import Episodes, HostEvaluation
from podracer.errors import ConfigError
from podracer.render import Film
from podracer.sebulba.train import pool_seeds
from podracer.types import Agent, Array, Weights
from podracer.workdir import read_config

# Pictures in a GIF at most, if nothing is said: all of a CartPole that never falls, and 24 seconds.
GIF_FRAMES = 600


class Judge(NamedTuple):
    """What an architecture judges by.

    Attributes:
      agent: who acts.
      play: ``(weights, key) -> Episodes``, as the run's own evaluation plays.
      check: ``()``, raises ``ConfigError`` if the environment can't be drawn.
      film: ``(weights, key, film) -> Episodes``, the first of those episodes, drawn.
    """

    agent: Agent
    play: Callable[[Weights, Array], Episodes]
    check: Callable[[], None]
    film: Callable[[Weights, Array, Film], Episodes]


def _judge(config: Config) -> Judge:
    """Judges in an environment written in JAX."""
    devices = mesh_lib.start(
        config.cpu_devices or config_lib.auto_cpu_devices(config), wanted=False
    )
    env = envs.make(config.env, config.env_kwargs, config.env_params)
    agent = parts.make_agent(config, env.spec)
    settings = config.evaluation
    play = jax.jit(episodes.make_evaluate(env, agent, mesh_lib.make_mesh(devices), settings))

    def film(weights: Weights, key: Array, shots: Film) -> Episodes:
        return render.film(env, agent, settings, weights, key, shots)

    return Judge(agent, play, lambda: render.check(config.env, env), film)


def _host_judge(config: Config) -> Judge:
    """Judges in environments of the host, with the seeds that the run's evaluation gives them."""
    env = envs.make_host(
        config.env,
        config.env_kwargs,
        config.env_params,
        newest_frame=config.sebulba.newest_frame,
    )
    agent = parts.make_agent(config, env.spec)
    settings = config.evaluation
    seeds = pool_seeds(config, config.num_envs + np.arange(settings.episodes), 0)
    threads = config.sebulba.pool_threads or config_lib.cpu_cores()

    def play(weights: Weights, key: Array) -> Episodes:
        evaluation = HostEvaluation(env, agent, settings, lambda: env.make(seeds, threads))
        try:
            return evaluation(weights, key, lambda _: None)
        finally:
            evaluation.close()

    def film(weights: Weights, key: Array, shots: Film) -> Episodes:
        return render.film_host(env, agent, settings, weights, key, seeds[0], shots)

    return Judge(agent, play, lambda: render.check_host(config.env, env), film)


def _read(workdir: epath.PathLike) -> tuple[Config, bool]:
    """A run's config, and whether its environment is stepped on the host."""
    content = read_config(workdir)
    return config_lib.parse(content["config"]), content["architecture"] == "sebulba"


def _change(config: Any, **values: Any) -> Any:
    """A part of a config with other values, as far as they are said."""
    said = {key: value for key, value in values.items() if value is not None}
    return dataclasses.replace(config, **said)


def _gif_path(gif: str | os.PathLike[str]) -> pathlib.Path:
    path = pathlib.Path(gif)
    if path.suffix.lower() != ".gif":
        raise ConfigError(f"--gif={path} is no name of a GIF; {path.with_suffix('.gif')} would be")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        raise ConfigError(f"--gif={path} can't be written: {error.strerror}") from error
    return path


def evaluate(
    workdir: epath.PathLike,
    *,
    weights: str = "last",
    num_episodes: int | None = None,
    greedy: bool | None = None,
    seed: int | None = None,
    gif: str | os.PathLike[str] | None = None,
    gif_frames: int = GIF_FRAMES,
) -> dict[str, Any]:
    """Plays whole episodes as the run's own evaluation does.

    With the run's settings and the weights it ended with, the numbers are those that it ended
    with, too. Environments of envpool are an exception where a run evaluated more than once: their
    random numbers go on from one evaluation to the next.

    Args:
      workdir: of a run of either architecture.
      weights: "last", or "best" by the run's evaluations.
      num_episodes: how many; None for as many as the run's evaluations.
      greedy: the most probable action, else a sampled one; None for what the run says.
      seed: of episodes and sampled actions; None for the run's.
      gif: file to draw the first episode to.
      gif_frames: pictures in it at most; longer episodes are shown by every n-th step.

    Returns:
      What was judged and how it did, as JSON can tell it.

    Raises:
      ConfigError: no run or no weights there, an impossible setting, or nothing to draw.
    """
    if weights not in ("last", "best"):
        raise ConfigError(f"--weights={weights} must be last or best")
    config, on_host = _read(workdir)
    config = _change(config, seed=seed)
    config = _change(
        config, evaluation=_change(config.evaluation, episodes=num_episodes, greedy=greedy)
    )
    shots = Film(gif_frames)
    judge = (_host_judge if on_host else _judge)(config)
    key = prng.key(config.seed)
    like = jax.eval_shape(judge.agent.init, key)
    loaded, update = checkpoint.load_weights(workdir, weights, like)
    # Bound to no device, so that the mesh and the one device of a film can both take them.
    loaded = jax.device_put(jax.device_get(loaded))
    key = parts.evaluation_key(key, jnp.int32(update))
    if gif is not None:
        judge.check()
    path = None if gif is None else _gif_path(gif)
    result = {
        "env": config.env,
        "agent": config.agent,
        "weights": weights,
        "update": update,
        "env_steps": update * config.num_envs * config.unroll_length,
        "seed": config.seed,
        "greedy": config.evaluation.greedy,
        **_statistics(jax.device_get(judge.play(loaded, key))),
    }
    if path is not None:
        drawn = judge.film(loaded, key, shots)
        render.write_gif(path, shots.pictures)
        result |= {
            "gif": str(path),
            "gif_frames": len(shots.pictures),
            "gif_return": float(drawn.ret[0]),
            "gif_length": int(drawn.length[0]),
        }
    return result


def _statistics(played: Episodes) -> dict[str, int | float]:
    return {
        "episodes": int(played.ret.size),
        "complete": int(played.complete.sum()),
        "return_mean": float(played.ret.mean()),
        "return_std": float(played.ret.std()),
        "return_min": float(played.ret.min()),
        "return_max": float(played.ret.max()),
        "length_mean": float(played.length.mean()),
    }


def text(result: Mapping[str, Any]) -> str:
    """What ``evaluate`` found, for people."""
    lines = [
        "{agent} on {env}, {weights} weights: update {update:,}, {env_steps:,} steps",
        "{episodes:,} episodes, {how}, seed {seed}",
        "return {return_mean:,.2f} +- {return_std:,.2f}, "
        "from {return_min:,.2f} to {return_max:,.2f}",
        "length {length_mean:,.1f}",
    ]
    if result["complete"] < result["episodes"]:
        lines[1] += " ({complete:,} came to their end, the others to evaluation.max_steps)"
    if "gif" in result:
        lines.append(
            "{gif}: {gif_frames:,} frames of an episode of {gif_length:,} steps, "
            "return {gif_return:,.2f}"
        )
    how = "greedy" if result["greedy"] else "sampled"
    return "\n".join(lines).format(how=how, **result)


def _define() -> flags.FlagValues:
    values = flags.FlagValues()
    flags.DEFINE_string("workdir", None, "The run's folder", flag_values=values)
    flags.DEFINE_enum("weights", "last", ["last", "best"], "Which to load", flag_values=values)
    flags.DEFINE_integer(
        "episodes", None, "How many; default: as the run's evaluations", flag_values=values
    )
    flags.DEFINE_bool(
        "greedy", None, "The most probable action, else sampled; default: as the run's evaluations",
        flag_values=values,
    )  # fmt: skip
    flags.DEFINE_integer("seed", None, "Default: the run's", flag_values=values)
    flags.DEFINE_string("gif", None, "File to draw an episode to", flag_values=values)
    flags.DEFINE_integer("gif_frames", GIF_FRAMES, "In the file at most", flag_values=values)
    flags.DEFINE_bool("json", False, "Print a JSON object", flag_values=values)
    return values


def _command(argv: Sequence[str]) -> None:
    values = _define()
    if any(argument in ("-h", "--help", "-help") for argument in argv):
        print(f"usage: python -m podracer.evaluate --workdir=FOLDER\n{values.get_help()}")
        return
    try:
        rest = values(list(argv))
    except flags.Error as error:
        raise ConfigError(str(error)) from error
    if len(rest) > 1:
        raise ConfigError(f"unexpected arguments: {' '.join(rest[1:])}")
    if values["workdir"].value is None:
        raise ConfigError("--workdir is missing; give a run's folder, as --workdir=runs/cartpole")
    given = values.flag_values_dict()
    as_json = given.pop("json")
    result = evaluate(given.pop("workdir"), num_episodes=given.pop("episodes"), **given)
    print(json.dumps(result) if as_json else text(result))


def main(argv: Sequence[str] | None = None) -> int:
    """Judges as a command line says; returns the exit code, see ``cli``.

    Args:
      argv: with the program's name first; None takes ``sys.argv``.
    """
    return cli.exit_code(lambda: _command(sys.argv if argv is None else argv))


if __name__ == "__main__":
    sys.exit(main())
