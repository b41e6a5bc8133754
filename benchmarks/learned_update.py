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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer import config as config_lib
from podracer.agents import AGENTS, lpg
from podracer.config import Config
from podracer.monitoring.curves import mean_and_interval
from podracer.storage import checkpoint
from podracer.storage.workdir import read_config
from podracer.training import lifetimes
from podracer.types import Devices, Weights


def read_rule(workdir: str, config: Config) -> Any:
    """The parameters of the rule that a run has learned."""
    like = jax.eval_shape(lpg.make_rule(config.lpg).init, jax.random.key(0))
    return checkpoint.load_weights(workdir, "last", Weights(like, ()))[0].params


def measure(config: Config, agent: Any, rule: Any, worlds: int) -> dict[str, float]:
    """The returns of agents of this kind, one in each world."""
    lives = lifetimes.make_lives(config, lifetimes.make_family(config), agent)
    keys = jax.random.split(jax.random.key(config.seed + 1), worlds)
    play = jax.jit(lambda rule, keys: lifetimes.whole_lives(lives, rule, keys, config.lpg.lifetime))
    episodes = play(rule, keys)
    found: dict[str, float] = {}
    for name, first in (("last", round(0.8 * config.lpg.lifetime)), ("life", 0)):
        count, total = (x[:, first:].sum(1) for x in (episodes.episodes, episodes.ret))
        mean, interval = mean_and_interval(np.asarray(total / jnp.maximum(count, 1)))
        assert interval is not None
        found[f"{name}_return"] = round(float(mean), 4)
        found[f"{name}_interval"] = round(float(interval), 4)
    return found


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
    for name, rule in rules.items():
        print(json.dumps({"rule": name, **measure(config, kind.agent, rule, args.worlds)}))
    spec = lifetimes.make_family(config).spec
    for rate in args.rates:
        own = dataclasses.replace(
            config, learning_rate=rate, vtrace=dataclasses.replace(config.vtrace, clip=0.0)
        )
        agent = AGENTS["vtrace"].make(spec, own.settings, own.vtrace, Devices())
        found = measure(own, agent, (), args.worlds)
        print(json.dumps({"rule": "a2c", "learning_rate": rate, **found}), flush=True)


if __name__ == "__main__":
    main()
