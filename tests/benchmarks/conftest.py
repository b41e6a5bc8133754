"""Benchmarks are scripts; here they are imported as modules, so that tests share a process."""

import importlib
import pathlib

import pytest

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    """``(name) -> module`` of a benchmark."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module
