"""The mesh: what its documentation promises, and its order of devices and types of arrays."""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from podracer.distributed import mesh


def test_xla_knows_the_flags_of_reproducible_runs():
    flags = dict(re.findall(r"--(xla_\w+)=(\w+)", mesh.__doc__))
    assert flags == {"xla_gpu_deterministic_ops": "true"}
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    assert lowered.compile({name: value == "true" for name, value in flags.items()})(1.0) == 2.0
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_gpu_no_such_flag"):
        lowered.compile({"xla_gpu_no_such_flag": True})


def test_devices_are_grouped_by_process_in_whatever_order_jax_lists_them(monkeypatch):
    """On a slice, neighbours on the torus may belong to different hosts."""
    listed = [SimpleNamespace(id=i, process_index=i % 2, platform="tpu") for i in range(4)]

    def local_devices(process_index=0):
        return [device for device in listed if device.process_index == process_index]

    monkeypatch.setattr(jax, "devices", lambda: listed)
    monkeypatch.setattr(jax, "local_devices", local_devices)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    found = mesh.initialize_devices(1, required=False)
    assert [device.id for device in found] == [0, 2, 1, 3]


def test_what_was_traced_with_shapes_is_not_traced_again_with_the_arrays():
    """An environment's clock may be a weakly typed 0."""
    devices, specs = mesh.make_mesh(jax.devices()[:2], 1), {"clock": P(), "keys": P("devices")}
    init = jax.jit(
        mesh.per_device(
            lambda: {"clock": 0 * jnp.asarray(1), "keys": jnp.ones(3)}, devices, (), specs
        )
    )
    traced = []
    step = jax.jit(lambda state: traced.append(state))
    step.trace(mesh.sharded_shapes(jax.eval_shape(init), devices, specs))
    state = init()
    assert state["clock"].weak_type
    step.lower(state)
    assert len(traced) == 1
