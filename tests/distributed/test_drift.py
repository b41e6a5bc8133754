"""Devices whose weights drift apart are named."""

import jax
import numpy as np
import pytest

from podracer.distributed import drift, mesh
from podracer.errors import DriftError


def drifted(copies: int, wrong: list[int]) -> jax.Array:
    """Zeros replicated on several devices, except that some copies are slightly wrong."""
    devices = jax.devices()[:copies]
    parts = [
        jax.device_put(np.float32([0, 0, 1e-7 if i in wrong else 0]), d)
        for i, d in enumerate(devices)
    ]
    sharding = jax.sharding.NamedSharding(mesh.make_mesh(devices), mesh.REPLICATED)
    return jax.make_array_from_single_device_arrays((3,), sharding, parts)


def test_a_replica_that_drifts_is_named():
    check = drift.make_check(mesh.make_mesh(jax.devices()[:8]))
    check({"w": drifted(8, []), "v": drifted(8, [])}, 7)
    with pytest.raises(DriftError, match=r"update 7 .*: cpu:3 of process 0 differ from 7 of 8"):
        check({"w": drifted(8, []), "v": drifted(8, [3])}, 7)
    with pytest.raises(DriftError, match="there is no majority"):
        drift.make_check(mesh.make_mesh(jax.devices()[:2]))({"w": drifted(2, [1])}, 7)
