"""What processes agree on, and how they report their end; no process is started."""

import threading
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from podracer.config import sizes
from podracer.config.sizes import auto_cpu_devices
from podracer.distributed import mesh
from podracer.distributed.processes import Processes
from podracer.errors import ConfigError, PreemptedError
from podracer.sebulba import trainer
from tests.helpers import make_config


class FakeWatchdog:
    """Records its calls, and fails where it would wait for other processes."""

    failed_alone = False

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *arguments: self.calls.append((name, *arguments))

    def wait_until_others_are_alive(self, error):
        self.calls.append(("wait_until_others_are_alive", error))
        raise KeyboardInterrupt


class FakeClient:
    """A key-value store for several threads."""

    def __init__(self):
        self._values, self._changed = {}, threading.Condition()

    def key_value_set(self, key, value):
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def blocking_key_value_get(self, key, milliseconds):
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, milliseconds / 1000):
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")
            return self._values[key]


def connected(counts: list[int]) -> list[Any]:
    """Processes that share a store, each with the number of processes it was started with."""
    client, members = FakeClient(), []
    for index, count in enumerate(counts):
        member: Any = Processes(index, count)
        member._client, member._watchdog = client, FakeWatchdog()
        members.append(member)
    return members


def test_processes_started_with_different_counts_are_rejected_by_all():
    messages = []

    def check(process: Processes) -> None:
        with pytest.raises(ConfigError) as error:
            process.check_counts()
        messages.append(str(error.value))

    threads = [threading.Thread(target=check, args=(each,)) for each in connected([2, 3])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    expected = "--num_processes must be the same in all processes, got [2, 3] in the order of "
    assert messages == [expected + "--process_id"] * 2


def test_a_request_to_stop_is_not_a_failure_of_jax():
    for error, code in ((KeyboardInterrupt(), 130), (PreemptedError("stopped"), 42)):
        (process,) = connected([2])
        # As it arrives while JAX's store is polled.
        error.__context__ = jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")
        process.close(error)
        calls = [(name, *rest[:1]) for name, *rest in process._watchdog.calls]
        assert calls == [("announce_end", code), ("close",)]


def test_a_signal_during_the_end_does_not_hide_it_from_the_others():
    (process,) = connected([2])
    with pytest.raises(KeyboardInterrupt):
        process.close(jax.errors.JaxRuntimeError("INTERNAL"))
    names = [name for name, *_ in process._watchdog.calls]
    assert names == ["wait_until_others_are_alive", "announce_end", "close"]


def test_devices_must_be_those_of_the_processes():
    Processes().check_devices()
    with pytest.raises(ConfigError, match="JAX runs in 1 processes, and this run in 2"):
        Processes(1, 2).check_devices()


def test_hosts_must_be_alike(monkeypatch):
    # Eight devices and seven: the same number of learners, but not of actors.
    devices = [SimpleNamespace(platform="cpu", process_index=int(i > 7)) for i in range(15)]
    monkeypatch.setattr(mesh, "initialize_devices", lambda *_, **__: devices)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    config = make_config(env="dummy:counting", sebulba__learners_per_actor=3)
    with pytest.raises(ConfigError, match=r"all hosts .* got 1 \+ 6 and 2 \+ 6"):
        trainer.prepare(config)


def test_the_default_number_of_devices_counts_all_hosts(monkeypatch):
    monkeypatch.setattr(sizes, "cpu_cores", lambda: 2)
    config = make_config(num_envs=8, unroll_length=256, num_minibatches=2)
    assert auto_cpu_devices(config) == 2
    assert auto_cpu_devices(config, 4) == 1
