"""The signatures of both trainers, and a run that is rejected before it starts."""

import typing

import pytest

from podracer import anakin, sebulba
from podracer.errors import ConfigError
from podracer.training.options import Options, RunOptions
from tests.training.resuming import REPLAY, resumable


def test_the_keywords_of_train_are_the_options_of_a_run():
    options = typing.get_type_hints(Options)
    del options["workdir"]
    assert typing.get_type_hints(RunOptions) == options


@pytest.mark.parametrize("train", [anakin.train, sebulba.train])
def test_train_declares_its_keywords(train):
    assert typing.get_type_hints(train)["options"] == typing.Unpack[RunOptions]


def test_a_run_that_would_end_before_it_learns_is_rejected():
    config = resumable(total_steps=128, **REPLAY)
    message = r"begins after 256 steps \(replay.begin=200\), but the run has 128; raise total_steps"
    with pytest.raises(ConfigError, match=message):
        anakin.train(config, quiet=True)
