"""What the time of actor threads and learner is spent on."""

import collections
import re
import threading
import time
from types import SimpleNamespace

import pytest

from podracer.monitoring import metrics
from podracer.sebulba import learner, pipeline, timing
from podracer.sebulba.pipeline import ActorOutput, ParameterServer
from podracer.sebulba.threads import SupervisedQueue
from tests.sebulba.runs import SOLO, FakeClock, NoEvaluation, sebulba_config, train

UPDATES, THREADS = 6, 3


def wait_until(counts: collections.Counter, number: int) -> None:
    """Waits until each actor thread has done something ``number`` times."""
    deadline = time.monotonic() + 60
    while len([name for name in list(counts) if counts[name] >= number]) < THREADS:
        time.sleep(0.001)
        assert time.monotonic() < deadline


@pytest.fixture
def counts(monkeypatch):
    """How often each actor thread has asked for weights, and offered a trajectory."""
    asked, offered = collections.Counter(), collections.Counter()
    get, put = ParameterServer.get, SupervisedQueue.put

    def counting_get(self, device, version):
        asked[threading.current_thread().name] += 1
        return get(self, device, version)

    def counting_put(self, item):
        if isinstance(item, ActorOutput):
            offered[threading.current_thread().name] += 1
        put(self, item)

    monkeypatch.setattr(ParameterServer, "get", counting_get)
    monkeypatch.setattr(SupervisedQueue, "put", counting_put)
    return asked, offered


def test_waits_for_the_learner_leave_its_pauses_out(monkeypatch, counts):
    """With a clock that advances only in updates and evaluations, while all actors wait."""
    now = FakeClock()
    for module in (metrics, pipeline):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=now))
    learn, (asked, offered) = learner.Learner._learn, counts
    evaluations = collections.Counter()

    def slow_learn(self, state, taken):
        if self.version + 2 < UPDATES:
            # Actors wait for the weights of the unroll after the next, which this update makes.
            wait_until(asked, self.version + 3)
            now.seconds += 1
        return learn(self, state, taken)

    def slow_evaluate(self, state):
        evaluations[self] += 1
        if evaluations[self] + 1 < UPDATES:
            # Actors have done an unroll more than their queues have room for.
            wait_until(offered, evaluations[self] + 2)
            now.seconds += 100
        return NoEvaluation.__call__(self, state)

    monkeypatch.setattr(learner.Learner, "_learn", slow_learn)
    config = sebulba_config(
        **{**SOLO, "sebulba__threads": THREADS},
        num_envs=24,
        total_steps=UPDATES * 24 * 8,
        evaluation__every=1,
    )
    evaluation = type("SlowEvaluation", (NoEvaluation,), {"__call__": slow_evaluate})
    seconds = train(config, evaluation=evaluation).summary["breakdown"]
    # A wait is reported with the next trajectory, so the last one is not.
    assert seconds["actor_wait"] == pytest.approx(UPDATES - 2)
    assert seconds["actor_pause"] == pytest.approx(100 * (UPDATES - 3))
    assert seconds["learner_update"] == pytest.approx(UPDATES - 2)
    for name in ("actor_environment", "actor_inference", "actor_transfer", "learner_publish"):
        assert seconds[name] == 0


@pytest.mark.parametrize(
    ("actor", "learner", "advice"),
    [
        ({"wait": 6.0, "environment": 3.0}, {"wait": 0.0, "update": 9.0}, "Actors wait .* 67%"),
        ({"environment": 8.0, "wait": 1}, {"wait": 5.0, "update": 4.0}, "more CPU cores"),
        ({"environment": 8.0, "network": 1}, {"wait": 5.0, "update": 4.0}, "more workers"),
        ({"environment": 1.0, "network": 8}, {"wait": 5.0, "update": 4.0}, "a faster network"),
        ({"inference": 8.0, "wait": 1}, {"wait": 5.0, "update": 4.0}, "more actor devices"),
        ({"transfer": 8.0, "wait": 1}, {"wait": 5.0, "update": 4.0}, "smaller observations"),
        ({"environment": 9.0}, {"update": 9.0, "wait": 0.5}, "well balanced"),
        ({"environment": 9.0, "pause": 90.0}, {"update": 9.0}, "well balanced"),
        ({"environment": 1.0, "wait": 1.0, "pause": 9.0}, {"update": 2.0}, "Actors wait .* 50%"),
    ],
)
def test_advice_names_the_side_that_waits(actor, learner, advice):
    assert re.search(advice, timing.advice(actor, learner))
