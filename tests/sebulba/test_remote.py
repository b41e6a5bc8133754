"""Remote environments: workers in threads and processes on this machine."""

import contextlib
import re
import threading
import time
from typing import Any

import grpc
import jax
import numpy as np
import pytest

from podracer.errors import ConfigError
from podracer.remote import wire, worker
from podracer.remote.wire import Kind
from podracer.remote.worker import WorkerOptions
from podracer.sebulba import setup, trainer
from podracer.types import ENVS_AXIS, Trajectory
from tests.distributed.jobs import free_port, last_arrays
from tests.sebulba.remote_runs import (
    BAD,
    REMOTE,
    Lost,
    Stranger,
    check_sequences,
    hello,
    quiet,
    remote,
    wait_until,
)
from tests.sebulba.runs import act, join_parts, sebulba_config


def in_order(trajectory: Trajectory) -> Trajectory:
    """The same unrolls, in the order of their environments' numbers."""
    order = np.argsort(trajectory.env_id)
    return jax.tree.map(
        lambda axis, tree: jax.tree.map(lambda x: np.take(x, order, axis), tree),
        ENVS_AXIS,
        trajectory,
    )


def test_a_worker_collects_what_a_local_pool_collects():
    with remote() as run:
        run.work(8)
        found = run.outputs(3)
    _, _, expected = act(
        sebulba_config(**{k: v for k, v in REMOTE.items() if not k.startswith("remote")}), 3
    )
    for x, y in zip(map(join_parts, found), map(join_parts, expected), strict=True):
        x = in_order(x)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), x, y)
        np.testing.assert_array_equal(x.action, y.action)
    for x, y in zip(found, expected, strict=True):
        assert x.episodes == y.episodes


def test_workers_come_and_go_and_no_sequence_mixes_two_of_them():
    # Long episodes, so that hardly any ends where a worker does.
    long = {"env_kwargs": {"length": 60, "vary": 7}}
    with remote(**long, remote__num_envs=12) as run:
        run.work(5)
        lost = [Lost(run.address, 3), Lost(run.address, 4)]
        outputs = run.outputs(6)
        for number in range(4):
            lost.pop(0).kill()
            outputs += run.outputs(2)
            lost.append(Lost(run.address, 3 + number))
            outputs += run.outputs(2)
        wait_until(lambda: run.actors.row()["remote/losses"] == 4)
        outputs += run.outputs(8)
        row = run.actors.row()
        for worker_ in lost:
            worker_.kill()
    assert check_sequences([join_parts(x) for x in outputs]) >= 4
    assert row["remote/joins"] == 7
    assert not [x for x in run.warnings if "dropped" in x]


def test_a_slow_environment_delays_only_its_own_pool(monkeypatch):
    make = worker.make_environment

    def slow(*arguments: Any) -> Any:
        env = make(*arguments)

        def make_pool(seeds: Any, threads: int) -> Any:
            pool = env.make_pool(seeds, threads)
            # Of one of the pools: seeds are consecutive.
            if any(seed == least for seed in seeds):
                step = pool.step
                pool.step = lambda action: (time.sleep(0.3), step(action))[1]
            return pool

        return env._replace(make_pool=make_pool)

    least = min(setup.pool_seeds(sebulba_config(**REMOTE), np.arange(8), 0))
    monkeypatch.setattr(worker, "make_environment", slow)
    with remote(num_envs=7) as run:
        run.work(8, num_pools=8)
        outputs = run.outputs(6)
    numbers = np.concatenate([join_parts(x).env_id for x in outputs])
    counts = np.bincount(numbers, minlength=8)
    # In the time of six unrolls the slow one has not completed its first.
    assert counts[0] == 0
    assert (counts[1:] >= 4).all()


def test_what_workers_must_not_send_ends_their_stream_and_reaches_nobody_else():
    long = {"env_kwargs": {"length": 60, "vary": 7}}
    with remote(**long, remote__num_envs=12) as run:
        run.work(8)
        outputs = run.outputs(2)
        for messages, match in BAD.values():
            # The places of the one before are free once the actor thread is at work again.
            while run.actors.row()["remote/free_places"] < 4:
                outputs += run.outputs(1)
            stranger = Stranger(run.address)
            for message in messages:
                stranger.send(message)
            with contextlib.suppress(grpc.RpcError):
                said = [wire.decode(x) for x in stranger.responses]
                assert said[-1][0].kind is Kind.END
                end = wire.decode_json(said[-1][1])
                assert end["code"] == "unwanted"
                assert re.search(match, end["reason"])
            stranger.close()
        outputs += run.outputs(6)
        rejected = run.actors.row()["remote/rejected"]
    assert rejected == len(BAD)
    # Each kind is named once.
    assert len(run.warnings) == len(set(run.warnings)) > 5
    numbers = {int(i) for x in outputs for i in join_parts(x).env_id}
    assert numbers == {int(i) for x in outputs[:2] for i in join_parts(x).env_id}
    assert len(numbers) == 8
    assert check_sequences([join_parts(x) for x in outputs]) == 0


def test_workers_need_the_token(monkeypatch, tmp_path):
    monkeypatch.setenv("PODRACER_TOKEN", "right")
    with remote() as run:
        for metadata in ((), (("authorization", "Bearer wrong"),)):
            stranger = Stranger(run.address, metadata)
            stranger.send(hello(8))
            with pytest.raises(grpc.RpcError) as error:
                next(stranger.responses)
            assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
            stranger.close()
        file = tmp_path / "token"
        file.write_text("wrong")
        with pytest.raises(ConfigError, match="wrong or missing token"):
            worker.work(WorkerOptions([run.address], 8, token_file=str(file)), quiet)
        assert run.actors.row()["remote/rejected"] == 3
        file.write_text("right\n")
        run.work(8, token_file=str(file))
        run.outputs(1)


def test_a_worker_that_says_nothing_is_dropped_and_its_places_are_given_to_the_next():
    with remote(remote__timeout_s=1.0, remote__start_timeout_s=1.0) as run:
        silent = Stranger(run.address)
        silent.send(hello(8))
        next(silent.responses)
        assert run.actors.row()["remote/free_places"] == 0
        lines: list[str] = []
        offer = WorkerOptions([run.address], 8)
        threading.Thread(target=worker.work, args=(offer, lines.append), daemon=True).start()
        run.outputs(2)
        assert any("all places are taken" in line for line in lines)
        with pytest.raises(grpc.RpcError):
            list(silent.responses)
        silent.close()
    assert any("said nothing for 1 seconds" in x for x in run.warnings)


def test_workers_are_told_that_the_run_is_over():
    with remote() as run:
        thread = run.work(8)
        run.outputs(1)
    thread.join(timeout=20)
    assert not thread.is_alive()


@pytest.mark.slow
def test_several_devices_get_unrolls_of_their_own_environments():
    split = {"sebulba__actor_devices": (0,), "sebulba__learner_devices": (1, 2)}
    with remote(**split, sebulba__threads=2, remote__num_envs=16) as run:
        threads = [run.work(4) for _ in range(4)]
        outputs = run.outputs(4)
    assert threads
    for output in outputs:
        assert [
            set(x.env_id.tolist()) <= set(range(8 * i, 8 * i + 8))
            for i, x in enumerate(jax.device_get(list(output.parts)))
        ] == [True, True]
    threads_of = [{int(i) % 2 for x in output.parts for i in x.env_id} for output in outputs]
    assert all(len(x) == 1 for x in threads_of)


@pytest.mark.slow
def test_a_replay_buffer_holds_the_steps_of_an_environment_in_their_order(tmp_path):
    """With one worker of few environments, an update has several unrolls of each, from both of the
    trajectories that one actor thread has collected."""
    gaps, steps = _replayed(tmp_path, [2], sebulba__threads=2)
    assert steps > 300
    assert gaps == 0


@pytest.mark.slow
def test_nothing_is_learned_across_unrolls_that_were_dropped(tmp_path):
    """One of two learner devices has twice as many environments as the other."""
    split = {"sebulba__actor_devices": (0,), "sebulba__learner_devices": (1, 2)}
    gaps, steps = _replayed(tmp_path, [3], **split)
    assert steps > 300
    assert gaps > 0


def _replayed(tmp_path, workers, **changes):
    """Trains DQN with these workers, and checks that each step in its replay buffer is the one
    after the step before, unless it is cut. Returns how many are cut, and how many steps there
    are."""
    port = free_port()
    config = sebulba_config(
        **{
            **REMOTE,
            "agent": "dqn",
            "network__core": "none",
            "env_kwargs": {"length": 40, "vary": 7},
            "remote__listen": f"127.0.0.1:{port}",
            "replay__capacity": 8 * 12 * 16,
            "replay__batch": 8,
            "replay__begin": 96,
            "total_steps": 8 * 12 * 8,
            **changes,
        }
    )
    for num_envs in workers:
        offer = WorkerOptions([f"127.0.0.1:{port}"], num_envs)
        threading.Thread(target=worker.work, args=(offer, quiet), daemon=True).start()
    trainer.train(config, tmp_path, quiet=True)
    arrays = last_arrays(tmp_path)
    (count,) = (x for name, x in arrays.items() if name.endswith("ring/count"))
    step = {
        name: next(x for key, x in arrays.items() if key.endswith(f"timestep/{name}"))
        for name in ("observation", "first", "discount")
    }
    gaps = 0
    for env, number in enumerate(count.tolist()):
        # From the oldest step on.
        length = min(number, 16) * 12
        at = (np.arange(length) + (number * 12 - length)) % (16 * 12)
        past, first, discount = (x[env, at] for x in step.values())
        follows = (past[1:, 0] == past[:-1, 0] + 1) | (first[1:] & (past[:-1, 0] == past[:-1, 1]))
        assert first[1:][~follows].all()
        assert (discount[1:][~follows] == 1).all()
        gaps += np.count_nonzero(~follows)
    return gaps, int(count.sum()) * 12


def test_all_environments_contribute_to_small_updates():
    with remote(num_envs=2) as run:
        run.work(8)
        outputs = run.outputs(16)
        row = run.actors.row()
    numbers = np.concatenate([join_parts(x).env_id for x in outputs])
    np.testing.assert_array_equal(np.bincount(numbers), [4] * 8)
    assert row["remote/dropped_unrolls"] == 0
    assert check_sequences([join_parts(x) for x in outputs]) == 0


@pytest.mark.parametrize("agent", ["vtrace", pytest.param("r2d2", marks=pytest.mark.slow)])
def test_a_run_with_local_workers_is_trained(agent, tmp_path):
    config = sebulba_config(
        **{**REMOTE, "agent": agent, "remote__listen": "", "total_steps": 40 * 96},
        remote__local_workers=2,
    )
    result = trainer.train(config, tmp_path, quiet=True)
    row = result.metrics[-1]
    assert row["step"] == 40 * 96
    assert row["remote/workers"] == 2
    assert row["train/episode_length"] == pytest.approx(6.5, abs=0.5)
    assert row["lag/max"] >= row["lag/mean"] >= row["lag/min"] >= 0


def test_settings_that_can_not_be():
    for changes, match in (
        ({"agent": "ppo"}, "does not correct for; use agent="),
        ({"remote__num_envs": 0}, "is set together with remote.listen"),
        ({"remote__listen": ""}, "is set together with remote.listen"),
        ({"remote__tls_cert": "a"}, "belong together"),
        ({"remote__num_envs": 9, "sebulba__threads": 2}, "multiple of 2 would"),
        ({"remote__timeout_s": 0}, "must be positive"),
        ({"remote__listen": "5000"}, "remote.listen='5000' must be HOST:PORT"),
        ({"remote__token_file": "no/such"}, "token_file=no/such can't be read"),
        ({"remote__listen": "0.0.0.0:0"}, "can be reached from other machines"),
        ({"remote__listen": "[::]:0"}, "can be reached from other machines"),
        ({"remote__listen": "example.com:0"}, "can be reached from other machines"),
    ):
        with pytest.raises(ConfigError, match=match):
            setup.prepare(sebulba_config(**{**REMOTE, **changes}))
