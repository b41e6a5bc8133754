"""Sweeps: each of the agents that learn in one program is what it would be alone."""

import dataclasses
import re

import jax
import numpy as np
import pytest

from podracer import anakin, evaluate
from podracer.anakin import trainer
from podracer.config import members
from podracer.config.sizes import auto_cpu_devices, make_sizes
from podracer.errors import ConfigError, DivergedError
from podracer.training import command_line, saved_run
from podracer.training.rows import comparable
from podracer.training.sweep_effects import effective_settings
from podracer.training.sweep_report import make_report
from tests.agents.test_battery import ROWS
from tests.helpers import ROOT, make_config, make_run

SETTINGS = {
    "env": "dummy:counting",
    "num_envs": 16,
    "cpu_devices": 2,
    "total_steps": 16 * 8 * 4,
    "num_minibatches": 2,
    "normalize_observations": True,
}
CONTINUOUS = ("d4pg",)
CARTPOLE = ROOT / "configs" / "cartpole.py"


def config(agent: str = "ppo", **changes):
    own = {key: x for key, x in ROWS[agent].settings.items() if "__" in key}
    env = {"env": "dummy:choice", "env_kwargs": {"continuous": agent in CONTINUOUS}}
    replay = {"replay__begin": 16, "replay__capacity": 16 * 64}
    return make_config(agent=agent, **{**SETTINGS, **env, **own, **replay, **changes})


def names(agent: str) -> dict[str, bool]:
    """The settings in which agents of this kind may differ."""
    return members.scalars(config(agent), ("replay", agent))


def nested(values):
    """Values by dotted name in sections."""
    found = {}
    for name, x in values.items():
        *sections, last = name.split(".")
        section = found
        for key in sections:
            section = section.setdefault(key, {})
        section[last] = x
    return found


def value_of(record, name: str) -> float:
    for key in name.split("."):
        record = getattr(record, key)
    return record


def test_a_grid_has_every_combination_with_each_seed():
    sweep = {"learning_rate": [1e-3, 1e-4], "ppo": {"clip": (0.1, 0.3)}}
    whole = make_config(sweep=sweep, num_seeds=2, seed=5)
    found = whole.members
    assert [(x.seed, *x.settings.values()) for x in found] == [
        (seed, rate, clip) for rate in (1e-3, 1e-4) for clip in (0.1, 0.3) for seed in (5, 6)
    ]
    assert [x.name for x in found] == [f"member_{i}" for i in range(8)]
    assert [x.members for x in whole.points] == [found[i : i + 2] for i in (0, 2, 4, 6)]
    flags = "--config.learning_rate=0.0001 --config.ppo.clip=0.3 --config.seed=5"
    assert whole.points[3].text == f"{flags} --config.num_seeds=2"
    assert make_config(num_seeds=2).members[1] == members.Member("seed_1", 1, {})


def test_points_are_drawn_from_lists_and_distributions():
    sweep = {
        "learning_rate": "log_uniform(1e-5, 1e-1)",
        "discount": "uniform(0.9, 1)",
        "ppo": {"clip": [0.1, 0.2]},
    }

    def draw(population, **changes):
        found = make_config(sweep={**sweep, **changes}, population=population).members
        return {name: np.array([x.settings[name] for x in found]) for name in found[0].settings}

    many = draw(1000)
    assert ((many["discount"] > 0.9) & (many["discount"] < 1)).all()
    assert abs(many["discount"].mean() - 0.95) < 0.005
    logarithms = np.log10(many["learning_rate"])
    assert abs(logarithms.mean() + 3) < 0.15
    assert logarithms.min() < -4.9
    assert logarithms.max() > -1.1
    assert abs((many["ppo.clip"] == 0.1).mean() - 0.5) < 0.06
    # More points begin with the same ones, and settings are drawn independently of each other.
    fewer = draw(10, value_cost=[0.5])
    for name in many:
        np.testing.assert_array_equal(fewer[name], many[name][:10])
    assert abs(np.corrcoef(logarithms, many["discount"])[0, 1]) < 0.1
    other = make_config(sweep=sweep, population=10, seed=1).members
    assert other[0].settings["discount"] != many["discount"][0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sweep": {"num_envs": [8, 16]}}, "sweep.num_envs can't differ .* that can: ppo.gae_lam"),
        ({"sweep": {"ppo": {"clipp": [0.1]}}}, "sweep.ppo.clipp can't .* did you mean ppo.clip?"),
        ({"sweep": {"clip": [0.1]}}, "sweep.clip can't differ .* did you mean ppo.clip?"),
        ({"sweep": {"dqn": {"huber": [1.0]}}}, "sweep.dqn.huber can't differ"),
        ({"sweep": {"ppo": 3}}, "sweep.ppo must be a list of numbers, got 3"),
        ({"sweep": {"discount": []}}, r"sweep.discount must be a list of numbers, got \[\]"),
        ({"sweep": {"discount": [0.9, 2]}}, "member_1 .*discount=2.0 .*must be in .0, 1., got 2.0"),
        ({"sweep": {"discount": "uniform(0, 1)"}}, "to draw from a distribution, set population"),
        ({"sweep": {"ppo": {"value_clip": [0, 1]}}}, "sweep.ppo.value_clip must be positive: 0"),
        ({"sweep": {"discount": "normal(0,1)"}}, "LOW, HIGH.* got 'normal"),
        ({"sweep": {"discount": "uniform(1,0)"}, "population": 2}, "the smaller one first, got"),
        ({"sweep": {"epsilon": "log_uniform(0,1)"}, "population": 2}, "two positive numbers, the"),
        ({"population": 4}, "population=4 draws points of a sweep, but sweep is empty"),
        ({"population": -1}, "population must not be negative, got -1"),
    ],
)
def test_impossible_sweeps_are_rejected(changes, message):
    with pytest.raises(ConfigError, match=message):
        make_config(**changes)


@pytest.mark.parametrize(
    ("members", "devices", "groups", "envs_per_device"),
    [(1, 4, 1, 4), (2, 4, 2, 8), (8, 4, 4, 16), (6, 4, 2, 8), (3, 4, 1, 4), (3, 1, 1, 16)],
)
def test_agents_are_spread_over_devices_first(members, devices, groups, envs_per_device):
    sizes = make_sizes(config(num_seeds=members), devices)
    assert (sizes.num_groups, sizes.envs_per_device) == (groups, envs_per_device)
    assert sizes.num_devices == devices


def test_turns_have_equally_many_agents():
    sizes = make_sizes(config(num_seeds=12, agents_at_once=3), 2)
    assert (sizes.num_groups, sizes.agents_at_once) == (2, 3)
    assert make_sizes(config(num_seeds=12, agents_at_once=9), 2).agents_at_once == 6
    with pytest.raises(ConfigError, match=r"6 agents .* agents_at_once=4; 1, 2, 3, 6 would"):
        make_sizes(config(num_seeds=12, agents_at_once=4), 2)


def test_two_cores_are_used_by_agents_that_exchange_nothing(monkeypatch):
    monkeypatch.setattr("podracer.config.sizes.cpu_cores", lambda: 2)
    settings = {"num_envs": 3, "num_minibatches": 1}
    assert [auto_cpu_devices(config(num_seeds=n, **settings)) for n in (1, 2, 3)] == [1, 2, 1]
    # Six agents are turns of two on one device, but not three on each of two.
    turns = [auto_cpu_devices(config(num_seeds=6, agents_at_once=n, **settings)) for n in (2, 3)]
    assert turns == [1, 2]


# Settings of each agent that have no effect in it, or none beside the others.
NO_ACTOR = {"entropy_cost", "value_cost"}
NO_REPLAY = {"replay.importance_exponent", "replay.priority_exponent"}
WITHOUT_EFFECT = {
    # In the search "muzero".
    "alphazero": {
        "alphazero.search.value_scale",
        "alphazero.search.final_temperature",
        "entropy_cost",
        *NO_REPLAY,
    },
    "d4pg": NO_ACTOR,
    "dqn": NO_ACTOR,
    "muzero": {"muzero.search.value_scale", "entropy_cost"},
    "ppo": NO_REPLAY,
    "q_lambda": NO_ACTOR | NO_REPLAY,
    "r2d2": NO_ACTOR,
    # With the objective that is clipped as PPO's.
    "vtrace": {"vtrace.clip_pg_rho", *NO_REPLAY},
}


@pytest.mark.parametrize(
    "agent", [x if x == "ppo" else pytest.param(x, marks=pytest.mark.slow) for x in ROWS]
)
def test_agents_may_differ_in_every_number_of_the_maths(agent, monkeypatch):
    """Traced, not compiled."""
    monkeypatch.setattr(trainer, "check_effects", lambda *_: None)
    changes = {
        "alphazero": {"alphazero__search__policy": "muzero"},
        "muzero": {
            "muzero__search__policy": "muzero",
            "muzero__search__temperature_steps": 1000,
            "muzero__entropy__steps": 1000,
        },
    }.get(agent, {})
    whole = config(agent, **changes)
    values = {x: [value_of(whole, x) or 0.1] for x in names(agent)}
    assert {"discount", "learning_rate", "max_grad_norm"} < values.keys()
    program = trainer.prepare(config(agent, sweep=nested(values), population=2, **changes))
    assert program.state.settings.keys() == values.keys()
    assert all(x.shape == (2,) for x in program.state.settings.values())
    assert (
        values.keys() - effective_settings((program.step, program.evaluate), program.state)
        == WITHOUT_EFFECT[agent]
    )


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"agent": "dqn", "sweep": {"entropy_cost": [0.0, 0.1]}}, "entropy_cost"),
        ({"agent": "vtrace", "sweep": {"vtrace": {"clip_pg_rho": [1.0]}}}, "vtrace.clip_pg_rho"),
        (
            {
                "sweep": {"value_cost": "uniform(0.2, 0.5)", "epsilon": "uniform(0.1, 0.2)"},
                "optimizer": "sgd",
                "population": 4,
                "selection": {"every": 1},
            },
            "epsilon",
        ),
    ],
)
def test_a_setting_without_effect_is_rejected(changes, name):
    """Also if a population changes it."""
    with pytest.raises(ConfigError, match=f"sweep.{name} has no effect: .* remove it"):
        trainer.prepare(config(**changes))


# Values that are not those of the config, so that a setting which is ignored shows.
SWEEPS = {
    "ppo": {
        "learning_rate": [3e-3],
        "epsilon": [1e-4],
        "max_grad_norm": [0.1],
        "discount": [0.9],
        "entropy_cost": [0.1],
        "ppo": {"clip": [1e-4, 0.3], "gae_lambda": [0.5], "value_clip": [0.1], "target_kl": [0.01]},
    },
    "vtrace": {
        "value_cost": [1.0],
        "discount": [0.9],
        "vtrace": {"clip": [1e-4, 0.3], "lambda_": [0.5], "clip_rho": [0.9]},
    },
    "q_lambda": {
        "discount": [0.8, 0.9],
        "q_lambda": {"lambda_": [0.3], "epsilon": [0.2], "epsilon_alpha": [2.0]},
    },
    "dqn": {"dqn": {"epsilon": [0.1]}, "replay": {"priority_exponent": [0.2, 0.9]}},
    "r2d2": {"discount": [0.8, 0.9], "r2d2": {"max_priority": [0.2], "epsilon": [0.1]}},
    "d4pg": {"d4pg": {"noise": [0.1, 1.0], "policy_rate": [0.1], "v_max": [3.0]}},
    "muzero": {"value_cost": [1.0], "muzero": {"search": {"value_scale": [0.01, 1.0]}}},
    "alphazero": {"alphazero": {"random_moves": [0.5], "lambda_": [0.1, 0.9]}},
}


@pytest.mark.parametrize(
    ("agent", "sweep"),
    [
        (agent, sweep)
        if agent == "ppo"
        else pytest.param(agent, sweep, marks=(pytest.mark.weekly, pytest.mark.timeout(900)))
        for agent, sweep in SWEEPS.items()
    ],
    ids=SWEEPS,
)
def test_each_member_is_the_single_run_with_its_settings(agent, sweep, tmp_path):
    # Two groups of two devices, each with a member of its own.
    whole = config(agent, sweep=sweep, seed=3, cpu_devices=4, env="dummy:memory")
    together = anakin.train(whole, tmp_path / "run", quiet=True)
    seen = []
    for i, member in enumerate(whole.members):
        one = dataclasses.replace(whole.alone(member), cpu_devices=1)
        alone = anakin.train(one, quiet=True)
        for a, b in zip(*map(jax.tree.leaves, (together.weights, alone.weights)), strict=True):
            np.testing.assert_allclose(a[i], b, atol=2e-5)
        seen.append(np.concatenate([np.ravel(x) for x in jax.tree.leaves(alone.weights)]))
        for row, single in zip(together.metrics, alone.metrics, strict=True):
            for name, x in single.items():
                if "time" not in name and name != "step":
                    np.testing.assert_allclose(
                        row[f"{member.name}/{name}"], x, rtol=1e-3, atol=1e-4, err_msg=name
                    )
    # The settings matter.
    assert len({x.tobytes() for x in seen}) == len(seen)
    found = together.summary["members"]
    returns = [x["eval_return_mean"] for x in found]
    assert together.summary["best_member"] == int(np.argmax(returns))
    assert [x["seed"] for x in found] == [3] * len(found)
    assert whole.points[int(np.argmax(returns))].text in together.summary["report"]


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["ppo", "dqn"])
def test_turns_change_nothing(agent):
    """Neither weights nor what a replay buffer or an environment holds, on one device."""
    states = []
    for at_once in (0, 1, 2):
        run = config(
            agent, sweep={"learning_rate": [1e-3, 3e-3]}, num_seeds=2, agents_at_once=at_once
        )
        program, _, state, step = make_run(run)
        assert program.sizes.agents_at_once == (at_once or 4)
        for _ in range(3):
            state, _ = step(state)
        states.append(state.replace(key=jax.random.key_data(state.key)))
    for other in states[1:]:
        for a, b in zip(*map(jax.tree.leaves, (states[0], other)), strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5)


def test_the_best_settings_are_those_with_the_largest_mean_over_seeds():
    """And not those of the best agent, which is of the second point."""
    whole = config(sweep={"learning_rate": [0.25, 0.5]}, num_seeds=3)
    returns = [4.0, 5.0, 6.0, 9.0, 1.0, 2.0]
    row = {f"member_{i}/eval/episode_return": x for i, x in enumerate(returns)}
    report = make_report(whole, [{"step": 0, "member_4/train/diverged": 1.0, **row}])
    assert [x["eval_return_mean"] for x in report["points"]] == [5, 4]
    # 4.303 is Student's t with two degrees of freedom; the seeds' deviation is 1.
    assert report["points"][0]["eval_return_interval"] == pytest.approx(4.303 / 3**0.5, rel=1e-3)
    assert report["best_member"] == 3
    _, first, second = report["report"].splitlines()
    flags = "--config.learning_rate=0.25 --config.seed=0 --config.num_seeds=3"
    assert first == f"  5.000 ± 2.484  member_0 to member_2: {flags}"
    assert second.endswith("--config.num_seeds=3 (1 diverged)")


def test_a_return_that_is_not_a_number_is_never_the_best(tmp_path):
    """An environment may yield one to an agent whose weights are finite."""
    whole = config(sweep={"learning_rate": [0.25, 0.5, 0.75]})
    returns = [1.0, np.nan, 2.0]
    row = {f"member_{i}/eval/episode_return": x for i, x in enumerate(returns)}
    report = make_report(whole, [{"step": 0, **row}])
    assert report["best_member"] == 2
    assert "member_1" not in report["report"]
    assert saved_run.best_member(tmp_path, whole.members, [row]) == 2
    assert comparable(returns).max() == 2


@pytest.mark.slow
def test_one_that_diverges_learns_no_more_and_the_others_go_on(tmp_path):
    # The second one's values overflow.
    sweep = {"value_cost": [0.5, 1e38, 0.25]}
    whole = config(sweep=sweep, max_grad_norm=0.0, learning_rate=1e-2)
    result = anakin.train(whole, tmp_path / "run", quiet=True)
    last = result.metrics[-1]
    assert [last[f"member_{i}/train/diverged"] for i in range(3)] == [0, 1, 0]
    assert last["train/diverged"] == pytest.approx(1 / 3)
    assert "member_1/loss/total" not in last
    assert [x["diverged"] for x in result.summary["members"]] == [False, True, False]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(result.weights))
    assert all(np.isfinite(x) for x in last.values())
    for i in (0, 2):
        alone = anakin.train(whole.alone(whole.members[i]), quiet=True)
        for a, b in zip(*map(jax.tree.leaves, (result.weights, alone.weights)), strict=True):
            np.testing.assert_allclose(a[i], b, atol=2e-5)
    with pytest.raises(DivergedError, match="each of the 2 agents became NaN or infinite"):
        anakin.train(config(sweep={"value_cost": [1e38, 2e38]}, max_grad_norm=0.0), quiet=True)


def run_sweep(workdir, *more: str) -> int:
    """Trains a small sweep by the command line, and returns the exit code."""
    flags = [
        "--config.sweep.learning_rate=log_uniform(1e-4, 1e-2)",
        "--config.num_envs=8",
        "--config.evaluation.episodes=4",
        f"--workdir={workdir}",
        *more,
    ]
    return command_line.main(anakin.train, ["anakin", f"--config={CARTPOLE}", *flags])


@pytest.mark.slow
def test_the_command_line_trains_and_evaluates_a_sweep(tmp_path, capsys):
    def run(population, *more):
        changes = ["sweep.ppo.clip=[0.1,0.2]", f"population={population}", "updates_per_call=2"]
        changes += ["unroll_length=8", "total_steps=512"]
        return run_sweep(tmp_path / "run", *(f"--config.{x}" for x in changes), *more)

    assert run(3) == 0
    printed = capsys.readouterr().out
    assert "a sweep" in printed
    best = re.search(r"member_\d+: (--config.*)", printed)
    assert best, printed
    assert evaluate.main(["evaluate", f"--workdir={tmp_path / 'run'}", "--member=2"]) == 0
    assert "member 2 of 3" in capsys.readouterr().out
    assert run(4, "--quiet") == 2
    assert "population=3, not 4, which can't change" in capsys.readouterr().err
