"""Evaluating a saved run: episode statistics, and one episode as an animated GIF."""

import dataclasses
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from podracer import config as config_lib
from podracer import envs
from podracer.acting import rendering
from podracer.acting.evaluation import make_evaluation
from podracer.acting.host_evaluation import make_host_evaluation, pool_seeds
from podracer.acting.policy import Policy
from podracer.acting.rendering import FrameRecorder
from podracer.acting.statistics import Episodes, summarize
from podracer.config import Config
from podracer.config.members import Member
from podracer.config.sizes import auto_cpu_devices
from podracer.distributed import mesh as mesh_lib
from podracer.envs import permission
from podracer.errors import ConfigError
from podracer.monitoring.figures import EVALUATION
from podracer.monitoring.formatting import mean_and_error, number
from podracer.storage import checkpoint, upgrading
from podracer.storage.workdir import read_rows, read_run, writer
from podracer.training import builder
from podracer.training.rows import comparable
from podracer.types import Agent, Array, HostEnvironment, Row, Weights
from podracer.xla_cpu import prng

# The default maximum number of frames in a GIF: 24 seconds, enough for a whole CartPole episode.
GIF_FRAMES = 600


class Evaluator(NamedTuple):
    """The evaluation of one architecture.

    Attributes:
      agent: the agent that acts.
      play: ``(weights, key) -> Episodes``, as the run's own evaluation plays them.
      check_rendering: ``()``, raises ``ConfigError`` if the environment can't be drawn.
      record: ``(weights, key, recorder) -> Episodes``, plays and draws the first of those episodes.
    """

    agent: Agent
    play: Callable[[Weights, Array], Episodes]
    check_rendering: Callable[[], None]
    record: Callable[[Weights, Array, FrameRecorder], Episodes]


def _make_host_environment(config: Config) -> HostEnvironment:
    newest_frame = config.sebulba.newest_frame
    return envs.make_host_environment(
        config.env,
        config.env_kwargs,
        config.env_params,
        observed=config.observed,
        newest_frame=newest_frame,
    )


def _make_evaluator(config: Config) -> Evaluator:
    """Evaluates in an environment written in JAX."""
    devices = mesh_lib.initialize_devices(
        config.cpu_devices or auto_cpu_devices(config), required=False
    )
    env = builder.make_environment(config)
    agent = builder.make_agent(config.of_group, env.spec)
    settings, replicated = config.evaluation, mesh_lib.REPLICATED
    local = make_evaluation(env, agent, len(devices), settings)
    play = mesh_lib.per_device(local, mesh_lib.make_mesh(devices), replicated, replicated)

    def record(weights: Weights, key: Array, recorder: FrameRecorder) -> Episodes:
        return rendering.record_episode(env, agent, settings, weights, key, recorder)

    return Evaluator(agent, jax.jit(play), lambda: rendering.check(config.env, env), record)


def _make_host_evaluator(config: Config) -> Evaluator:
    """Evaluates in host environments, with the seeds that the run's own evaluation uses."""
    env = _make_host_environment(config)
    agent = builder.make_agent(config, env.spec)

    def play(weights: Weights, key: Array) -> Episodes:
        evaluation = make_host_evaluation(env, agent, config)
        try:
            return evaluation(weights, key, lambda _: None)
        finally:
            evaluation.close()

    def record(weights: Weights, key: Array, recorder: FrameRecorder) -> Episodes:
        (seed,) = pool_seeds(config, config.environments + np.arange(1), 0)
        return rendering.record_host_episode(
            env, agent, config.evaluation, weights, key, seed, recorder
        )

    return Evaluator(agent, play, lambda: rendering.check_host(config.env, env), record)


class SavedRun(NamedTuple):
    """One agent of a saved run.

    Attributes:
      config: the run's config as if this agent had been trained alone, with the settings that it
        had with these weights.
      on_host: whether the environment is stepped on the host.
      num_agents: number of agents that the run trained.
      member: the number of this agent.
      update: the number of updates that made the weights.
    """

    config: Config
    on_host: bool
    num_agents: int
    member: int
    update: int


def best_member(workdir: epath.PathLike, members: Sequence[Member], rows: Sequence[Row]) -> int:
    """The number of the agent with the largest return in the last evaluation of these rows."""
    if len(members) == 1:
        return 0
    names = [f"{member.name}/{EVALUATION}" for member in members]
    evaluations = [row for row in rows if names[0] in row]
    if not evaluations:
        raise ConfigError(
            f"--member=best: {workdir} has no evaluation up to these weights; give a number"
        )
    return int(comparable([evaluations[-1][name] for name in names]).argmax())


def read(
    workdir: epath.PathLike, member: int | str, weights: str | int, allow_env: str | None
) -> SavedRun:
    """Reads a run's config; nothing that the config names is imported or opened.

    ``weights`` and ``member`` are as of ``evaluate``.

    Raises:
      ConfigError: the folder is not a run of an agent, the run has no such member or weights, or
        its environment needs a permission that ``allow_env`` does not give.
    """
    content = read_run(workdir)
    with upgrading.explained(writer(content)):
        config = config_lib.parse(content["config"])
    if content["architecture"] == "meta":
        raise ConfigError(
            f"{workdir} is a run of podracer.anakin.meta, which has learned an update rule and no "
            "policy to play with; name a run of podracer.anakin or podracer.sebulba"
        )
    permission.check_permission(config.env, config.env_kwargs, allow_env)
    members, update = config.members, checkpoint.find(workdir, _which(weights))
    step = update * config.steps_per_update
    rows = []
    if member == "best" or config.selection.every:
        rows = [row for row in read_rows(workdir) if row["step"] <= step]
    if member == "best":
        member = best_member(workdir, members, rows)
    if str(member) not in map(str, range(len(members))):
        raise ConfigError(
            f"--member={member} must be best, or from 0 to {len(members) - 1}: the run has "
            f"{len(members)} agents"
        )
    number = int(member)
    found = members[number].at(rows[-1] if rows else {})
    on_host = content["architecture"] == "sebulba"
    return SavedRun(config.alone(found), on_host, len(members), number, update)


def _which(weights: str | int) -> str | int:
    """A choice of weights as ``checkpoint.find`` takes it, in which numbers may be text."""
    if isinstance(weights, int) or weights in checkpoint.WHICH:
        return weights
    if not weights.isdecimal():
        raise ConfigError(f"--weights={weights} must be last, best, or the number of a checkpoint")
    return int(weights)


def load_weights(workdir: epath.PathLike, run: SavedRun, agent: Agent) -> Weights:
    """The weights of a run's agent."""
    like = jax.eval_shape(agent.init, prng.key(0))
    count = run.num_agents
    if count > 1:
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape), x.dtype), like)
    weights, _ = checkpoint.load_weights(workdir, run.update, like)
    if count > 1:
        weights = jax.tree.map(lambda x: x[run.member], weights)
    # Not committed to a device, so that both the mesh and the single device of a recording can use
    # them.
    return jax.device_put(jax.device_get(weights))


def _override(config: Any, **values: Any) -> Any:
    """A section of a config with other values; None leaves a value as it is."""
    given = {key: value for key, value in values.items() if value is not None}
    return dataclasses.replace(config, **given)


def _gif_path(gif: str | os.PathLike[str]) -> pathlib.Path:
    path = pathlib.Path(gif)
    if path.suffix.lower() != ".gif":
        raise ConfigError(f"--gif={path} must end in .gif, as {path.with_suffix('.gif')} does")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        raise ConfigError(f"--gif={path} can't be written: {error.strerror}") from error
    return path


def evaluate(
    workdir: epath.PathLike,
    *,
    weights: str | int = "last",
    member: int | str = 0,
    num_episodes: int | None = None,
    greedy: bool | None = None,
    seed: int | None = None,
    gif: str | os.PathLike[str] | None = None,
    gif_frames: int = GIF_FRAMES,
    allow_env: str | None = None,
) -> dict[str, Any]:
    """Plays whole episodes as the run's own evaluation does.

    With the run's settings and its last weights, the result equals the run's last evaluation.
    Environments of envpool are an exception if a run evaluated more than once: their random
    numbers continue from one evaluation to the next.

    Args:
      workdir: workdir of a run of either architecture.
      weights: "last", or "best" according to the run's evaluations, or the number of a checkpoint
        that the run has kept.
      member: which agent of a run with several: a number, from 0, or "best" for the one with the
        largest return in the run's last evaluation of these weights. With the run's seed the best
        one plays the episodes that it was chosen by; another ``seed`` avoids that bias.
      num_episodes: number of episodes; None takes the run's evaluation.episodes.
      greedy: act without exploration, see ``EvaluationConfig``; None takes the run's setting.
      seed: seed of episodes and sampled actions; None takes the member's own.
      gif: file to write the first episode to, as an animated GIF.
      gif_frames: maximum number of frames; of longer episodes only every n-th step is drawn.
      allow_env: the id of the run's environment. It permits the environment to import the module
        that the id names and to use files that env_kwargs name. Environments that do so need it,
        because the workdir may come from a stranger.

    Returns:
      What was evaluated and its statistics, as values that JSON can represent.

    Raises:
      ConfigError: the workdir holds no run or no weights, a setting is impossible, or the
        environment needs permission or can't be drawn.
    """
    run = read(workdir, member, weights, allow_env)
    config = _override(run.config, seed=seed)
    config = _override(
        config, evaluation=_override(config.evaluation, episodes=num_episodes, greedy=greedy)
    )
    recorder = FrameRecorder(gif_frames)
    evaluator = (_make_host_evaluator if run.on_host else _make_evaluator)(config)
    loaded = load_weights(workdir, run, evaluator.agent)
    key = builder.evaluation_key(prng.key(config.seed), jnp.int32(run.update))
    if gif is not None:
        evaluator.check_rendering()
    path = None if gif is None else _gif_path(gif)
    result = {
        "env": config.env,
        "agent": config.agent,
        "weights": weights,
        "member": run.member,
        "num_agents": run.num_agents,
        "update": run.update,
        "env_steps": run.update * config.steps_per_update,
        "seed": config.seed,
        "greedy": config.evaluation.greedy,
        **summarize(jax.device_get(evaluator.play(loaded, key))),
    }
    if path is not None:
        drawn = evaluator.record(loaded, key, recorder)
        result |= _write_gif(path, recorder, drawn)
    return result


def _write_gif(path: pathlib.Path, recorder: FrameRecorder, drawn: Episodes) -> dict[str, Any]:
    """Writes the recorded frames; returns what is reported about them."""
    rendering.write_gif(path, recorder.frames)
    return {
        "gif": str(path),
        "gif_frames": len(recorder.frames),
        "gif_return": float(drawn.ret[0]),
        "gif_length": int(drawn.length[0]),
    }


def load_policy(
    workdir: epath.PathLike,
    *,
    weights: str | int = "last",
    member: int | str = 0,
    greedy: bool | None = None,
    seed: int = 0,
    allow_env: str | None = None,
) -> Policy:
    """The policy of a saved run, to act with from Python.

    Args:
      workdir: workdir of a run of either architecture.
      weights: "last", or "best" according to the run's evaluations, or the number of a checkpoint
        that the run has kept.
      member: which agent of a run with several: a number, from 0, or "best", see ``evaluate``.
      greedy: act without exploration, see ``EvaluationConfig``; None takes the run's setting
        for evaluations.
      seed: seed of sampled actions.
      allow_env: see ``evaluate``.

    Raises:
      ConfigError: the workdir holds no run or no weights, or the environment needs permission.
    """
    run = read(workdir, member, weights, allow_env)
    env = (_make_host_environment if run.on_host else builder.make_environment)(run.config)
    agent = builder.make_agent(run.config.of_group, env.spec)
    loaded = load_weights(workdir, run, agent)
    chosen: bool = run.config.evaluation.greedy if greedy is None else greedy
    return Policy(agent, loaded, env, greedy=chosen, seed=seed)


def describe(result: Mapping[str, Any]) -> str:
    """The result of ``evaluate`` as text."""
    lines = [
        "{agent} on {env}, {weights} weights: update {update:,}, {env_steps:,} steps",
        "{episodes:,} episodes, {how}, seed {seed}",
        "return {mean_and_std}, from {return_min} to {return_max}",
        "length {length_mean}",
    ]
    if result["num_agents"] > 1:
        lines[0] = "member {member} of {num_agents}: " + lines[0]
    if result["complete"] < result["episodes"]:
        lines[1] += " ({complete:,} ended, the others were capped at evaluation.max_steps)"
    if "gif" in result:
        lines.append(
            "{gif}: {gif_frames:,} frames of an episode of {gif_length:,} steps, "
            "return {gif_return}"
        )
    values = {key: number(x) if isinstance(x, float) else x for key, x in result.items()}
    values["how"] = "greedy" if result["greedy"] else "sampled"
    values["mean_and_std"] = mean_and_error(result["return_mean"], result["return_std"])
    return "\n".join(lines).format(**values)
