"""The mesh: what its documentation promises of reproducibility."""

import re

import jax
import pytest

from podracer.distributed import mesh


def test_xla_knows_the_flags_of_reproducible_runs():
    flags = dict(re.findall(r"--(xla_\w+)=(\w+)", mesh.__doc__))
    assert flags == {"xla_gpu_deterministic_ops": "true"}
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    assert lowered.compile({name: value == "true" for name, value in flags.items()})(1.0) == 2.0
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_gpu_no_such_flag"):
        lowered.compile({"xla_gpu_no_such_flag": True})
