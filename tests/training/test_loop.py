"""The rows of metrics that the training loop makes."""

import numpy as np
import pytest

from podracer.training.loop import _means


def test_losses_are_means_over_the_updates_that_had_gradient_steps():
    """Those that waited for a replay to fill report zeros."""
    losses = {"total": np.array([0.0, 0.0, 3.0, 5.0]), "replay/fill": np.arange(1, 5) / 4}
    waited = {**losses, "replay/learning": np.array([0.0, 0.0, 1.0, 1.0])}
    assert _means(waited) == {"total": 4.0, "replay/fill": 0.625, "replay/learning": 0.5}
    nothing = {**losses, "replay/learning": np.zeros(4)}
    assert _means(nothing) == {"replay/fill": 0.625, "replay/learning": 0.0}
    assert _means({"total": losses["total"]}) == {"total": pytest.approx(2.0)}
