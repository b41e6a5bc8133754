"""A Gymnasium environment that sleeps forever in one of its steps, and reports its process."""

import os
import pathlib
import time

import gymnasium
import numpy as np


class Sleeper(gymnasium.Env):
    """Leaves a file named after its process in ``folder``; its 20th step never ends."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, folder: str):
        self._steps = 0
        (pathlib.Path(folder) / str(os.getpid())).touch()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self._steps += 1
        if self._steps == 20:
            time.sleep(3600)
        return np.zeros(2, np.float32), 0.0, False, False, {}


gymnasium.register("Sleeper-v0", Sleeper)
