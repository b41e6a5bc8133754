"""Frames and pictures of an episode."""

import numpy as np
import pytest
from PIL import Image

from podracer import envs
from podracer.acting import rendering
from podracer.xla_cpu import prng


@pytest.mark.parametrize("most", [2, 3, 8])
def test_frames_of_an_episode_of_any_length_are_evenly_spaced_and_limited(most):
    for length in range(1, 50):
        recorder, drawn = rendering.FrameRecorder(most), []
        for step in range(length):
            recorder.record(lambda: drawn.append(step) or np.full((2, 2, 3), step, np.uint8))  # noqa: B023
        steps = [picture.getpixel((0, 0))[0] for picture in recorder.frames]
        stride = steps[1] - steps[0] if len(steps) > 1 else 1
        assert steps == list(range(0, length, stride))
        assert len(steps) <= most
        assert stride == 1 or len(steps) > most // 2
        assert len(drawn) <= most * (1 + np.log2(stride))


@pytest.mark.parametrize(
    ("size", "expected"),
    [((600, 400), (320, 213)), ((64, 64), (320, 320)), ((160, 210), (160, 210))],
)
def test_frames_are_resized_to_a_visible_size(size, expected):
    assert rendering.resize(Image.new("RGB", size)).size == expected


def test_the_state_drawn_is_the_state_passed():
    """gymnax's CartPole, far right and upright, then far left: where it is dark moves along."""
    env = envs.make_environment("gymnax:CartPole-v1", {}, {})
    state, _ = env.reset(prng.key(0))
    centre = {}
    for x in (-1.5, 1.5):
        picture = env.render(state.replace(env=state.env.replace(x=x, theta=0.0)))
        # The cart alone is above the track and below the pole's joint.
        dark = (picture.max(-1) < 50).any(0) & (np.arange(600) > 0)
        rows = picture[290:297].max(-1) < 50
        centre[x] = np.nonzero(rows.all(0))[0].mean()
        assert dark.any()
    np.testing.assert_allclose([centre[-1.5], centre[1.5]], [300 - 187.5, 300 + 187.5], atol=15)
