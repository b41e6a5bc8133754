"""What an accelerator checks and a CPU does not: implicit copies from a device to the host.

JAX's transfer guard looks at such a copy only where one takes place. On a CPU a numpy array is a
view of the device's memory, so no run on a CPU ever shows a forbidden copy. Here each access is
checked as JAX's C++ checks it on a TPU or a GPU (``PyHostValue::CopyToHostAsync``).
"""

import ctypes
import dataclasses
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax._src.lib import guard_lib

from podracer import anakin, errors, sebulba
from podracer.distributed import mesh
from podracer.training import saved_run
from tests.training.resuming import Stops, resumable

ARRAY: Any = type(jnp.zeros(()))
LEVELS = guard_lib.TransferGuardLevel
# The offset of tp_as_buffer in CPython's PyTypeObject, whose first member is bf_getbuffer.
BUFFER_OFFSET = 20 * ctypes.sizeof(ctypes.c_void_p)


def check_transfer(array) -> None:
    """Raises as JAX does for a transfer from the device to the host that the guard disallows."""
    state = guard_lib.thread_local_state()
    disallowed = state.device_to_host == LEVELS.DISALLOW_EXPLICIT or (
        state.device_to_host == LEVELS.DISALLOW and not state.explicit_device_get
    )
    if disallowed and array._npy_value is None:
        raise jax.errors.JaxRuntimeError(
            f"INVALID_ARGUMENT: Disallowed device-to-host transfer: {array.aval}"
        )


@pytest.fixture
def accelerator(monkeypatch):
    """Makes arrays on the CPU as inaccessible to the host as those on an accelerator."""
    value, copy = ARRAY._value, ARRAY.copy_to_host_async

    def checked_value(array):
        check_transfer(array)
        # A view would keep the CPU from reusing a donated array.
        copied = np.array(value.fget(array))
        copied.flags.writeable = False
        return copied

    def checked_copy(array):
        check_transfer(array)
        return copy(array)

    monkeypatch.setattr(ARRAY, "_value", property(checked_value))
    monkeypatch.setattr(ARRAY, "copy_to_host_async", checked_copy)
    # numpy would access an array's memory directly, which is impossible on an accelerator.
    address = ctypes.c_void_p.from_address(id(ARRAY) + BUFFER_OFFSET).value
    get_buffer = ctypes.c_void_p.from_address(address)
    before, get_buffer.value = get_buffer.value, None
    yield
    get_buffer.value = before


READS = {
    "np.asarray": np.asarray,
    "np.stack": lambda x: np.stack([x, x]),
    "float": lambda x: float(x.addressable_data(0)),
    "bool": bool,
    "copy_to_host_async": lambda x: x.copy_to_host_async(),
    "format": lambda x: f"{x}",
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_the_emulation_rejects_what_an_accelerator_rejects(read, accelerator):
    def array():
        return jax.device_put(np.float32(1))

    read(array())
    with jax.transfer_guard("disallow"):
        with pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed device-to-host"):
            read(array())
        assert jax.device_get(array()) == 1
        with jax.transfer_guard_device_to_host("allow"):
            read(array())
    with jax.transfer_guard("disallow_explicit"), pytest.raises(jax.errors.JaxRuntimeError):
        jax.device_get(array())


def spy_on_saves(monkeypatch) -> list:
    """Records the guard's levels while Orbax copies a state, and the thread that does it."""
    levels, save = [], ocp.CheckpointManager.save

    def recorded(*args, **kwargs):
        state = guard_lib.thread_local_state()
        levels.append((state.device_to_host, state.host_to_device, state.device_to_device))
        assert threading.current_thread() is threading.main_thread()
        return save(*args, **kwargs)

    monkeypatch.setattr(ocp.CheckpointManager, "save", recorded)
    return levels


def stop_and_resume(train, config, workdir, monkeypatch, **options):
    """Stops a run after an update and resumes it."""
    Stops(monkeypatch, 2)
    with pytest.raises(errors.PreemptedError):
        train(config, workdir, quiet=True)
    return train(config, workdir, quiet=True, **options)


CONFIG = {
    "total_steps": 16 * 8 * 6, "checkpoint__every": 2, "evaluation__every": 3,
    "hosts__drift_every": 1,
}  # fmt: skip


def check_run(train, config, workdir, monkeypatch) -> None:
    """Stops, resumes and evaluates a run, and starts another one from its weights."""
    levels = spy_on_saves(monkeypatch)
    result = stop_and_resume(train, config, workdir, monkeypatch, profile=1)
    assert levels
    assert set(levels) == {(LEVELS.ALLOW, LEVELS.DISALLOW, LEVELS.DISALLOW)}
    assert saved_run.evaluate(workdir)["env_steps"] == result.summary["env_steps"]
    short = dataclasses.replace(config, learning_rate=1e-30, total_steps=16 * 8)
    again = train(short, quiet=True, init_from=workdir)
    for a, b in zip(jax.tree.leaves(again.weights), jax.tree.leaves(result.weights), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.slow
def test_a_run_of_anakin_makes_no_copy_that_is_not_allowed(accelerator, tmp_path, monkeypatch):
    check_run(anakin.train, resumable(**CONFIG), tmp_path / "run", monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("learners", [(0,), (1, 2)])
def test_a_run_of_sebulba_makes_no_copy_that_is_not_allowed(
    learners, accelerator, tmp_path, monkeypatch
):
    config = resumable(
        env="dummy:counting", cpu_devices=8, sebulba__actor_devices=(0,),
        sebulba__learner_devices=learners, **CONFIG,
    )  # fmt: skip
    guards, from_parts = [], mesh.from_parts

    def spy(*args):
        guards.append(guard_lib.thread_local_state().host_to_device)
        return from_parts(*args)

    # The worker thread calls it before each update.
    monkeypatch.setattr(mesh, "from_parts", spy)
    check_run(sebulba.train, config, tmp_path / "run", monkeypatch)
    assert set(guards) == {LEVELS.DISALLOW}


@pytest.mark.slow
def test_several_agents_make_no_copy_that_is_not_allowed(accelerator, tmp_path, monkeypatch):
    config = resumable(**CONFIG, num_seeds=2)
    stop_and_resume(anakin.train, config, tmp_path / "run", monkeypatch)
