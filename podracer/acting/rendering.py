"""Drawing an episode: its frames, and the animated GIF made of them."""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from podracer.acting import evaluation
from podracer.acting.host_evaluation import HostEvaluation
from podracer.acting.statistics import Episodes
from podracer.config import EvaluationConfig
from podracer.errors import ConfigError
from podracer.types import (
    Agent,
    Array,
    ArrayTree,
    Environment,
    HostEnvironment,
    HostStep,
    RenderablePool,
    Weights,
)

# The longer side of a frame, in pixels: larger ones shrink, smaller ones grow by whole factors.
SIDE = 320
# How long a frame is shown; GIFs count in hundredths of a second.
MILLISECONDS = 40
COLORS = 128
# Number of frames that the palette of an animation is computed from.
SAMPLES = 16


class FrameRecorder:
    """Frames of an episode whose length is not known before its end.

    It holds at most ``limit`` frames, evenly spaced: when it is full, every other frame is dropped,
    and from then on only every other step is drawn.
    """

    def __init__(self, limit: int):
        """``limit``: the number of frames, 2 or more."""
        if limit < 2:
            raise ConfigError(f"--gif_frames={limit} must be 2 or more")
        self.frames: list[Image.Image] = []
        self._limit, self._stride, self._steps = limit, 1, 0

    def record(self, draw: Callable[[], np.ndarray]) -> None:
        """Records a step; ``draw`` returns ``[H, W, 3]`` and is called only if the step is kept."""
        if len(self.frames) == self._limit and self._steps % self._stride == 0:
            self.frames = self.frames[::2]
            self._stride *= 2
        if self._steps % self._stride == 0:
            self.frames.append(resize(Image.fromarray(draw())))
        self._steps += 1


def resize(frame: Image.Image) -> Image.Image:
    """The frame scaled to at most ``SIDE`` pixels in width and height, and not much less."""
    if max(frame.size) > SIDE:
        factor = SIDE / max(frame.size)
        width, height = (max(1, round(n * factor)) for n in frame.size)
        return frame.resize((width, height), Image.Resampling.BOX)
    factor = SIDE // max(frame.size)
    width, height = frame.size
    return frame.resize((width * factor, height * factor), Image.Resampling.NEAREST)


def write_gif(path: pathlib.Path, frames: Sequence[Image.Image]) -> None:
    """Writes a looping animation. One palette serves all frames, so that colours don't flicker."""
    samples = [np.asarray(frame) for frame in frames[:: -(-len(frames) // SAMPLES)]]
    palette = Image.fromarray(np.concatenate(samples)).quantize(COLORS)
    first, *others = (x.quantize(palette=palette, dither=Image.Dither.NONE) for x in frames)
    first.save(
        path, format="GIF", save_all=True, append_images=others, duration=MILLISECONDS, loop=0
    )


def check(name: str, env: Environment) -> None:
    """Draws the first state; raises ``ConfigError`` if the environment can't be drawn."""
    if env.render is None:
        raise ConfigError(f"{name} can't be drawn")
    env_state, _ = jax.jit(env.reset)(jax.random.key(0))
    env.render(jax.device_get(env_state))


def record_episode(
    env: Environment,
    agent: Agent,
    config: EvaluationConfig,
    weights: Weights,
    key: Array,
    recorder: FrameRecorder,
) -> Episodes:
    """Plays and draws the episode that is the first of an evaluation with this key.

    Args:
      env: an environment that passes ``check``.
      agent: the agent that acts.
      config: the cap on the episode's length, and whether actions are greedy.
      weights: the agent's weights.
      key: random key of the evaluation.
      recorder: receives the frames.
    """
    env = env.evaluation or env
    render = env.render
    assert render is not None
    state = jax.jit(partial(evaluation.begin, env, agent))(key, jnp.zeros(1, jnp.int32))
    advance = jax.jit(partial(evaluation.advance, env, agent, config))
    while evaluation.running(config, state):
        recorder.record(lambda env_state=state.rollout.env_state: render(_first(env_state)))
        state = advance(weights, key, state)
    return jax.device_get(state.played)


def _first(env_state: ArrayTree) -> ArrayTree:
    return jax.tree.map(lambda x: x[0], jax.device_get(env_state))


class RecordedPool:
    """A pool whose every arrival is recorded; see ``types.Pool``."""

    def __init__(self, pool: RenderablePool, recorder: FrameRecorder):
        self._pool, self._recorder = pool, recorder

    def reset(self) -> HostStep:
        return self._record(self._pool.reset())

    def step(self, action: np.ndarray) -> HostStep:
        return self._record(self._pool.step(action))

    def _record(self, step: HostStep) -> HostStep:
        self._recorder.record(self._pool.render)
        return step

    def close(self) -> None:
        self._pool.close()


def check_host(name: str, env: HostEnvironment) -> None:
    """Draws the first state; raises ``ConfigError`` if the environment can't be drawn."""
    if env.make_renderable is None:
        raise ConfigError(f"{name} can't be drawn")
    pool = env.make_renderable(0)
    try:
        pool.reset()
        pool.render()
    finally:
        pool.close()


def record_host_episode(
    env: HostEnvironment,
    agent: Agent,
    config: EvaluationConfig,
    weights: Weights,
    key: Array,
    seed: int,
    recorder: FrameRecorder,
) -> Episodes:
    """As ``record_episode``, in a host environment with this seed."""
    make_renderable = env.make_renderable
    assert make_renderable is not None
    one = dataclasses.replace(config, episodes=1)
    evaluation = HostEvaluation(
        env, agent, one, lambda: RecordedPool(make_renderable(seed), recorder), np.zeros(1), 1
    )
    try:
        return evaluation(weights, key, lambda _: None)
    finally:
        evaluation.close()
