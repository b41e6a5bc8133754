"""MinAtar by MuZero with a search of 8 simulations; the game is named after a colon.

    python -m podracer.anakin --config=configs/minatar_muzero.py
    python -m podracer.anakin --config=configs/minatar_muzero.py:Asterix --workdir=runs/asterix

States are vectors: MinAtar's convolutional network represents the 10 x 10 observations, and the
model itself has dense layers only, which a CPU computes much faster than convolutions.

Result: see docs/results.md.
Hardware: one core of an AMD EPYC (family 25, model 17) beside other programs, 7 minutes.
"""

import ml_collections

from podracer.config import default_config


def get_config(game: str = "Breakout") -> ml_collections.ConfigDict:
    config = default_config("muzero")
    config.env = f"gymnax:{game}-MinAtar"
    config.total_steps = 1_000_000
    config.num_envs = 64
    config.unroll_length = 4
    config.discount = 0.99
    config.value_cost = 1.0
    config.network.torso = "minatar"
    config.replay.capacity = 51_200
    config.replay.begin = 10_000
    config.muzero.bootstrap = "target"
    config.muzero.unroll = 2
    config.muzero.n_step = 5
    config.muzero.relative_range = 0.8
    config.muzero.largest_value = 60.0
    config.muzero.atoms = 61
    config.muzero.model.size = 128
    config.muzero.model.hidden = (128,)
    config.muzero.search.prior_exponent = 0.9
    # Nothing is random in Breakout but the ball's first direction: a policy that becomes certain
    # early repeats one path.
    config.muzero.search.least_range = 1.0 if game == "Breakout" else 1e-3
    return config
