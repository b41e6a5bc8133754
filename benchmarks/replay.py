"""Measures the replay beside that of flashbax (https://github.com/instadeepai/flashbax).

    pip install flashbax==0.1.3
    python benchmarks/replay.py --items=131072

Prints a JSON line for each of single transitions and sequences, drawn uniformly and by priority:
microseconds to add an unroll, to sample a batch, and to set the priorities of its items. As in
training, many calls are part of one compiled program and a buffer is changed in its own memory.
Rounds alternate between the two libraries.
"""

import argparse
import importlib
import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import common
import jax
import jax.numpy as jnp

from podracer.learning import replay
from podracer.learning.ring import Item
from podracer.types import Devices, TimeStep, Trajectory

try:
    # No dependency of the project, so type checkers do not find it either.
    flashbax: Any = importlib.import_module("flashbax")
except ImportError as error:
    raise SystemExit("this comparison needs flashbax: pip install flashbax==0.1.3") from error

ENVS, UNROLL, BATCH, FEATURES, EXPONENT = 16, 8, 64, 4, 0.6
# Transitions of an item, and steps from the beginning of one to that of the next.
KINDS = {"transitions": (1, 1), "sequences": (16, UNROLL)}
# Calls of a compiled program.
CALLS = 32


class Library(NamedTuple):
    """A replay of one of the libraries; all functions are pure.

    Attributes:
      init: ``() -> state``.
      add: ``(state) -> state``, one more unroll of all environments.
      sample: ``(state, key) -> (batch, ticket)``.
      assign: ``(state, ticket, priorities) -> state``; None if items are drawn uniformly.
    """

    init: Callable[[], Any]
    add: Callable[[Any], Any]
    sample: Callable[[Any, Any], tuple[Any, Any]]
    assign: Callable[[Any, Any, Any], Any] | None


def make_podracer(items: int, length: int, stride: int, *, prioritised: bool) -> Library:
    """podracer's replay."""
    scalars = jnp.zeros((UNROLL + 1, ENVS))
    timestep = TimeStep(
        jnp.ones((UNROLL + 1, ENVS, FEATURES)), scalars, scalars + 1, scalars.astype(bool)
    )
    action = jnp.zeros((UNROLL, ENVS), jnp.int32)
    trajectory = Trajectory(timestep, action, (), (), jnp.arange(ENVS))

    def read(train_state: Any, window: Any) -> Any:
        observation = window.observe(jnp.arange(length + 1))
        return window.timestep, observation, window.action, window.importance

    source: Any = replay.make_source(
        Item(length, stride, read, update_stats=lambda train_state, trajectory: ()),
        replay.ReplayConfig(
            capacity=items * stride,
            batch=BATCH,
            priority_exponent=EXPONENT * prioritised,
        ),
        Devices(),
        num_envs=ENVS,
        num_unrolls=ENVS,
        unroll_length=UNROLL,
        frames=1,
    )
    key = jax.random.key(0)

    def sample(state: Any, key: Any) -> tuple[Any, Any]:
        batch, ticket, _ = source.sample(state, None, key, 0)
        return batch, ticket

    return Library(
        init=lambda: source.init(trajectory),
        add=lambda state: source.add(state, None, trajectory, key)[0],
        sample=sample,
        assign=source.update if prioritised else None,
    )


def make_flashbax(items: int, length: int, stride: int, *, prioritised: bool) -> Library:
    """The trajectory buffer of flashbax."""
    scalars = jnp.zeros((ENVS, UNROLL))
    step = {
        "observation": jnp.ones(FEATURES),
        "reward": jnp.float32(0),
        "discount": jnp.float32(1),
        "first": jnp.bool_(False),
        "action": jnp.int32(0),
    }
    steps = jax.tree.map(lambda x: jnp.broadcast_to(x, (*scalars.shape, *x.shape)), step)
    sizes = {
        "add_batch_size": ENVS,
        "sample_batch_size": BATCH,
        "sample_sequence_length": length + 1,
        "period": stride,
        "min_length_time_axis": length + 1,
        "max_length_time_axis": items * stride // ENVS,
    }
    if prioritised:
        buffer: Any = flashbax.make_prioritised_trajectory_buffer(
            **sizes, priority_exponent=EXPONENT, device=jax.default_backend()
        )
    else:
        buffer = flashbax.make_trajectory_buffer(**sizes)

    def sample(state: Any, key: Any) -> tuple[Any, Any]:
        batch = buffer.sample(state, key)
        return batch, batch.indices if prioritised else ()

    return Library(
        init=lambda: buffer.init(step),
        add=lambda state: buffer.add(state, steps),
        sample=sample,
        assign=buffer.set_priorities if prioritised else None,
    )


def make_timers(library: Library, items: int, stride: int) -> dict[str, Callable[[], float]]:
    """Functions that run each operation ``CALLS`` times on a full replay and return the seconds."""

    def repeat(function: Callable[[Any, Any], Any]) -> Any:
        """A program that changes a replay buffer once for each of a list of arguments."""

        def step(state: Any, x: Any) -> tuple[Any, tuple[()]]:
            return function(state, x), ()

        return jax.jit(lambda state, xs: jax.lax.scan(step, state, xs)[0], donate_argnums=0)

    add = repeat(lambda state, _: library.add(state))
    state = jax.jit(library.init)()
    for _ in range(items * stride // ENVS // UNROLL // CALLS + 2):
        state = add(state, jnp.arange(CALLS))
    keys = jax.random.split(jax.random.key(1), CALLS)
    draw = jax.jit(lambda state: jax.lax.map(lambda key: library.sample(state, key), keys))
    _, tickets = draw(state)
    held = [state]

    def changed(function: Any, xs: Any) -> float:
        start = time.perf_counter()
        held[0] = jax.block_until_ready(function(held[0], xs))
        return time.perf_counter() - start

    def drawn() -> float:
        start = time.perf_counter()
        jax.block_until_ready(draw(held[0]))
        return time.perf_counter() - start

    timers = {"add": lambda: changed(add, jnp.arange(CALLS)), "sample": drawn}
    if library.assign is not None:
        assign_one = library.assign
        assign = repeat(lambda state, x: assign_one(state, *x))
        priorities = jax.random.uniform(jax.random.key(2), (CALLS, BATCH)) + 0.1
        timers["set_priorities"] = lambda: changed(assign, (tickets, priorities))
    return timers


def measure(items: int, kind: str, rounds: int, *, prioritised: bool) -> dict[str, Any]:
    """Microseconds of each operation by library: the median and all rounds."""
    length, stride = KINDS[kind]
    libraries = {
        name: make_timers(make(items, length, stride, prioritised=prioritised), items, stride)
        for name, make in (("podracer", make_podracer), ("flashbax", make_flashbax))
    }
    times: dict[str, dict[str, list[float]]] = {name: {} for name in libraries}
    for number in range(rounds + 1):
        for name, timers in libraries.items():
            for operation, timer in timers.items():
                # The first round compiles.
                seconds = timer()
                if number:
                    times[name].setdefault(operation, []).append(seconds / CALLS * 1e6)
    return {
        name: {
            operation: {"median": round(median(x), 1), "all": [round(y, 1) for y in x]}
            for operation, x in operations.items()
        }
        for name, operations in times.items()
    }


def main(argv: list[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=131_072, help="items of the replay")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args(argv)
    for kind in KINDS:
        for prioritised in (False, True):
            result = {
                "items": args.items,
                "kind": kind,
                "prioritised": prioritised,
                "microseconds": measure(args.items, kind, args.rounds, prioritised=prioritised),
                "versions": {**common.versions("podracer", "jax"), "flashbax": "0.1.3"},
            }
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
