"""Plans: their arithmetic, output and error messages, and our programs on the TPU compiler."""

import dataclasses
import importlib.util
import json
import math
import pathlib
import runpy

import jax
import pytest
from rich.console import Console

from podracer import config as config_lib
from podracer.config.sizes import make_sizes
from podracer.errors import ConfigError, ExitCode, run_command
from podracer.plan import __main__ as plan_main
from podracer.plan import architectures, chips, estimate, programs, table
from podracer.plan.costs import Kernel
from podracer.training import lifetimes
from podracer.xla_cpu import prng
from tests.helpers import is_one_error

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
CARTPOLE = f"--config={CONFIGS / 'cartpole.py'}"
KERNEL = Kernel("k", "fusion", 1, 0, 0, 0, 0, False, True)
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="needs the TPU compiler: pip install -e '.[tpu]'",
)


def config_of(name, **changes):
    config = runpy.run_path(str(CONFIGS / name))["get_config"]()
    config.update_from_flattened_dict(changes)
    return config_lib.parse(config)


class FakeDevice:
    process_index, platform = 0, "tpu"

    def __init__(self, x, core):
        self.coords, self.core_on_chip = (x, 0, 0), core


def fake_slice(cores):
    """A slice of two v3 chips, each with ``cores`` devices."""
    devices = [FakeDevice(x, core) for x in range(2) for core in range(cores)]
    return chips.Slice("v3:2x1", 1, chips.CHIPS["v3"], devices)


def test_a_core_has_its_fraction_of_the_chips_peaks():
    one, two = fake_slice(1), fake_slice(2)
    assert (one.chips_per_device, two.chips_per_device, two.num_chips) == (1, 0.5, 2)
    for kernel, seconds in (
        (KERNEL._replace(flops=123e12), 1),
        (KERNEL._replace(bytes=900e9), 1),
        (KERNEL._replace(flops=123e12, bytes=1800e9), 2),
        (KERNEL._replace(opcode="all-reduce", comm_bytes=328e9), 2),
        (KERNEL._replace(opcode="send", comm_bytes=328e9), 0),
    ):
        assert math.isclose(estimate._roofline_seconds(kernel, one), seconds)
        assert math.isclose(estimate._roofline_seconds(kernel, two), 2 * seconds)
    assert math.isclose(estimate._compiler_seconds(KERNEL._replace(cycles=940), one), 1e-6)


def test_actors_and_learners_run_in_parallel_unless_they_share_devices():
    def program(where, seconds):
        fields = dict.fromkeys(f.name for f in dataclasses.fields(estimate.ProgramPlan))
        return estimate.ProgramPlan(**{**fields, "where": where, "roofline_seconds": seconds})

    plans = [program("a", 1.0), program("a", 2.0), program("b", 5.0)]
    assert estimate._update_seconds(plans, False, "roofline_seconds") == 5
    assert estimate._update_seconds(plans, True, "roofline_seconds") == 8
    assert estimate._update_seconds(plans, False, "compiler_seconds") is None


@pytest.mark.parametrize(
    ("message", "needed", "available"),
    [
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
            "temporaries (190.59G) exceeds available HBM (15.75G). HLO module: jit_step.",
            190.59 * 2**30,
            15.75 * 2**30,
        ),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 512.5M of 256M hbm. "
            "Exceeded hbm capacity by 256.5M.",
            512.5 * 2**20,
            256 * 2**20,
        ),
        ("RESOURCE_EXHAUSTED: without numbers", 0, 0),
    ],
)
def test_parse_out_of_memory(message, needed, available):
    error = programs.parse_out_of_memory(message)
    assert (error.needed, error.available) == (needed, available)


def test_the_largest_size_that_fits_is_found_by_few_compilations():
    config, tried = config_of("cartpole.py", num_envs=4096), []

    def check(config):
        n = config.num_envs
        tried.append(n)
        if n == 512:
            raise ConfigError("does not divide over minibatches")
        return estimate.TooLarge("step", 100 + n, 500, 0, {}, "") if 100 + n > 500 else None

    excess = estimate.TooLarge("step", 4196, 500, 0, {}, "")
    assert estimate._largest_that_fits(config, "num_envs", 4096, excess, check) == 256
    # 4096 * 500 / 4196 = 488, so that 512 is not tried.
    assert tried == [256]
    unknown = estimate.TooLarge("step", 0, 0, 0, {}, "")
    assert estimate._largest_that_fits(config, "num_envs", 4096, excess, lambda _: unknown) is None


class CpuSlice(chips.Slice):
    """Two CPU devices in place of the cores of a chip."""

    @property
    def num_chips(self):
        return 1


@pytest.mark.slow
def test_fewer_agents_are_tried_where_several_learn_at_once(monkeypatch):
    """The config says 0, which is all six that each of the two devices has."""
    tpu_slice = CpuSlice("v3:1x1", 1, chips.CHIPS["v3"], jax.devices()[:2])
    config = config_of("cartpole.py", num_seeds=12)
    env = architectures.ANAKIN.make_env(config)
    run, one = (
        architectures.ANAKIN.trace(of_agents, env, tpu_slice)
        for of_agents in (config, config_of("cartpole.py", num_seeds=2))
    )
    assert (run.at_once, one.at_once) == ({"agents_at_once": 6}, {})
    tried = []

    def too_large(results, run, memory):
        sizes = run.sizes
        tried.append((sizes.num_envs, sizes.unroll_length, sizes.agents_at_once))
        needed, available = math.prod(tried[-1]), 32 * 128 * 4
        excess = estimate.TooLarge("step", needed, available, 0, {}, "")
        return excess if needed > available else None

    monkeypatch.setattr(estimate, "_too_large", too_large)
    monkeypatch.setattr(programs, "compile_traced", lambda program: None)
    arch = architectures.ANAKIN._replace(
        trace=lambda config, env, tpu_slice: run._replace(sizes=make_sizes(config, 2))
    )
    plan = estimate.make_plan(config, arch, env, tpu_slice)
    assert plan.too_large.fits == {"num_envs": 16, "unroll_length": 64, "agents_at_once": 3}
    assert tried == [(32, 128, 6), (16, 128, 6), (32, 64, 6), (32, 128, 3)]


@pytest.mark.parametrize(
    ("capacity", "batch", "fits", "compiled"),
    [
        (800_000, 64, {"replay.capacity": 200_000}, [(200, 64)]),
        # What the number of environments and the unroll's length don't change is tried once each.
        (100_000, 512, {"replay.batch": 256}, [(100, 512), (100, 512), (100, 256)]),
    ],
)
def test_what_is_too_large_of_a_replay_is_made_smaller(capacity, batch, fits, compiled):
    """Only its capacity changes its size, and only the other sizes change all other memory."""
    config = config_of("cartpole_dqn.py", **{"replay.capacity": capacity, "replay.batch": batch})
    tried = []

    def check(config):
        replay = config.replay.capacity // 1000
        tried.append((replay, config.replay.batch))
        needed = 300 + replay + config.replay.batch
        return estimate.TooLarge("step", needed, 700, replay, {}, "") if needed > 700 else None

    excess = check(config)
    tried.clear()
    sizes = ("num_envs", "unroll_length", "replay.capacity", "replay.batch")
    found = estimate._with_fits(excess, config, {}, check).fits
    assert found == dict.fromkeys(sizes) | fits
    assert tried == compiled


def test_the_architecture_follows_from_the_environment():
    assert architectures.resolve(config_of("cartpole.py"), "") is architectures.ANAKIN
    assert architectures.resolve(config_of("atari.py"), "") is architectures.SEBULBA
    assert architectures.resolve(config_of("cartpole.py"), "sebulba") is architectures.SEBULBA
    assert architectures.resolve(config_of("lpg.py"), "") is architectures.ANAKIN
    with pytest.raises(ConfigError, match="sebulba"):
        architectures.resolve(config_of("cartpole.py"), "sebula")


def run(*arguments):
    return run_command(lambda: plan_main.main(["plan", CARTPOLE, *arguments]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            [],
            "--topology is missing; specify for example --topology=v5e:4x4, or another of v2:2x2",
        ),
        (["--topology=v9:8x8"], "unknown topology 'v9:8x8'; did you mean"),
        (["--topology=moon"], "v3:32x32"),
        (["--topology=v5e:4x4x4"], "unknown topology 'v5e:4x4x4'"),
        (["--topology=v5e:32x32"], "unknown topology 'v5e:32x32'"),
        (["--topology=v5litepod-16"], "its topology is v5e:4x4"),
        (["--topology=v3-8"], "its topology is v3:2x2"),
        (["--topology=v5e:4x4", "--num_slices=0"], "--num_slices must be positive"),
        (["--topology=v5e:4x4", "--config.num_env=1"], "num_envs"),
    ],
)
def test_impossible_arguments_are_rejected_with_a_one_line_error(arguments, message, capsys):
    assert run(*arguments) == ExitCode.CONFIG
    error = capsys.readouterr().err
    assert message in error
    assert is_one_error(error)


def test_a_missing_tpu_compiler_is_rejected_with_the_install_command(monkeypatch, capsys):
    monkeypatch.setattr(chips.importlib.util, "find_spec", lambda name: None)
    assert run("--topology=v5e:4x4") == ExitCode.CONFIG
    assert "pip install -e '.[tpu]'" in capsys.readouterr().err


def printed(function, plans, capsys):
    function(plans, Console(width=200))
    return capsys.readouterr().out


def test_printed_plans(capsys):
    memory = programs.Memory(2**20, 2**18, 2**20, 3 * 2**19, 2**20, 2**19, 2**22)
    one, two, sent = (estimate.Collectives(*x) for x in ((1.0, 2048.0), (2.0, 24.0), (0.1, 16.4)))
    program = estimate.ProgramPlan(
        "step", architectures.ALL, memory, 9.25, 7.88e9, 9.06e6, 9094.0, one, two, sent,
        ("infeed.1",), 3, 5.69e-5, None,
    )  # fmt: skip
    plan = estimate.Plan(
        "v5e:2x2", 4, "anakin", 16, 16, 4, 1, 1, 1, 1, 4096, 256, 128, 524_288, 16, 2, 2.0**34,
        (program,), None, 9.22e9, None, ("a", "b"),
    )  # fmt: skip
    fits = {"num_envs": 512, "unroll_length": None}
    excess = estimate.TooLarge("step", 5 * 2**34, 2.0**34, 0, fits, "")
    no_fit = dataclasses.replace(plan, topology="v2:2x2", programs=(), too_large=excess)

    text = printed(table.print_plan, plan, capsys)
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines()]
    rows = {row[0]: row[1] for row in cells if row}
    assert text.startswith("4 x v5e:2x2: 16 chips, 16 cores with 16.0 GiB each, 4 hosts\n")
    assert rows["memory: total"] == "4.0 MiB (0.0%)"
    assert rows["memory: of these, replay"] == "256.0 KiB"
    assert rows["memory: new outputs"] == "512.0 KiB"
    assert rows["flops per update"] == "7.88 G"
    assert rows["other collectives per update"] == "2 of 24 Bytes"
    assert rows["of these, sent to other slices per update"] == "16 Bytes"
    assert rows["instructions waiting for the host"] == "infeed.1"
    assert rows["time per update, roofline"] == "56.9 μs"
    assert rows["time per update, compiler"] == "-"
    assert "3 instructions are in loops" in text
    assert "ESTIMATE: at most 9.22 G steps/s" in text
    assert "this chip's clock is not published." in text
    assert "The run: 1,048,576 steps, 2 updates, about 114 μs at this speed." in text
    host = printed(table.print_plan, dataclasses.replace(plan, arch="sebulba"), capsys)
    assert "the environments of each host must make 2.31 G steps/s." in " ".join(host.split())
    slow = dataclasses.replace(plan, compiler_steps_per_second=1e4)
    text = printed(table.print_plan, slow, capsys)
    assert "about 10.0 k steps/s by the compiler's estimate of cycles." in text
    assert "about 0:01:45 at" in text
    assert (
        "TOO LARGE: the program step needs 80.0 GiB, 64.0 GiB more than the 16.0 GiB of a core; "
        "num_envs=512 (32 per learner core) would fit" in printed(table.print_plan, no_fit, capsys)
    )

    groups = dataclasses.replace(plan, learners=4, num_groups=4)
    text = printed(table.print_plan, groups, capsys)
    assert "4 averaged groups, 1 on each of 4 groups of 4 cores; together: 4,096 env" in text
    population = dataclasses.replace(
        plan, num_agents=64, learners=64, num_groups=8, agents_at_once=4
    )
    text = printed(table.print_plan, population, capsys)
    assert (
        "anakin: 64 agents, 8 on each of 8 groups of 2 cores, 4 at a time; for each agent: 4,096 "
        "environments (256 per learner core)" in text
    )
    assert "ESTIMATE of all agents together: at most 9.22 G steps/s" in text

    text = printed(table.print_scaling, [plan, no_fit], capsys)
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines()]
    rows = {row[0]: row[1:] for row in cells if row}
    assert rows["memory per core"] == ["4.0 MiB of 16.0 GiB", "too large"]
    assert rows["sent to other slices per update"] == ["16 Bytes", ""]
    assert rows["steps/s, roofline"] == ["9.22 G", ""]
    assert rows["time of the run"] == ["114 μs", ""]
    assert "4 x v2:2x2: TOO LARGE" in text
    assert "rented" not in text
    flat = dataclasses.replace(plan, topology="v4:4x4x2")
    for text in (
        printed(table.print_plan, flat, capsys),
        printed(table.print_scaling, [flat, plan], capsys),
    ):
        assert text.count("v4:4x4x2 is not among the slices that can be rented") == 1
    assert all(map(chips.is_offered, (*chips.TOPOLOGIES, "v5p:4x4x12")))
    assert not any(map(chips.is_offered, ("v3:2x4", "v5e:4x2", "v4:4x12x4")))


def test_tpu_programs_use_jaxs_own_random_keys():
    assert str(jax.random.key_impl(prng.key(0, "tpu"))) == "threefry2x32"
    assert str(jax.random.key_impl(prng.key(0, "cpu"))) == "threefry_unrolled"
    assert str(jax.random.key_impl(prng.key(0))) == "threefry_unrolled"


@pytest.fixture(scope="module")
def libtpu():
    with pytest.MonkeyPatch.context() as patch:
        for key, value in plan_main.ENVIRONMENT.items():
            patch.setenv(key, value)
        yield


@needs_libtpu
def test_numbers_of_chips_cores_and_hosts(libtpu):
    pod = chips.get_slice("v3:32x32")
    assert (pod.num_chips, len(pod.devices), len(pod.hosts), pod.chips_per_device) == (
        1024,
        2048,
        256,
        0.5,
    )
    four = chips.get_slice("v5e:2x2", 4)
    assert (four.num_chips, len(four.devices), len(four.hosts)) == (16, 16, 4)
    assert four.chips_per_device == 1
    assert len(chips.get_slice("v5e:1x1").devices) == 1
    assert len(chips.get_slice("v4:2x2x1").devices) == 4
    with pytest.raises(ConfigError, match="did you mean v5e:4x8 or v5e:4x4"):
        chips.get_slice("v5e:4x5")


SLICES = ("v2:2x2", "v5e:4x4", "v3:32x32")


def check_scaling(plans):
    """Checks the plans of a step or a learner's update on slices of different sizes."""
    for program in plans:
        assert program.host == ()
        assert program.uncounted == 0
        # Gradients and metrics are reduced together.
        assert program.per_gradient_step.number == 1
        assert program.per_update.number <= 3
        assert program.per_update.bytes < 1000
        assert program.memory.total > 0
        assert 0 < program.roofline_seconds <= program.compiler_seconds
    assert len({program.per_gradient_step for program in plans}) == 1
    assert len({program.per_update.number for program in plans}) == 1
    flops = [program.flops for program in plans]
    assert max(flops) < 1.03 * min(flops)


@needs_libtpu
@pytest.mark.slow
def test_cartpole_scales_to_a_full_pod(libtpu):
    plans = []
    for name in SLICES:
        tpu_slice = chips.get_slice(name)
        num_envs = 16 * len(tpu_slice.devices)
        sizes = {"num_envs": num_envs, "total_steps": 10**9, "updates_per_call": 2}
        config = config_of("cartpole.py", **sizes)
        env = architectures.ANAKIN.make_env(config)
        plans.append(estimate.make_plan(config, architectures.ANAKIN, env, tpu_slice))
    check_scaling([plan.programs[0] for plan in plans])
    assert [plan.cores for plan in plans] == [8, 16, 2048]
    json.dumps([dataclasses.asdict(plan) for plan in plans])


@needs_libtpu
@pytest.mark.slow
def test_agents_of_different_groups_exchange_no_gradients_and_turns_need_less_memory(libtpu):
    tpu_slice = chips.get_slice("v5e:2x2")
    plans = []
    for at_once in (0, 1):
        sizes = {"num_envs": 256, "updates_per_call": 2}
        config = config_of("cartpole.py", num_seeds=16, agents_at_once=at_once, **sizes)
        env = architectures.ANAKIN.make_env(config)
        plans.append(estimate.make_plan(config, architectures.ANAKIN, env, tpu_slice))
    for plan, at_once in zip(plans, (4, 1), strict=True):
        assert (plan.num_agents, plan.num_groups, plan.agents_at_once) == (16, 4, at_once)
        assert plan.programs[0].per_gradient_step.number == 0
    together, in_turns = (plan.programs[0].memory for plan in plans)
    assert in_turns.temporaries < 0.4 * together.temporaries
    assert in_turns.arguments == together.arguments


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "observed"), [("cartpole_dqn.py", 4), ("cartpole_r2d2.py", 2), ("pendulum_d4pg.py", 3)]
)
def test_a_replay_is_counted_on_each_core(libtpu, name, observed):
    sizes = {"num_envs": 64, "replay.capacity": 2**20, "updates_per_call": 2}
    config = config_of(name, **sizes)
    env = architectures.ANAKIN.make_env(config)
    plan = estimate.make_plan(config, architectures.ANAKIN, env, chips.get_slice("v5e:2x2"))
    memory = plan.programs[0].memory
    # Of a step: floats, reward, discount, action, and whether it is the first.
    assert memory.replay >= 2**18 * (4 * observed + 4 + 4 + 4 + 1)
    assert memory.replay <= memory.arguments < 8 * memory.replay
    # The new one is written over the old one.
    assert memory.aliased > memory.replay


@needs_libtpu
@pytest.mark.slow
def test_agents_that_learn_a_rule_exchange_its_gradient_once_a_step(libtpu, capsys):
    sizes = {"num_envs": 4, "unroll_length": 5, "updates_per_call": 2, "lpg.agents": 32}
    config = config_of("lpg.py", **sizes)
    env = architectures.META.make_env(config)
    plan = estimate.make_plan(config, architectures.META, env, chips.get_slice("v5e:4x4"))
    assert (plan.learners, plan.num_groups, plan.agents_at_once) == (32, 16, 2)
    # Five updates of each agent and the unroll that is learned from.
    assert (plan.num_agents, plan.steps_per_update) == (32, 6 * 4 * 5)
    (step,) = plan.programs
    assert (step.host, step.uncounted) == ((), 0)
    # A core gives the rule's gradient and metrics, and nothing of what its agents learn.
    rule = jax.eval_shape(lifetimes.make_learned(config).init, jax.random.key(0))
    gradient = sum(4 * x.size for x in jax.tree.leaves(rule))
    assert gradient < step.per_gradient_step.bytes < 1.5 * gradient
    assert step.per_update.number == 0
    text = printed(table.print_plan, plan, capsys)
    assert "meta: 32 agents, 2 on each of 16 groups of 1 core; for each agent: 4" in text
    assert "x 5 steps x 6 unrolls = 120 steps per update, 1 gradient" in " ".join(text.split())


@needs_libtpu
@pytest.mark.slow
def test_groups_that_average_send_their_weights_to_other_slices_at_averages_only(libtpu):
    tpu_slice, sent = chips.get_slice("v5e:2x2", 2), []
    for changes in ({}, {"averaging.groups": 2, "averaging.every": 2}):
        sizes = {"num_envs": 64, "total_steps": 10**6, "updates_per_call": 2}
        config = config_of("cartpole.py", **sizes, **changes)
        env = architectures.ANAKIN.make_env(config)
        plan = estimate.make_plan(config, architectures.ANAKIN, env, tpu_slice)
        sent.append(plan.programs[0].between_slices)
    assert sent[0].number >= plan.gradient_steps
    assert sent[1].number == 0.5
    assert sent[1].bytes < sent[0].bytes / plan.gradient_steps


@needs_libtpu
@pytest.mark.slow
def test_half_of_each_hosts_cores_act_and_the_other_half_learns(libtpu):
    sizes = {"env": "envpool:CartPole-v1", "num_envs": 192, "sebulba.learners_per_actor": 1}
    config = config_of("cartpole.py", **sizes)
    env = architectures.SEBULBA.make_env(config)
    for num_slices in (1, 2):
        tpu_slice = chips.get_slice("v5e:4x4", num_slices)
        plan = estimate.make_plan(config, architectures.SEBULBA, env, tpu_slice)
        update = plan.programs[-1]
        assert (plan.cores, plan.envs_per_core) == (16 * num_slices, 24 // num_slices)
        assert update.per_gradient_step.number > 0
        assert (update.between_slices.bytes > 0) == (num_slices > 1)
    averaging = dataclasses.replace(config.averaging, groups=2, every=2)
    with pytest.raises(ConfigError, match=r"averaging\.groups=2 is for"):
        estimate.make_plan(
            dataclasses.replace(config, averaging=averaging), architectures.SEBULBA, env, tpu_slice
        )


@needs_libtpu
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_atari_learner_scales_to_a_full_pod(libtpu):
    plans = []
    for name in SLICES:
        tpu_slice = chips.get_slice(name)
        changes = {
            "network.torso": "resnet",
            "num_epochs": 1,
            "num_minibatches": 2,
            "unroll_length": 4,
            # Statistics of each minibatch would be reductions of their own in every gradient step.
            "ppo.advantage_normalization": "batch",
        }
        config = config_of("atari.py", **changes)
        learners = architectures.SEBULBA.num_learner_devices(config, tpu_slice)
        config = dataclasses.replace(config, num_envs=8 * learners)
        env = architectures.SEBULBA.make_env(config)
        run = architectures.SEBULBA.trace(config, env, tpu_slice)
        (update,) = [program for program in run.programs if program.where == architectures.LEARNERS]
        compiled = programs.compile_traced(update)
        assert isinstance(compiled, programs.CompileResult)
        plans.append(estimate._plan_program(compiled, tpu_slice, config.gradient_steps.per_update))
    check_scaling(plans)


@needs_libtpu
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_that_is_too_large_reports_sizes_that_fit(libtpu, capsys):
    tpu_slice = chips.get_slice("v5e:2x2")
    config = config_of("cartpole.py", num_envs=2**22, num_epochs=1)
    env = architectures.ANAKIN.make_env(config)
    plan = estimate.make_plan(config, architectures.ANAKIN, env, tpu_slice)
    excess = plan.too_large
    assert excess.needed > excess.available > 15 * chips.GIB
    assert plan.programs == ()
    assert excess.fits["num_envs"] < 2**22
    assert excess.fits["unroll_length"] < 128
    assert f"num_envs={excess.fits['num_envs']}" in printed(table.print_plan, plan, capsys)


def test_a_replay_grows_with_the_environments():
    config = config_lib.default_config()
    config.num_envs, config.replay.capacity, config.replay.begin, config.replay.batch = (
        32,
        640,
        64,
        8,
    )
    larger = config_lib.parse(config).scaled(96)
    assert larger.num_envs == 96
    assert (larger.replay.capacity, larger.replay.begin, larger.replay.batch) == (1920, 192, 24)
    smaller = config_lib.parse(config).scaled(1)
    assert (smaller.replay.capacity, smaller.replay.begin, smaller.replay.batch) == (20, 2, 1)
