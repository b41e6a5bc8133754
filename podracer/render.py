"""Drawing an episode: its pictures, and the animated GIF that they make."""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from podracer import episodes
from podracer.config import EvaluationConfig
from podracer.episodes import Episodes, HostEvaluation
from podracer.errors import ConfigError
from podracer.types import (
    Agent,
    Array,
    ArrayTree,
    DrawnPool,
    Environment,
    HostEnvironment,
    HostStep,
    Weights,
)

# The longer side of a picture, in pixels: larger ones shrink, smaller ones grow by whole factors.
SIDE = 320
# A picture is shown so long; GIFs count in hundredths of a second.
MILLISECONDS = 40
COLORS = 128
# Pictures of an episode that its colours are taken from.
SAMPLES = 16


class Film:
    """Pictures of an episode whose length is not known before its end.

    No more than ``most`` at any time, and evenly spaced: when there would be more, every other one
    goes, and only every other of those to come is drawn.
    """

    def __init__(self, most: int):
        """``most`` pictures, 2 or more."""
        if most < 2:
            raise ConfigError(f"--gif_frames={most} must be 2 or more")
        self.pictures: list[Image.Image] = []
        self._most, self._stride, self._offered = most, 1, 0

    def offer(self, draw: Callable[[], np.ndarray]) -> None:
        """The next step, drawn ``[H, W, 3]`` if it is to be shown."""
        if len(self.pictures) == self._most and self._offered % self._stride == 0:
            self.pictures = self.pictures[::2]
            self._stride *= 2
        if self._offered % self._stride == 0:
            self.pictures.append(resize(Image.fromarray(draw())))
        self._offered += 1


def resize(picture: Image.Image) -> Image.Image:
    """The same picture, at most ``SIDE`` pixels in width and height and not much less."""
    if max(picture.size) > SIDE:
        factor = SIDE / max(picture.size)
        width, height = (max(1, round(n * factor)) for n in picture.size)
        return picture.resize((width, height), Image.Resampling.BOX)
    factor = SIDE // max(picture.size)
    width, height = picture.size
    return picture.resize((width * factor, height * factor), Image.Resampling.NEAREST)


def write_gif(path: pathlib.Path, pictures: Sequence[Image.Image]) -> None:
    """Writes an animation that repeats. One palette serves all, so that colours don't flicker."""
    samples = [np.asarray(picture) for picture in pictures[:: -(-len(pictures) // SAMPLES)]]
    palette = Image.fromarray(np.concatenate(samples)).quantize(COLORS)
    first, *others = (p.quantize(palette=palette, dither=Image.Dither.NONE) for p in pictures)
    first.save(
        path, format="GIF", save_all=True, append_images=others, duration=MILLISECONDS, loop=0
    )


def check(name: str, env: Environment) -> None:
    """Raises ``ConfigError`` if an environment can't be drawn; draws its first state to see."""
    if env.render is None:
        raise ConfigError(f"{name} can't be drawn")
    env_state, _ = jax.jit(env.reset)(jax.random.key(0))
    env.render(jax.device_get(env_state))


def film(
    env: Environment,
    agent: Agent,
    config: EvaluationConfig,
    weights: Weights,
    key: Array,
    shots: Film,
) -> Episodes:
    """Plays what is the first episode of an evaluation by this key, and draws it.

    Args:
      env: one that ``check`` passes.
      agent: who acts.
      config: how long, and whether greedily.
      weights: with what.
      key: of the evaluation.
      shots: where the pictures go.
    """
    render = env.render
    assert render is not None
    playing = jax.jit(partial(episodes.begin, env, agent))(key, jnp.zeros(1, jnp.int32))
    advance = jax.jit(partial(episodes.advance, env, agent, config))
    while episodes.running(config, playing):
        shots.offer(lambda env_state=playing.now.env_state: render(_first(env_state)))
        playing = advance(weights, key, playing)
    return jax.device_get(playing.done)


def _first(env_state: ArrayTree) -> ArrayTree:
    return jax.tree.map(lambda x: x[0], jax.device_get(env_state))


class Filmed:
    """A pool of which every arrival is offered to a film; see ``types.Pool``."""

    def __init__(self, pool: DrawnPool, shots: Film):
        self._pool, self._shots = pool, shots

    def reset(self) -> HostStep:
        return self._filmed(self._pool.reset())

    def step(self, action: np.ndarray) -> HostStep:
        return self._filmed(self._pool.step(action))

    def _filmed(self, step: HostStep) -> HostStep:
        self._shots.offer(self._pool.render)
        return step

    def close(self) -> None:
        self._pool.close()


def check_host(name: str, env: HostEnvironment) -> None:
    """Raises ``ConfigError`` if an environment can't be drawn; draws its first state to see."""
    if env.make_drawn is None:
        raise ConfigError(f"{name} can't be drawn")
    pool = env.make_drawn(0)
    try:
        pool.reset()
        pool.render()
    finally:
        pool.close()


def film_host(
    env: HostEnvironment,
    agent: Agent,
    config: EvaluationConfig,
    weights: Weights,
    key: Array,
    seed: int,
    shots: Film,
) -> Episodes:
    """The same as ``film``, of an environment of the host with this seed."""
    make_drawn = env.make_drawn
    assert make_drawn is not None
    one = dataclasses.replace(config, episodes=1)
    evaluation = HostEvaluation(env, agent, one, lambda: Filmed(make_drawn(seed), shots))
    try:
        return evaluation(weights, key, lambda _: None)
    finally:
        evaluation.close()
