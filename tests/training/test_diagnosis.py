"""``podracer.doctor``: problems that are planted are found, with what to do about them."""

import importlib.metadata
import importlib.util
import json
import shutil
import socket
from collections import namedtuple

import pytest
from packaging.requirements import Requirement

import podracer
from podracer import doctor
from podracer.errors import ExitCode
from podracer.training import config_diagnosis, diagnosis
from podracer.training.diagnosis import Finding, Probe
from tests.helpers import is_one_error

CPU = {
    "nvidia": False,
    "tpu": False,
    "platform": "cpu",
    "devices": ["cpu:0 (cpu)"],
    "cores": 8,
    "memory": 2**40,
}


def states(findings) -> list[str]:
    return [finding.state for finding in findings]


def test_the_doctor_finds_devices_and_a_wrong_setting(tmp_path, capsys):
    arguments = ["--json", f"--workdir={tmp_path}", "--config=cartpole", "--config.num_env=8"]
    assert doctor.main(arguments) == ExitCode.CONFIG
    printed = capsys.readouterr()
    found = {x["name"]: x for x in json.loads(printed.out)}
    assert found["devices"]["state"] == "ok"
    assert " x cpu: " in found["devices"]["text"]
    assert found["workdir"]["text"].startswith(str(tmp_path))
    assert "gymnax 1." in str(found["packages"])
    if importlib.util.find_spec("envpool"):
        assert found["envpool"]["state"] == "ok"
    assert "unknown config key 'num_env'" in found["config"]["text"]
    assert found["config"]["advice"] == "See docs/troubleshooting.md#config"
    assert is_one_error(printed.err)
    assert printed.err.startswith("error: problems with config: ")


def test_warnings_alone_end_in_code_0(monkeypatch, capsys):
    found = [Finding("ok", "cores", "2"), Finding("warning", "memory", "1 GiB", "lower num_envs")]
    monkeypatch.setattr(diagnosis, "diagnose", lambda *_: found)
    assert doctor.main([]) == ExitCode.OK
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [
        ["ok", "cores", "2"],
        ["!", "memory", "1", "GiB"],
        ["->", "lower", "num_envs"],
    ]


def test_a_config_is_set_up_without_compiling(monkeypatch):
    called = []

    def prepare(architecture):
        called.append(architecture)
        return getattr(podracer, architecture).trainer.prepare

    arguments = ["--config=cartpole", "--config.network.hidden=(8,)"]
    (found,) = config_diagnosis.check_config(arguments, prepare)
    assert found.state == "ok"
    assert "ppo in gymnax:CartPole-v1, " in found.text
    assert called == ["anakin"]


def test_an_environment_that_fails_when_it_is_traced():
    def prepare(_):
        return lambda _: 1 / 0

    (found,) = config_diagnosis.check_config(["--config=cartpole"], prepare)
    assert (found.state, found.text) == ("problem", "ZeroDivisionError: division by zero")


def test_a_flag_that_xla_does_not_know_is_named(monkeypatch):
    """XLA ends the process."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_no_such_flag=1")
    probed = diagnosis.probe("devices")
    assert probed.error == "Unknown flag in XLA_FLAGS: --xla_no_such_flag=1"
    assert states(diagnosis.check_devices(probed, {})) == ["problem"]


def test_a_probe_that_hangs_is_given_up():
    probed = diagnosis.probe("devices", timeout_s=0.01)
    assert probed == Probe({}, "no answer within 0.01 s", "")
    assert states(diagnosis.check_devices(probed, {})) == ["problem"]


@pytest.mark.parametrize(
    ("environment", "installed", "advice"),
    [
        ({"JAX_PLATFORMS": "cpu"}, True, "unset JAX_PLATFORMS=cpu"),
        ({}, False, "in the clone: pip install -e '.[cuda12]' or -e '.[cuda13]'"),
        ({}, True, "jax-cuda12-plugin is installed: see whether it suits the driver"),
    ],
)
def test_a_gpu_that_jax_does_not_use(environment, installed, advice, monkeypatch):
    monkeypatch.setattr(diagnosis, "unmet", lambda x: [] if installed else ["not installed"])
    probed = Probe({**CPU, "nvidia": True}, "", "An NVIDIA GPU may be present\n")
    cpu, gpu = diagnosis.check_devices(probed, environment)
    assert (cpu.state, gpu.state) == ("ok", "warning")
    assert gpu.text.endswith("which JAX does not use; JAX says: An NVIDIA GPU may be present")
    assert gpu.advice.startswith(advice)
    assert states(diagnosis.check_devices(Probe(CPU, "", ""), environment)) == ["ok"]


def test_a_missing_and_an_old_package(monkeypatch):
    assert diagnosis.unmet(Requirement("numpy>=1")) == []
    assert diagnosis.unmet(Requirement("numpy<1"))[0].endswith(" is not <1")
    version = importlib.metadata.version

    def without_gymnax(name):
        if name == "gymnax":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without_gymnax)
    needed = [Requirement("numpy>=1"), Requirement("gymnax>=1")]
    monkeypatch.setattr(diagnosis, "requirements", lambda: needed)
    problem = list(diagnosis.check_versions())[-1]
    assert problem.state == "problem"
    assert problem.text == "gymnax is not installed"
    assert problem.advice == "in the clone: pip install -e ."


def test_extras_are_those_of_the_package():
    installed, *others = diagnosis.check_extras()
    listed = {x for each in (installed, *others) for x in each.text.split(": ")[-1].split(", ")}
    assert {"sebulba", "wandb", "brax"} <= listed
    assert not {"dev", "test"} & listed


@pytest.mark.parametrize(("free", "state"), [(2**40, "ok"), (2**30, "warning"), (2**20, "problem")])
def test_a_disk_that_is_full(free, state, tmp_path, monkeypatch):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(free))
    folders = {"workdir": str(tmp_path / "new" / "run"), "cache": None}
    (found,) = diagnosis.check_folders(folders)
    assert found.state == state
    assert ("--workdir" in found.advice) == (state != "ok")


@pytest.mark.parametrize(("missing", "state"), [("", "note"), ("gcsfs", "problem")])
def test_a_bucket_needs_the_packages_that_access_it(missing, state, monkeypatch):
    found = diagnosis.unmet
    monkeypatch.setattr(
        diagnosis,
        "unmet",
        lambda need: ["gcsfs is not installed"] if need.name == missing else found(need),
    )
    (bucket,) = diagnosis.check_folders({"workdir": "gs://b/x"})
    assert (bucket.state, ".[gcs]" in bucket.advice) == (state, bool(missing))


@pytest.mark.parametrize("folder", ["gs://bucket", "s3://bucket/run"])
def test_a_folder_that_no_store_has(folder):
    (found,) = diagnosis.check_folders({"workdir": folder})
    assert (found.state, "must be a folder or gs://BUCKET/FOLDER" in found.text) == (
        "problem",
        True,
    )


def test_a_folder_that_is_not_writable(tmp_path, monkeypatch):
    monkeypatch.setattr(diagnosis.os, "access", lambda path, _: path != tmp_path)
    folders = {"workdir": str(tmp_path / "run"), "temporary": str(tmp_path.parent)}
    workdir, temporary = diagnosis.check_folders(folders)
    assert workdir.text.endswith(f"but {tmp_path} is not writable")
    assert (workdir.state, temporary.state) == ("problem", "ok")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"JAX_TRANSFER_GUARD": "disallow"}, "problem"),
        ({"JAX_TRANSFER_GUARD": "log"}, None),
        ({"JAX_DISABLE_JIT": "1"}, "warning"),
        ({"XLA_FLAGS": "--xla_a=1 --xla_b=1 --xla_a=2"}, "warning"),
        ({"XLA_FLAGS": "--xla_a=1 --xla_b=2"}, None),
        (
            {
                "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
                "JAX_NUM_CPU_DEVICES": "4",
            },
            "warning",
        ),
    ],
)
def test_variables_that_clash(variables, expected):
    given, *found = diagnosis.check_variables({**variables, "PODRACER_TOKEN": "secret"})
    assert given.text == " ".join(f"{name}={x}" for name, x in sorted(variables.items()))
    assert states(found) == [expected] * (expected is not None)


@pytest.mark.parametrize(("quota", "state"), [("150000 100000\n", "warning"), ("max 100000", "ok")])
def test_a_container_with_a_quota_of_cpu_time(quota, state, tmp_path):
    (tmp_path / "cpu.max").write_text(quota)
    memory, cores = diagnosis.check_machine(Probe(CPU, "", ""), str(tmp_path / "cpu.max"))
    assert (memory.state, cores.state) == ("ok", state)
    assert ("pool_threads=1;" in cores.advice) == (state == "warning")


def test_an_address_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        (taken,) = config_diagnosis.check_listening(address)
    (free,) = config_diagnosis.check_listening(address)
    assert (taken.state, free.state) == ("problem", "ok")
    assert address in taken.text
