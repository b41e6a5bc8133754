"""The mesh: what its documentation promises of reproducibility."""

import re
from types import SimpleNamespace

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
