"""Breakout of envpool, by V-trace with IMPALA's shallow network.

    python -m podracer.sebulba --config=configs/breakout.py

Protocol: sticky actions of .25 and the full set of 18 actions, as of Machado et al. 2018
(https://arxiv.org/abs/1709.06009); 4 frames skipped, 84 x 84 gray frames of which 4 are stacked,
games of at most 27,000 steps (half an hour). Unlike theirs, a lost life ends an episode for the
agent (``episodic_life``), FIRE serves the ball (``use_fire_reset``), and rewards are clipped to
their sign; returns are those of whole games.

Hardware: 2 CPU cores, 33 minutes (2.5 K steps a second). Expected: with seed 0 a return that rises
from 1.5 at first over 24 after half of the steps to 40 while it explores; the final, greedy
evaluation was 51.8. The learning rate is 0 by then: to go on, give the same command more
total_steps.
"""

import ml_collections

from podracer.config import default_config


def get_config() -> ml_collections.ConfigDict:
    config = default_config()
    config.env = "envpool:Breakout-v5"
    config.env_kwargs = {
        "repeat_action_probability": 0.25,
        "full_action_space": True,
        "episodic_life": True,
        "reward_clip": True,
        "noop_max": 1,
        "use_fire_reset": True,
        "max_episode_steps": 27_000,
    }
    config.agent = "vtrace"
    config.total_steps = 5_000_000
    config.num_envs = 96
    config.unroll_length = 32
    config.learning_rate = 6e-4
    config.num_epochs = 1
    config.num_minibatches = 16
    config.network.torso = "shallow"
    config.network.activation = "relu"
    config.network.shared = True
    config.evaluation.episodes = 16
    return config
