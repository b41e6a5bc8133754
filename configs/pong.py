"""Pong of envpool, by V-trace with IMPALA's shallow network.

    python -m podracer.sebulba --config=configs/pong.py

Protocol: 4 frames skipped, 84 x 84 gray frames of which 4 are stacked, up to 29 no-ops and FIRE at
the start, no sticky actions (``repeat_action_probability`` 0), the game's own minimal set of
actions, no life loss (Pong has no lives), rewards clipped to their sign, games of at most 27,000
steps (half an hour); returns are those of the game.

Hardware: 2 CPU cores, 56 minutes (2.4 K steps a second). Expected: with seed 0 it rises from -20.3
at first over -11.6 after half of the steps to -1.8, of -21 to 21, while it explores; the final,
greedy evaluation was 0.3 (docs/pong.svg). The learning rate is 0 by then: to go on, give the same
command more total_steps. Nature's network with 2 minibatches of 1,024 steps had learned nothing
after 3.1 M steps: what counts are gradient steps.
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
