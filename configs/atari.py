"""Atari's Pong from envpool, or by ``--config.env`` another game, by PPO or V-trace.

    python -m podracer.sebulba --config=configs/atari.py
    python -m podracer.sebulba --config=configs/atari.py --config.env=envpool:Breakout-v5 \
--config.total_steps=10_000_000

Protocol: 4 frames skipped; 84 x 84 grayscale frames, 4 of them stacked; up to 29 no-ops and FIRE at
the start; no sticky actions (``repeat_action_probability`` 0); the game's own minimal set of
actions; a lost life ends an episode for the agent (Pong has no lives); rewards clipped to their
sign; games of at most 27,000 steps (half an hour). Returns are those of whole games.

Over 4 devices (3 learners) ``--config.num_envs=24`` divides evenly, over 8 devices (6 learners)
``--config.num_envs=48``: they have to be a multiple of learners times actor threads.

Result: see docs/results.md. Hardware: one core of an AMD EPYC, about 70 minutes for Pong.
"""

import ml_collections

from podracer.config import default_config
from podracer.config.atari import PROTOCOL


def get_config() -> ml_collections.ConfigDict:
    config = default_config()
    config.env = "envpool:Pong-v5"
    config.env_kwargs = {**PROTOCOL, "episodic_life": True}
    config.total_steps = 4_000_000
    config.num_envs = 16
    config.unroll_length = 128
    config.learning_rate = 5e-4
    config.num_epochs = 3
    config.num_minibatches = 8
    config.ppo.advantage_normalization = "minibatch"
    config.network.torso = "shallow"
    config.network.activation = "relu"
    config.network.shared = True
    config.evaluation.episodes = 16
    return config
