"""The memory of a run's state: what is printed and refused, and that a replay is stored once."""

import jax
import pytest

from podracer import anakin, envs, sebulba
from podracer.anakin import trainer
from podracer.anakin.state import make_start
from podracer.errors import ConfigError
from podracer.sebulba import setup as sebulba_setup
from podracer.training import memory
from tests.helpers import make_config

REPLAY = {
    "agent": "dqn",
    "num_envs": 16,
    "cpu_devices": 2,
    "replay__capacity": 16 * 10_001,
    "replay__batch": 16,
    "replay__priority_exponent": 0.6,
    "replay__gradient_steps": 2,
}


@pytest.mark.parametrize("num_seeds", [1, 2])
def test_a_compiled_step_holds_a_replay_once(num_seeds):
    """Neither the condition around the gradient steps nor the loops over them and over updates
    copy it, and the new one has the memory of the old one."""
    config = make_config(**REPLAY, updates_per_call=3, num_seeds=num_seeds)
    program = trainer.prepare(config)
    replay = program.memory.replay
    # Observation, reward, discount, first and action of the steps of eight environments, and
    # priorities.
    assert replay == pytest.approx(8 * 10_000 * num_seeds * (16 + 4 + 4 + 1 + 4 + 4), rel=0.01)
    analysis = program.step.lower(program.state).compile().memory_analysis()
    assert replay <= analysis.argument_size_in_bytes < 1.1 * replay
    assert analysis.alias_size_in_bytes >= replay
    # Less than the observations; of several agents, priorities are held twice.
    assert analysis.temp_size_in_bytes < 0.2 * replay


def test_the_memory_of_a_state_is_that_of_its_arrays():
    config = make_config(**REPLAY, num_seeds=2)
    program = trainer.prepare(config)
    state = program.init(make_start(config))
    shards = [x.addressable_shards for x in jax.tree.leaves(state.source)]
    assert program.memory.replay == sum(shard[0].data.nbytes for shard in shards)
    assert memory.bytes_per_device(state) == program.memory.replay + program.memory.rest


def test_a_run_says_what_its_replay_needs():
    changes = {"num_envs": 16, "cpu_devices": 2}
    line = "160,000 steps, 2.5 MiB on each of 2 devices"
    assert trainer.prepare(make_config(**REPLAY)).memory.layout == {"replay": line}
    assert trainer.prepare(make_config(**changes)).memory.layout == {}


@pytest.mark.parametrize("train", [anakin.train, sebulba.train])
def test_a_replay_that_no_device_can_hold_is_refused(train, monkeypatch):
    monkeypatch.setattr(memory, "available", lambda mesh: 10**6)
    config = make_config(**REPLAY, env="dummy:counting")
    with pytest.raises(
        ConfigError,
        match=r"replay.capacity=160,016 needs .* MiB on .*, and the rest of the state .* KiB, "
        r"but a device has 976.6 KiB; lower it to [\d,]+000, use more devices",
    ) as error:
        train(config)
    capacity = int(str(error.value).partition("lower it to ")[2].split(", use")[0].replace(",", ""))
    make = {
        anakin.train: trainer.prepare,
        sebulba.train: lambda config: sebulba_setup.prepare(
            config, envs.make_host_environment("dummy:counting", {}, {})
        ),
    }[train]
    run = make(make_config(**{**REPLAY, "env": "dummy:counting", "replay__capacity": capacity}))
    memory.check(run.memory, config)


def test_less_than_what_learning_begins_with_needs_another_setting(monkeypatch):
    monkeypatch.setattr(memory, "available", lambda mesh: 10**6)
    with pytest.raises(ConfigError, match=r"lower it to [\d,]+ and replay.begin=90,000 with it"):
        anakin.train(make_config(**REPLAY, total_steps=200_000, replay__begin=90_000))


def test_the_machines_memory_is_shared_by_its_cpu_devices():
    one, two = (memory.available(jax.sharding.Mesh(jax.devices()[:count], "x")) for count in (1, 2))
    assert one == pytest.approx(2 * two, rel=1e-6)
    assert one > 2**30
