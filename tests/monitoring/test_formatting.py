"""Numbers as people read them."""

import math

import pytest

from podracer.monitoring import formatting


@pytest.mark.parametrize(
    ("value", "four", "three"),
    [
        (0.0, "0.000", "0.00"),
        (-0.51, "-0.5100", "-0.510"),
        (12.25, "12.25", "12.2"),
        (999.96, "1,000", "1,000"),
        (-1234567.8, "-1,234,568", "-1,234,568"),
        (-1.25e-4, "-0.0001250", "-0.000125"),
        (1.5e-5, "1.500e-05", "1.50e-05"),
        (1e38, "1.000e+38", "1.00e+38"),
        (math.nan, "nan", "nan"),
        (-math.inf, "-inf", "-inf"),
        (1234567, "1,234,567", "1,234,567"),
    ],
)
def test_number(value, four, three):
    assert formatting.number(value) == four
    assert formatting.number(value, 3) == three


def test_a_mean_and_its_error_have_the_same_decimals():
    assert formatting.mean_and_error(19.0, 12.7062) == "19.00 ± 12.71"
    assert formatting.mean_and_error(-2.0, 12.7062) == "-2.00 ± 12.71"
    assert formatting.mean_and_error(1999.0, 12.7062) == "1,999 ± 13"
    assert formatting.mean_and_error(2e12, 3e11) == "2.000e+12 ± 3.000e+11"
    assert formatting.mean_and_error(7.0, None) == "7.000"


def test_units():
    # Each just below the next prefix.
    assert formatting.size(1.5 * 2**30) == "1.5 GiB"
    assert formatting.size(1023 * 2**10) == "1023.0 KiB"
    assert formatting.metric(999_000) == "999 k"
    assert formatting.metric(9.06e6, "B") == "9.06 MB"
    assert [formatting.seconds(x) for x in (1234.5, 23.91, 7.57e-3, 5.69e-5)] == [
        "1,234 s", "23.9 s", "7.57 ms", "56.9 μs",
    ]  # fmt: skip


def test_duration():
    assert formatting.duration(59.7) == "0:01:00"
    assert formatting.duration(3725.4) == "1:02:05"
    assert formatting.duration(90_061) == "1 day, 1:01:01"
    assert formatting.duration(math.inf) == "11574 days, 1:46:40"
    assert formatting.duration(math.nan) == "unknown"
