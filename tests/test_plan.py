"""Plans: their arithmetic, their messages, and what the TPU compiler makes of our programs."""

import dataclasses
import importlib.util
import json
import math
import pathlib
import runpy

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from podracer import cli, prng
from podracer import config as config_lib
from podracer.errors import ConfigError
from podracer.nets.convolve import convolve
from podracer.plan import __main__ as plan_main
from podracer.plan import chips, estimate, programs, table
from podracer.plan.costs import Kernel

CONFIGS = pathlib.Path(__file__).parent.parent / "configs"
CARTPOLE = f"--config={CONFIGS / 'cartpole.py'}"
KERNEL = Kernel("k", "fusion", 1, 0, 0, 0, 0, False, True)
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="needs the TPU compiler: pip install 'podracer[tpu]'",
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
    """Two v3 chips with that many devices each."""
    devices = [FakeDevice(x, core) for x in range(2) for core in range(cores)]
    return chips.Slice("v3:2x1", 1, chips.CHIPS["v3"], devices)


def test_a_core_has_its_share_of_the_chips_peaks():
    one, two = fake_slice(1), fake_slice(2)
    assert (one.share, two.share, two.num_chips) == (1, 0.5, 2)
    for kernel, seconds in (
        (KERNEL._replace(flops=123e12), 1),
        (KERNEL._replace(bytes=900e9), 1),
        (KERNEL._replace(flops=123e12, bytes=1800e9), 2),
        (KERNEL._replace(opcode="all-reduce", sent=328e9), 2),
        (KERNEL._replace(opcode="send", sent=328e9), 0),
    ):
        assert math.isclose(estimate._roofline(kernel, one), seconds)
        assert math.isclose(estimate._roofline(kernel, two), 2 * seconds)
    assert math.isclose(estimate._expected(KERNEL._replace(cycles=940), one), 1e-6)


def test_actors_and_learners_work_at_once_unless_they_share_devices():
    def program(where, seconds):
        fields = dict.fromkeys(f.name for f in dataclasses.fields(estimate.ProgramPlan))
        return estimate.ProgramPlan(**{**fields, "where": where, "roofline_seconds": seconds})

    plans = [program("a", 1.0), program("a", 2.0), program("b", 5.0)]
    apart = programs.Layout(None, [], shared=False)
    assert estimate._seconds(plans, apart, "roofline_seconds") == 5
    assert estimate._seconds(plans, apart._replace(shared=True), "roofline_seconds") == 8
    assert estimate._seconds(plans, apart, "compiler_seconds") is None


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
        ("RESOURCE_EXHAUSTED: for reasons of its own", 0, 0),
    ],
)
def test_a_refusal_is_read(message, needed, available):
    refused = programs.refused(message)
    assert (refused.needed, refused.available) == (needed, available)


def test_the_largest_size_that_fits_is_searched():
    config, tried = config_of("cartpole.py", num_envs=4096), []

    def attempt(config):
        n = config.num_envs
        tried.append(n)
        if n == 512:
            raise ConfigError("does not divide over minibatches")
        return estimate.Fit("step", 100 + n, 500, {}, "") if 100 + n > 500 else None

    fit = estimate.Fit("step", 4196, 500, {}, "")
    assert estimate._largest_that_fits(config, "num_envs", fit, attempt) == 256
    # 4096 * 500 / 4196 = 488: 512 is too large without trying.
    assert tried == [256]
    nothing = estimate.Fit("step", 0, 0, {}, "")
    assert estimate._largest_that_fits(config, "num_envs", fit, lambda config: nothing) is None


def test_the_architecture_follows_from_the_environment():
    assert programs.architecture(config_of("cartpole.py"), "") == "anakin"
    assert programs.architecture(config_of("pong.py"), "") == "sebulba"
    assert programs.architecture(config_of("cartpole.py"), "sebulba") == "sebulba"
    with pytest.raises(ConfigError, match="sebulba"):
        programs.architecture(config_of("cartpole.py"), "sebula")


def run(*arguments):
    return cli.exit_code(lambda: plan_main.main(["plan", CARTPOLE, *arguments]))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--topology is missing; known are v2:2x2"),
        (["--topology=v9:8x8"], "unknown topology 'v9:8x8'; did you mean"),
        (["--topology=moon"], "v3:32x32"),
        (["--topology=v5e:4x4", "--num_slices=0"], "--num_slices must be positive"),
        (["--topology=v5e:4x4", "--config.num_env=1"], "num_envs"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(arguments, said, capsys):
    assert run(*arguments) == cli.BAD_CONFIG
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_numbers_for_people():
    assert table.number(None) == "-"
    assert table.number(999) == "999"
    assert table.number(12_345) == "12.3 K"
    assert table.number(2.5e15, "B") == "2.5 PB"
    assert table.size(1536) == "1.5 KiB"
    assert [table.seconds(n) for n in (2, 0.002, 2e-6)] == ["2 s", "2 ms", "2 us"]


def test_keys_are_the_platforms_own():
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
def test_a_tpu_gets_jaxs_own_convolution_gradients(libtpu):
    def gradient(x, kernel):
        return jax.grad(lambda x, k: convolve(x, k, (1, 1), "VALID").sum(), (0, 1))(x, kernel)

    def text(device):
        on = jax.sharding.SingleDeviceSharding(device)
        shapes = ((2, 8, 8, 3), (3, 3, 3, 4))
        x, kernel = (jax.ShapeDtypeStruct(s, jnp.float32, sharding=on) for s in shapes)
        return jax.jit(gradient).lower(x, kernel).as_text()

    tpu = chips.get_slice("v5e:2x2").devices[0]
    # The axes of the kernel's own gradient, as JAX has it.
    assert "[f, 0, 1, b]x[i, 0, 1, o]" in text(tpu)
    assert "[f, 0, 1, b]x[i, 0, 1, o]" not in text(jax.devices()[0])


@needs_libtpu
def test_slices_are_counted(libtpu):
    pod = chips.get_slice("v3:32x32")
    assert (pod.num_chips, len(pod.devices), len(pod.hosts), pod.share) == (1024, 2048, 256, 0.5)
    four = chips.get_slice("v5e:2x2", 4)
    assert (four.num_chips, len(four.devices), len(four.hosts), four.share) == (16, 16, 4, 1)
    assert len(chips.get_slice("v5e:1x1").devices) == 1
    assert len(chips.get_slice("v4:2x2x1").devices) == 4
    with pytest.raises(ConfigError, match="did you mean v5e:4x8 or v5e:4x4"):
        chips.get_slice("v5e:4x5")


SLICES = ("v2:2x2", "v5e:4x4", "v3:32x32")


def hold(made):
    """What must hold of a step or a learner's update on slices of all sizes."""
    for program in made:
        assert program.host == ()
        assert program.uncounted == 0
        # Gradients and metrics as one.
        assert program.per_gradient_step.number == 1
        assert program.per_update.number <= 3
        assert program.per_update.bytes < 1000
        assert program.memory.total > 0
        assert 0 < program.roofline_seconds <= program.compiler_seconds
    assert len({program.per_gradient_step for program in made}) == 1
    assert len({program.per_update.number for program in made}) == 1
    flops = [program.flops for program in made]
    assert max(flops) < 1.03 * min(flops)


@needs_libtpu
@pytest.mark.slow
def test_cartpole_scales_to_a_full_pod(libtpu, capsys):
    made = []
    for name in SLICES:
        where = chips.get_slice(name)
        sizes = {"num_envs": 16 * len(where.devices), "total_steps": 10**9, "updates_per_call": 2}
        config = config_of("cartpole.py", **sizes)
        env = programs.make_env(config, "anakin")
        made.append(estimate.make(config, "anakin", env, where))
    hold([plan.programs[0] for plan in made])
    assert [plan.cores for plan in made] == [8, 16, 2048]
    console = Console(width=160)
    table.scaling(made, console)
    table.one(made[0], console)
    shown = capsys.readouterr().out
    assert "ESTIMATE" in shown
    assert "v3:32x32" in shown
    json.dumps([dataclasses.asdict(plan) for plan in made])


@needs_libtpu
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_atari_learner_scales_to_a_full_pod(libtpu):
    made = []
    for name in SLICES:
        where = chips.get_slice(name)
        changes = {"network.torso": "resnet", "num_minibatches": 2, "unroll_length": 4}
        config = config_of("pong.py", **changes)
        learners = programs.num_learners(config, "sebulba", where)
        config = dataclasses.replace(config, num_envs=8 * learners)
        layout = programs.lay_out(config, "sebulba", programs.make_env(config, "sebulba"), where)
        (update,) = [piece for piece in layout.pieces if piece.where == programs.LEARNERS]
        compiled = programs.compile_piece(update)
        assert isinstance(compiled, programs.Compiled)
        made.append(estimate._program(compiled, where, config.num_minibatches))
    hold(made)


@needs_libtpu
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_what_is_too_large_is_told_what_would_fit(libtpu, capsys):
    where = chips.get_slice("v5e:2x2")
    config = config_of("cartpole.py", num_envs=2**22, num_epochs=1)
    plan = estimate.make(config, "anakin", programs.make_env(config, "anakin"), where)
    fit = plan.too_large
    assert fit.needed > fit.available > 15 * chips.GIB
    assert plan.programs == ()
    assert fit.fits["num_envs"] < 2**22
    assert fit.fits["unroll_length"] < 128
    table.one(plan, Console(width=160))
    shown = capsys.readouterr().out
    assert "TOO LARGE" in shown
    assert f"num_envs={fit.fits['num_envs']}" in shown
