"""The comparison of population-based training with random sweeps."""

import pytest

from podracer import config as config_lib
from podracer.training import command_line


@pytest.fixture
def populations(load):
    return load("populations")


def test_all_runs_of_a_repetition_begin_with_the_same_points(populations):
    for name, comparison in populations.COMPARISONS.items():
        fixed, *others = [
            config_lib.parse(command_line.parse_config("anakin", command_line.OPTIONS, x[1:])[0])
            for x in (populations.make_command(name, kind, 3) for kind in comparison.kinds)
        ]
        assert fixed.selection.every == 0
        for config in others:
            assert [x.settings for x in config.members] == [x.settings for x in fixed.members]
            assert config.total_steps == fixed.total_steps
            assert config.selection.every > 0


def test_the_page_has_the_table_of_all_lines(populations):
    table = populations.table(populations.read())
    assert table in (populations.results_lines.ROOT / "docs" / "sweeps.md").read_text()
