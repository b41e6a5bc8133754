"""The benchmark of the wire runs with tiny sizes; its speed is not tested."""

import json

import pytest

pytest.importorskip("grpc")
pytest.importorskip("zmq")
QUICK = ("--seconds=0.2", "--rounds=1")


@pytest.fixture
def run(load, capsys):
    """``(*arguments) -> results``."""

    def run(*arguments):
        load("wire").main([*QUICK, *arguments])
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run


@pytest.mark.weekly
def test_engines_exchange_the_same_messages(run):
    (result,) = run("--rows=2", "--shape=3,4", "--outstanding=2")
    assert (result["rows"], result["outstanding"]) == (2, 2)
    # The header, and for each row its number, the observation, 3 numbers and 2 truth values.
    assert result["message_bytes"] == 24 + 2 * (2 + 12 + 12 + 2)
    assert result["engines"].keys() == {"tcp", "pyzmq", "grpc", "podracer"}
    for found in result["engines"].values():
        assert min(found.values()) > 0
        assert found["steps_per_second"] == pytest.approx(2 * found["messages_per_second"], 1e-3)
        assert found["cpu_us_per_message"] == pytest.approx(2 * found["cpu_us_per_step"], 1e-3)
        assert found["server_us_per_message"] < found["cpu_us_per_message"]
        assert found["p50_ms"] <= found["p99_ms"]


@pytest.mark.weekly
def test_compression(run):
    pytest.importorskip("envpool")
    (result,) = run("--compression", "--messages=2", "--rows=2")
    assert (result["env"], result["rows"]) == ("envpool:Pong-v5", 2)
    assert result["engines"].keys() == {"podracer", "podracer, gzip"}
    assert result["gzip"]["6"]["ratio"] > result["gzip"]["1"]["ratio"] > 1
    assert result["gzip"]["6"]["faster_below_mb_per_second"] > 0


@pytest.mark.weekly
def test_workers(run):
    (result,) = run("--workers=2", "--envs=8", "--pools=2", "--batch=4")
    assert (result["env"], result["workers"], result["envs"]) == ("dummy:counting", 2, 8)
    # Two pools of 2 environments each, whose steps go together if both have returned.
    assert 2 <= result["rows_per_message"] <= 4
    assert 0 < result["p50_ms"] <= result["p99_ms"]
    assert result["server_cores"] > 0


def test_what_a_core_serves_is_computed_from_what_messages_cost(load):
    model = load("wire").model(
        [(size, 100 + 200 * size / 1e6) for size in (1_000, 50_000, 500_000)]
    )
    assert model["us_per_message"] == pytest.approx(100)
    assert model["us_per_megabyte"] == pytest.approx(200)
    assert model["frames_per_second"][16] == pytest.approx(16e6 / (100 + 200 * 16 * 84 * 84 / 1e6))
