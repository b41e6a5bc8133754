"""ViZDoom's health gathering in a maze from envpool, by V-trace with IMPALA's shallow network.

    python -m podracer.sebulba --config=configs/vizdoom.py
    python -m podracer.sebulba --config=configs/vizdoom.py \
--config.env=envpool:HealthGathering-v1 --config.total_steps=100_000

The floor of a maze is acid, and an agent that finds no medical kits is dead after about 100 steps.
Vials of poison lie about, too. An episode ends after 525 steps of 4 tics, a minute of the game. The
agent sees the colours of the newest frame. envpool rewards changes of the game's variables, not
what a scenario itself gives out: here 0.04 for each point of health regained, of which a kit
restores 20 or 25, and 1 for each monster killed, in tasks such as ``DefendTheCenter-v1``. In
``HealthGathering-v1``, which has no inner walls and no poison, a return of 17 keeps an agent alive.

ViZDoom starts a process for each environment, and writes ``_vizdoom.ini`` into the current folder.

Result: with seed 0 the maze's training return rises from 0.3, that of random actions, to 4 after
55 K steps, 8 after 100 K and 10 after 147 K, where the run was stopped after 14 minutes.
``HealthGathering-v1``, by the second command, is at 1.6 after 23 K steps, 9 after 38 K, and 17 to
18 from 54 K to the end: agents live for the whole minute. The final evaluation is 17.6. It took 13
minutes. Hardware: one core of an AMD EPYC beside other programs.
"""

import ml_collections

from podracer.config import default_config


def get_config() -> ml_collections.ConfigDict:
    config = default_config()
    config.env = "envpool:HealthGatheringSupreme-v1"
    config.env_kwargs = {
        "stack_num": 1,
        # Else an action is not a choice, but a number for each button.
        "use_combined_action": True,
        # For each point that a variable rises, and for each that it falls.
        "reward_config": {"HEALTH": (0.04, 0.0), "KILLCOUNT": (1.0, 0.0)},
        # Nothing for holding a loaded weapon.
        "selected_weapon_reward_config": {},
    }
    config.agent = "vtrace"
    config.vtrace.lambda_ = 0.95
    config.vtrace.normalize_advantages = True
    config.total_steps = 4_000_000
    config.num_envs = 48
    config.unroll_length = 32
    config.discount = 0.99
    config.learning_rate = 5e-4
    config.num_epochs = 3
    config.num_minibatches = 8
    config.network.torso = "shallow"
    config.network.activation = "relu"
    config.network.shared = True
    config.evaluation.episodes = 32
    return config
