"""A Gymnasium environment that observes a dictionary with an action mask."""

import gymnasium
import numpy as np
from gymnasium import spaces


class Dictionary(gymnasium.Env):
    """Of four actions, two are legal at a time, and the higher one of them has a reward of 1.

    An episode has six steps. An illegal action is an error.
    """

    action_space = spaces.Discrete(4)
    observation_space = spaces.Dict(
        {
            "image": spaces.Box(0, 255, (3, 6, 5), np.uint8),
            "inner": spaces.Dict(
                {"kind": spaces.Discrete(3, start=1), "switches": spaces.MultiBinary(2)}
            ),
            "action_mask": spaces.Box(0, 1, (4,), np.int8),
        }
    )

    def __init__(self):
        self._image = np.arange(90, dtype=np.uint8).reshape(3, 6, 5)
        self._steps = 0

    def _observe(self):
        even = self._steps % 2 == 0
        mask = np.array([even, not even, not even, even], np.int8)
        inner = {"kind": 2 - self._steps % 2, "switches": np.array([0, 1], np.int8)}
        return {"image": self._image, "inner": inner, "action_mask": mask}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._steps = 0
        return self._observe(), {}

    def step(self, action):
        now = self._observe()
        if not now["action_mask"][action]:
            raise ValueError(f"action {action} is illegal at step {self._steps}")
        # The higher one of the legal actions, which is 3 or 2.
        reward = float(action >= 2)
        self._steps += 1
        return self._observe(), reward, self._steps == 6, False, {}


gymnasium.register("Dictionary-v0", Dictionary)
