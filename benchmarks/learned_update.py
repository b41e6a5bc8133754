"""Tests a learned update rule in worlds that it was not learned in, beside an actor-critic.

    python benchmarks/learned_update.py runs/lpg --env=grid:7x7 --objects=3 --walls=6

Agents live in the same worlds, once by the rule of the workdir's run, and once by A2C: V-trace
without clipping, from experience of the current policy, so that all its ratios are 1. Prints a line
of JSON for each: the mean return over worlds, in the last fifth of the life and over all of it,
each with its 95 % Student-t interval.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer import config as config_lib
from podracer.acting.statistics import EpisodeSums
from podracer.agents import AGENTS, lpg
from podracer.config import Config, members
from podracer.monitoring.curves import mean_and_interval
from podracer.storage import checkpoint
from podracer.storage.workdir import read_config
from podracer.training import lifetimes
from podracer.types import Agent, Devices, Weights


def read_rule(workdir: str, config: Config) -> Any:
    """The parameters of the rule that a run has learned."""
    like = jax.eval_shape(lpg.make_rule(config.lpg).init, jax.random.key(0))
    return checkpoint.load_weights(workdir, "last", Weights(like, ()))[0].params


def make_measure(config: Config, agent: Agent, worlds: int) -> Callable[..., dict[str, float]]:
    """``(rule, learning rate) ->`` the returns of agents of this kind, one in each world; compiled
    once."""
    family, lifetime = lifetimes.make_family(config), config.lpg.lifetime
    keys = jax.random.split(jax.random.key(config.seed + 1), worlds)

    @jax.jit
    def play(rule: Any, rate: Any) -> EpisodeSums:
        lives = lifetimes.make_lives(members.trace(config, {"learning_rate": rate}), family, agent)
        return lifetimes.whole_lives(lives, rule, keys, lifetime)

    def measure(rule: Any, rate: float) -> dict[str, float]:
        episodes = play(rule, rate)
        found = {"learning_rate": rate}
        for name, first in (("last", round(0.8 * lifetime)), ("life", 0)):
            count, total = (x[:, first:].sum(1) for x in (episodes.episodes, episodes.ret))
            mean, interval = mean_and_interval(np.asarray(total / jnp.maximum(count, 1)))
            assert interval is not None
            found[f"{name}_return"] = round(float(mean), 4)
            found[f"{name}_interval"] = round(float(interval), 4)
        return found

    return measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workdir", help="of a run of podracer.anakin.meta")
    parser.add_argument("--env", default="grid:7x7")
    parser.add_argument("--objects", type=int, default=3)
    parser.add_argument("--walls", type=int, default=6)
    parser.add_argument("--worlds", type=int, default=64)
    parser.add_argument("--lifetime", type=int, default=0, help="updates; 0: as it was learned in")
    parser.add_argument("--rates", type=float, nargs="*", default=[10.0, 40.0, 160.0])
    args = parser.parse_args()
    config = config_lib.parse(read_config(args.workdir)["config"])
    kwargs = {"objects": args.objects, "walls": args.walls}
    lived = dataclasses.replace(config.lpg, lifetime=args.lifetime or config.lpg.lifetime)
    config = dataclasses.replace(config, env=args.env, env_kwargs=kwargs, lpg=lived)
    kind = lifetimes.make_learned(config)
    rules = {"untrained": kind.init(jax.random.key(0)), "learned": read_rule(args.workdir, config)}
    measure = make_measure(config, kind.agent, args.worlds)
    for name, rule in rules.items():
        print(json.dumps({"rule": name, **measure(rule, config.learning_rate)}), flush=True)
    own = dataclasses.replace(config.vtrace, clip=0.0)
    spec = lifetimes.make_family(config).spec
    agent = AGENTS["vtrace"].make(spec, config.settings, own, Devices())
    measure = make_measure(config, agent, args.worlds)
    for rate in args.rates:
        print(json.dumps({"rule": "a2c", **measure((), rate)}), flush=True)


if __name__ == "__main__":
    main()
