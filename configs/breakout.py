"""Atari Breakout from envpool, by V-trace with IMPALA's shallow network.

    python -m podracer.sebulba --config=configs/breakout.py

Protocol: sticky actions with probability 0.25 and the full set of 18 actions, as in Machado et al.,
2018 (https://arxiv.org/abs/1709.06009); 4 frames skipped; 84 x 84 grayscale frames, 4 of them
stacked; games of at most 27,000 steps (half an hour). Unlike Machado et al., losing a life ends an
episode for the agent (``episodic_life``), FIRE starts the ball (``use_fire_reset``), and rewards
are clipped to their sign. Returns are those of whole games.

Result: with seed 0 the training return rises from 1.5 to 24 at half of the steps and 40 at the
end; the final, greedy evaluation is 51.8. Hardware: 2 cores of an AMD EPYC, 33 minutes (2.5 K
steps/s). The learning rate has reached 0 by then: to train longer, resume with a larger
``total_steps``.
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
    config.vtrace.clip = 0.0
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
