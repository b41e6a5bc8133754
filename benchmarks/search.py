"""Measures searches beside plain loops around mctx, and MuZero's unrolled model on a CPU.

    python benchmarks/search.py planner --env=gymnax:Breakout-MinAtar --state=planes
    python benchmarks/search.py selfplay --env=pgx:connect_four --simulations=32
    python benchmarks/search.py unroll --env=gymnax:Breakout-MinAtar --batch=32

"planner" compares a search by podracer, in which each environment has a random key of its own, with
one call of mctx for the whole batch. "selfplay" compares AlphaZero's unrolls with a loop that has
the structure of pgx's AlphaZero example. "unroll" times gradient steps of MuZero inside a scan, for
several numbers of steps that the model is unrolled for, by podracer's convolutions or JAX's own.
Networks and sizes are the same on both sides, and rounds alternate. Prints a JSON line for each.
"""

import argparse
import importlib
import importlib.metadata
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import mctx
from common import versions

from podracer import config as config_lib
from podracer.acting import unroll as acting
from podracer.agents import muzero
from podracer.agents.search import Found, Planner, SearchConfig, outcome
from podracer.agents.value_scale import Support
from podracer.nets import conv, masks
from podracer.nets.actor_critic import make_network
from podracer.nets.model import make_model
from podracer.training import builder
from podracer.types import Discrete, Spec, TimeStep, TrainState
from podracer.xla_cpu import malloc

# mctx is made of dataclasses whose constructors type checkers do not understand.
lib: Any = mctx

CONVOLUTIONS = {"podracer": conv.convolve, "jax": jax.lax.conv_general_dilated}
UNROLLS = (1, 5)


def make_config(agent: str, args: argparse.Namespace, **changes: Any) -> config_lib.Config:
    """The agent's default config with the sizes of the command line."""
    config = config_lib.default_config(agent)
    sizes = {
        "env": args.env,
        "num_envs": args.num_envs,
        f"{agent}.search.simulations": args.simulations,
        "muzero.model.state": args.state,
        "muzero.model.channels": args.channels,
        "muzero.model.blocks": args.blocks,
    }
    config.update_from_flattened_dict({**sizes, **changes})
    return config_lib.parse(config)


def disturbed(params: Any) -> Any:
    """Parameters with some noise: the last layers are zeros at first, and all actions alike."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noise = [0.1 * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(tree, [x + y for x, y in zip(leaves, noise, strict=True)])


def gumbel(
    config: SearchConfig,
    params: Any,
    key: Any,
    root: Any,
    step: Any,
    legal: Any,
    *,
    noise: bool = True,
) -> Any:
    """One call of mctx for a batch, with the settings that podracer's search has."""
    qtransform = partial(
        lib.qtransform_completed_by_mix_value,
        value_scale=config.value_scale,
        epsilon=config.least_range,
    )
    return lib.gumbel_muzero_policy(
        params,
        key,
        root,
        step,
        config.simulations,
        None if legal is None else ~legal,
        qtransform=qtransform,
        max_num_considered_actions=config.considered,
        gumbel_scale=1.0 if noise else 0.0,
    )


def make_planners(args: argparse.Namespace, *, noise: bool = True) -> dict[str, Callable[[], Any]]:
    """One search of each environment by podracer and by mctx."""
    config = make_config("muzero", args)
    env = builder.make_environment(config)
    own = config.muzero
    model = make_model(env.spec, config.settings.network, own.model, own.atoms)
    planner = Planner(own.search, model, Support(own.largest_value, own.atoms), config.discount)
    params = disturbed(model.init(jax.random.key(0)))
    keys = jax.random.split(jax.random.key(2), args.num_envs)
    observation = jax.vmap(env.reset)(keys)[1].observation

    def step(params: Any, _: Any, action: Any, state: Any) -> Any:
        state, reward = model.step(params, state, action)
        logits, value = model.predict(params, state)
        decode = planner.support.decode
        discount = jnp.full(action.shape, config.discount)
        return outcome(decode(reward), discount, logits, decode(value)), state

    def plain(params: Any, key: Any, observation: Any) -> tuple[Any, Any]:
        state, logits, value = planner.predict(params, observation)
        root = lib.RootFnOutput(prior_logits=logits, value=value, embedding=state)
        output = gumbel(own.search, params, key, root, step, masks.legal(observation), noise=noise)
        return output.action, output.action_weights

    return {
        "podracer": partial(
            jax.jit(partial(planner.search, noise=noise)), params, keys, observation
        ),
        "plain": partial(jax.jit(plain), params, keys[0], observation),
    }


def make_plain_loop(config: config_lib.Config, network: Any, length: int) -> Callable:
    """``(params, state, key) -> (state, samples [T, B, ...])``: self-play with pgx and mctx alone,
    with a single key for each step."""
    pgx: Any = importlib.import_module("pgx")
    restart: Any = importlib.import_module("pgx.experimental").auto_reset
    game = pgx.make(config.env.partition(":")[2])
    play = jax.vmap(restart(game.step, game.init))

    def predict(params: Any, state: Any) -> tuple[Any, Any]:
        seen = {"board": state.observation, masks.ACTION_MASK: state.legal_action_mask}
        seen = jax.tree.map(lambda x: x[None], seen)
        _, logits, value = network.apply(params, (), seen, jnp.zeros((1, config.num_envs), bool))
        return logits[0], value[0]

    def look_ahead(params: Any, _: Any, action: Any, state: Any) -> Any:
        player = state.current_player
        state = jax.vmap(game.step)(state, action)
        logits, value = predict(params, state)
        reward = jnp.take_along_axis(state.rewards, player[:, None], 1)[:, 0]
        discount = jnp.where(state.terminated, 0.0, -1.0)
        value = jnp.where(state.terminated, 0.0, value)
        return outcome(reward, discount, logits, value), state

    def step(params: Any, state: Any, key: Any) -> tuple[Any, Any]:
        search_key, play_key = jax.random.split(key)
        logits, value = predict(params, state)
        root = lib.RootFnOutput(prior_logits=logits, value=value, embedding=state)
        search, legal = config.alphazero.search, state.legal_action_mask
        output = gumbel(search, params, search_key, root, look_ahead, legal)
        new = play(state, output.action, jax.random.split(play_key, config.num_envs))
        reward = jnp.take_along_axis(new.rewards, state.current_player[:, None], 1)[:, 0]
        return new, (state.observation, output.action_weights, reward, new.terminated)

    def loop(params: Any, state: Any, key: Any) -> tuple[Any, Any]:
        return jax.lax.scan(partial(step, params), state, jax.random.split(key, length))

    return loop


def make_selfplay(args: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """One unroll of AlphaZero by podracer, and by a plain loop."""
    config = make_config("alphazero", args)
    env = builder.make_environment(config)
    agent = builder.make_agent(config, env.spec)
    weights = agent.init(jax.random.key(0))
    weights = weights.replace(params=disturbed(weights.params))
    key, ids = jax.random.key(2), jnp.arange(args.num_envs)
    start = jax.jit(lambda key: acting.reset(env, agent, key, ids))(key)
    unroll = jax.jit(partial(acting.unroll, env, agent, length=args.unroll_length))
    network = make_network(env.spec, config.settings.network)
    loop = jax.jit(make_plain_loop(config, network, args.unroll_length))
    game: Any = importlib.import_module("pgx").make(args.env.partition(":")[2])
    games = jax.jit(jax.vmap(game.init))(jax.random.split(key, args.num_envs))
    return {
        "podracer": lambda: unroll(weights=weights, state=start, key=key),
        "plain": lambda: loop(weights.params, games, key),
    }


def make_batch(spec: Spec, config: muzero.Config, items: int) -> muzero.Batch:
    """Random items, all of them within episodes."""
    assert isinstance(spec.action, Discrete)
    shape, actions = (config.length + 1, items), spec.action.num_actions
    observation = jax.tree.map(lambda x: jnp.ones((1, items, *x.shape), x.dtype), spec.observation)
    zeros, policy = jnp.zeros(shape), jnp.full((*shape, actions), 1 / actions)
    timestep = TimeStep((), zeros, zeros + 1, zeros > 0)
    found = Found(jnp.zeros(shape, int), policy, zeros, zeros)
    return muzero.Batch(observation, timestep, jnp.zeros(shape, int), found, zeros[0] + 1)


def make_gradient_steps(args: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """A gradient step of MuZero in a scan of length one, as in training."""
    calls: dict[str, Callable[[], Any]] = {}
    for name, convolve in CONVOLUTIONS.items():
        for steps in UNROLLS:
            config = make_config("muzero", args, **{"muzero.unroll": steps})
            with mock.patch.object(conv, "convolve", convolve):
                env = builder.make_environment(config)
                agent = builder.make_agent(config, env.spec)
                weights = agent.init(jax.random.key(0))
            train_state = TrainState(weights, (), (), jnp.int32(0))
            batch = make_batch(env.spec, config.muzero, args.batch)

            def step(params: Any, batch: Any, agent: Any = agent, state: Any = train_state) -> Any:
                gradient, _ = jax.grad(agent.loss, has_aux=True)(
                    params, state, batch, jax.random.key(0)
                )
                return jax.tree.map(lambda x, g: x - 1e-4 * g, params, gradient), ()

            update = jax.jit(lambda params, xs, step=step: jax.lax.scan(step, params, xs)[0])
            batches = jax.tree.map(lambda x: x[None], batch)
            calls[f"{name}, {steps}"] = partial(update, weights.params, batches)
    return calls


def measure(
    calls: dict[str, Callable[[], Any]], rounds: int, repeat: int
) -> dict[str, dict[str, Any]]:
    """Seconds of each call, by the clock and of the CPU, and of the first one, which compiles."""
    first, seconds = {}, {name: [] for name in calls}
    for name, call in calls.items():
        start = time.perf_counter()
        jax.block_until_ready(call())
        first[name] = round(time.perf_counter() - start, 2)
    for _ in range(rounds):
        for name, call in calls.items():
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(repeat):
                jax.block_until_ready(call())
            elapsed = time.perf_counter() - wall, time.process_time() - cpu
            seconds[name].append([x / repeat for x in elapsed])
    return {
        name: {"wall": list(wall), "cpu": list(cpu), "first": first[name]}
        for name, (wall, cpu) in ((name, zip(*x, strict=True)) for name, x in seconds.items())
    }


# What makes the calls of a comparison, and the setting that says how many items a call has.
KINDS = {
    "planner": (make_planners, ("num_envs",)),
    "selfplay": (make_selfplay, ("num_envs", "unroll_length")),
    "unroll": (make_gradient_steps, ("batch",)),
}
SIZES = ("env", "num_envs", "simulations", "unroll_length", "batch", "state", "channels", "blocks")


def report(kind: str, args: argparse.Namespace, name: str, times: dict[str, Any]) -> dict[str, Any]:
    """One result; "items" are environment steps, or items of a batch."""
    items = 1
    for size in KINDS[kind][1]:
        items *= getattr(args, size)
    wall, cpu = median(times["wall"]), median(times["cpu"])
    result = {
        "kind": kind,
        "variant": name,
        **{size: getattr(args, size) for size in SIZES},
        "items_per_second": round(items / wall, 1),
        "items_per_cpu_second": round(items / cpu, 1),
        "items_per_cpu_second_all": [round(items / x, 1) for x in times["cpu"]],
        "first_call_seconds": times["first"],
        "device": jax.devices()[0].device_kind,
        "versions": {**versions("podracer", "jax"), "mctx": importlib.metadata.version("mctx")},
    }
    if kind != "unroll":
        result["simulations_per_cpu_second"] = round(args.simulations * items / cpu)
    return result


def make_parser() -> argparse.ArgumentParser:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=KINDS, help="what to measure")
    parser.add_argument("--env", default="gymnax:CartPole-v1")
    parser.add_argument("--num_envs", type=int, default=64, help="environments that search")
    parser.add_argument("--simulations", type=int, default=16, help="simulations of a search")
    parser.add_argument("--unroll_length", type=int, default=16, help="steps of self-play")
    parser.add_argument("--batch", type=int, default=32, help="items of a gradient step")
    parser.add_argument("--state", choices=("vector", "planes"), default="vector")
    parser.add_argument("--channels", type=int, default=16, help="channels of planes")
    parser.add_argument("--blocks", type=int, default=1, help="residual blocks of planes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeat", type=int, default=2, help="calls of each variant in a round")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark; ``argv`` excludes the program's name."""
    args = make_parser().parse_args(argv)
    malloc.keep_freed_memory()  # As in training.
    times = measure(KINDS[args.kind][0](args), args.rounds, args.repeat)
    for name, x in times.items():
        print(json.dumps(report(args.kind, args, name, x)))


if __name__ == "__main__":
    main()
