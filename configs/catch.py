"""Catch, the example of the Podracer report's notebook on Anakin, by its algorithm, Q(lambda).

    python -m podracer.anakin --config=configs/catch.py

Result: a final, greedy evaluation of 1.0, the maximum, with each of the seeds 0 to 4. Hardware: one
core of an AMD EPYC, 28 seconds for the five seeds in one program, beside another training.
"""

import ml_collections

from podracer.config import default_config


def get_config() -> ml_collections.ConfigDict:
    config = default_config("q_lambda")
    config.env = "gymnax:Catch-bsuite"
    config.total_steps = 200_000
    return config
