"""The signatures of both trainers."""

import typing

import pytest

from podracer import anakin, sebulba
from podracer.training.options import Options, RunOptions


def test_the_keywords_of_train_are_the_options_of_a_run():
    options = typing.get_type_hints(Options)
    del options["workdir"]
    assert typing.get_type_hints(RunOptions) == options


@pytest.mark.parametrize("train", [anakin.train, sebulba.train])
def test_train_declares_its_keywords(train):
    assert typing.get_type_hints(train)["options"] == typing.Unpack[RunOptions]
