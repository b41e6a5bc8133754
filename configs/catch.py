"""Catch, the example of the Podracer report's notebook on Anakin, by its algorithm, Q(lambda).

python -m podracer.anakin --config=configs/catch.py
"""

import ml_collections

from podracer.config import default_config


def get_config() -> ml_collections.ConfigDict:
    config = default_config("q_lambda")
    config.env = "gymnax:Catch-bsuite"
    config.total_steps = 200_000
    return config
