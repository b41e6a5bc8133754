"""Atari Pong from envpool, by V-trace with IMPALA's shallow network.

    python -m podracer.sebulba --config=configs/pong.py

Protocol: 4 frames skipped; 84 x 84 grayscale frames, 4 of them stacked; up to 29 no-ops and FIRE at
the start; no sticky actions (``repeat_action_probability`` 0); the game's own minimal set of
actions; no episodes per life (Pong has no lives); rewards clipped to their sign; games of at most
27,000 steps (half an hour). Returns are those of whole games.

Result: with seed 0 the training return (from -21 to 21) rises from -20.3 to -11.6 at half of the
steps and -1.8 at the end; the final, greedy evaluation is 0.3 (docs/pong.svg). Hardware: 2 cores
of an AMD EPYC, 56 minutes (2.4 K steps/s). The learning rate has reached 0 by then: to train
longer, resume with a larger ``total_steps``. The number of gradient steps matters most: the Nature
CNN with 2 minibatches of 1,024 steps had learned nothing after 3.1 M steps.
"""

import ml_collections

from podracer.config import default_config


def get_config() -> ml_collections.ConfigDict:
    config = default_config()
    config.env = "envpool:Pong-v5"
    config.env_kwargs = {
        "repeat_action_probability": 0.0,
        "full_action_space": False,
        "episodic_life": False,
        "reward_clip": True,
        "noop_max": 30,
        "use_fire_reset": True,
        "max_episode_steps": 27_000,
    }
    config.agent = "vtrace"
    config.vtrace.clip = 0.0
    config.total_steps = 8_000_000
    config.num_envs = 48
    config.unroll_length = 32
    config.learning_rate = 6e-4
    config.num_epochs = 1
    config.num_minibatches = 8
    config.network.torso = "shallow"
    config.network.activation = "relu"
    config.network.shared = True
    config.evaluation.episodes = 16
    return config
