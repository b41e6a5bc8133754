"""Messages: what is sent arrives, and whatever does not fit is rejected."""

import random

import jax
import numpy as np
import pytest

from podracer import envs
from podracer.envs.spaces import Discrete
from podracer.remote import wire
from podracer.remote.wire import HEADER, Header, Kind, Layout, WireError
from podracer.types import HostStep, TimeStep

HEAD = Header(Kind.STEP, start=2**64 - 1, sequence=7, microseconds=2**33)
ROW = {"image": np.zeros((3, 2), np.uint8), "numbers": np.zeros(2, np.float32), "flag": np.bool_()}


def rows(count: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(count)
    return {
        "image": rng.integers(0, 256, (count, 3, 2)).astype(np.uint8),
        "numbers": rng.normal(size=(count, 2)).astype(np.float32),
        "flag": rng.integers(0, 2, count).astype(bool),
    }


@pytest.mark.parametrize("count", [1, 3, 300])
def test_rows_arrive_as_they_were_sent(count):
    layout, sent, index = Layout(ROW), rows(count), np.arange(count)[::-1]
    # A slice whose memory is not contiguous.
    sent["image"] = np.repeat(sent["image"], 2, 1)[:, ::2]
    header, body = wire.decode(layout.encode(HEAD, index, sent))
    assert header == HEAD._replace(rows=count, microseconds=2**32 - 1)
    arrived_index, arrived = layout.decode(header, body)
    np.testing.assert_array_equal(arrived_index, index)
    jax.tree.map(np.testing.assert_array_equal, arrived, sent)
    assert [x.dtype for x in jax.tree.leaves(arrived)] == [x.dtype for x in jax.tree.leaves(sent)]


def test_arrays_of_another_shape_or_type_are_not_sent():
    for key, wrong in (
        ("image", np.zeros((2, 3, 3), np.uint8)),
        ("numbers", np.zeros((2, 2))),
        ("flag", np.zeros(3, bool)),
    ):
        with pytest.raises(WireError, match=f"{key}.* not "):
            Layout(ROW).check({**rows(2), key: wrong}, 2)
    with pytest.raises(WireError, match=r"numbers.* has NaN"):
        Layout(ROW).check({**rows(2), "numbers": np.full((2, 2), np.nan, np.float32)}, 2)


def test_a_stream_may_have_any_number_of_messages():
    header, _ = wire.decode(HEAD._replace(sequence=2**32 + 5).encode())
    assert header.sequence == 5


def test_json_arrives_as_it_was_sent():
    header, body = wire.decode(wire.encode_json(HEAD, {"a": [1, "b"]}))
    assert (header.kind, wire.decode_json(body)) == (Kind.STEP, {"a": [1, "b"]})


JSON = wire.encode_json(Header(Kind.HELLO, 1, 0), {"num_envs": 3})
STEP = Layout(ROW).encode(Header(Kind.STEP, 1, 1), np.arange(4), rows(4))


@pytest.mark.parametrize(
    ("message", "match"),
    [
        (b"", "shorter"),
        (JSON[: HEADER.size - 1], "shorter"),
        ("text", "shorter"),
        (b"GET " + JSON[4:], "no message"),
        (JSON[:4] + b"\x63" + JSON[5:], "another version"),
        (JSON[:5] + b"\x63" + JSON[6:], "unknown kind"),
    ],
)
def test_what_is_no_message(message, match):
    with pytest.raises(WireError, match=match):
        wire.decode(message)


@pytest.mark.parametrize("body", [b"{", b"[]", b"1", b"\xff", b"[" * 60_000, b" " * (2**20 + 1)])
def test_what_is_no_json_object(body):
    with pytest.raises(WireError, match="JSON"):
        wire.decode_json(memoryview(body))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda x: x[:-1], "wrong size"),
        (lambda x: x + b"\0", "wrong size"),
        (lambda x: x[:6] + b"\0\0" + x[8:], "wrong size"),
        (lambda x: x[:6] + b"\xff\xff" + x[8:], "wrong size"),
        (lambda x: x[: HEADER.size + 8] + b"\2" + x[HEADER.size + 9 :], "neither 0 nor 1"),
        (lambda x: x[:-4] + np.float32(np.nan).tobytes(), "NaN"),
        (lambda x: x[:-4] + np.float32(np.inf).tobytes(), "infinite"),
    ],
)
def test_rows_that_are_rejected(change, match):
    header, body = wire.decode(change(STEP))
    with pytest.raises(WireError, match=match):
        Layout(ROW).decode(header, body)


def test_ten_thousand_damaged_messages_raise_nothing_else():
    rng, layout, rejected = random.Random(0), Layout(ROW), 0
    for number in range(10_000):
        message = bytearray((JSON, STEP)[number % 2])
        for _ in range(rng.randint(1, 4)):
            message[rng.randrange(len(message))] = rng.randrange(256)
        message = bytes(message[: rng.randint(0, len(message))] if rng.random() < 0.5 else message)
        try:
            header, body = wire.decode(message)
            (wire.decode_json(body) if header.kind is Kind.HELLO else layout.decode(header, body))
        except WireError:
            rejected += 1
    assert rejected > 5_000


@pytest.mark.parametrize("name", ["counting", "parts", "masked"])
def test_steps_and_actions_of_an_environment(name):
    env = envs.make_host_environment(f"dummy:{name}", {}, {})
    pool = env.make_pool([0, 1, 2], 1)
    step, layout = pool.reset(), wire.step_layout(env)
    header, body = wire.decode(layout.encode(HEAD, np.arange(3), step))
    _, arrived = layout.decode(header, body)
    assert isinstance(arrived, HostStep)
    assert isinstance(arrived.timestep, TimeStep)
    jax.tree.map(np.testing.assert_array_equal, arrived, step)
    assert isinstance(env.spec.action, Discrete)
    assert wire.action_layout(env).describe() == [" int32[]"]
    assert all("[" in line for line in layout.describe())
