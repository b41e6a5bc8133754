"""The rows of metrics that the training loop makes."""

import numpy as np

from podracer.learning.learner import Metrics
from podracer.training.rows import of_learner

LOSSES = {"total": np.array([0.0, 0.0, 3.0, 5.0]), "replay/age": np.array([0.0, 0.0, 1.0, 2.0])}
FILL = {"replay/fill": np.arange(1, 5) / 4}


def test_losses_are_means_over_the_updates_that_had_gradient_steps():
    """Those that waited for a replay buffer to fill report zeros."""
    waited = Metrics(LOSSES, FILL, np.array([0.0, 0.0, 1.0, 1.0]))
    assert of_learner(waited) == {
        "loss/total": 4.0, "replay/age": 1.5, "replay/fill": 0.625, "train/learned": 0.5
    }  # fmt: skip
    nothing = Metrics(LOSSES, FILL, np.zeros(4))
    assert of_learner(nothing) == {"replay/fill": 0.625, "train/learned": 0.0}
    assert of_learner(Metrics(LOSSES, {})) == {"loss/total": 2.0, "replay/age": 0.75}
