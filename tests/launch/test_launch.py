"""The launchers, run for real with stand-ins for the cloud; manifests against their schemas."""

import contextlib
import fnmatch
import itertools
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import textwrap
import time
import tomllib

import jsonschema
import kubernetes_validate
import pytest
import yaml

from podracer import errors

ROOT = pathlib.Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
# What one launch shows, another one checks at length: these run in .ci/run.
SLOW = pytest.mark.slow
FAKE = pathlib.Path(__file__).with_name("fake_cloud.py")
# What a shell could break: spaces, quotes, expansions, an empty argument, a second line.
AWKWARD = ["--config.env=two words", 'it\'s "quoted" $HOME *', "", "a\nb"]
WORKDIR = "gs://bucket/runs/cart pole"
# What all launchers do after an exit code of the trainer.
FINAL = set(map(int, errors.FINAL))
UNLIMITED = {42}
COUNTED = {1, 4, 5, 6, 75}

# Plays the trainer: notes how it was called, and ends as the plan says, outcomes of each attempt:
# an exit code, "CODE after FILE" (once the file exists in $CLOUD) or "until SIGTERM".
TRAINER = """
    import json, os, pathlib, signal, sys, time
    cloud = pathlib.Path(os.environ["CLOUD"])
    worker = os.environ.get("TPU_WORKER_ID") or os.environ["SLURM_PROCID"]
    notes = cloud / f"trained-{worker}"
    attempt = len(notes.read_text().splitlines()) if notes.exists() else 0
    outcome = json.loads((cloud / "plan").read_text())[attempt][int(worker)]
    code, _, file = str(outcome).partition(" after ")
    if outcome == "until SIGTERM":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(42))
        file = "never"
    note = {
        "argv": sys.argv[1:],
        "cwd": os.getcwd(),
        "gpus": os.environ.get("JAX_LOCAL_DEVICE_IDS"),
        "cpus": os.environ.get("SLURM_CPUS_PER_TASK"),
        "uncommitted": pathlib.Path(__file__).read_text().endswith("# not committed\\n"),
    }
    with notes.open("a") as lines:
        lines.write(json.dumps(note) + "\\n")
    # In one write, so that lines of two workers do not mix even where output is unbuffered.
    os.write(1, f"training {worker} {attempt}\\n".encode())
    while file and not (cloud / file).exists():
        time.sleep(0.02)
    sys.exit(int(code))
"""


@pytest.fixture
def cloud(tmp_path, monkeypatch):
    """A folder that stands for the cloud, with its tools on PATH; ends what is left running."""
    folder, tools, source = tmp_path / "cloud", tmp_path / "tools", tmp_path / "source"
    for path in (folder, tools, source):
        path.mkdir()
    for tool in ("gcloud", "curl", "python3", "sbatch", "srun", "scontrol", "scancel"):
        script = f'#!/bin/sh\nexec "{sys.executable}" -S "{FAKE}" {tool} "$@"\n'
        (tools / tool).write_text(script)
        (tools / tool).chmod(0o755)
    (source / "train.py").write_text(textwrap.dedent(TRAINER))
    git = ["git", "-C", str(source), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "--quiet", "--message=a"], check=True)
    (source / "train.py").write_text((source / "train.py").read_text() + "# not committed\n")
    monkeypatch.setenv("CLOUD", str(folder))
    monkeypatch.setenv("WORKERS", "2")
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    yield folder
    groups = [int(path.read_text()) for path in folder.glob("slices/*/worker-*/group")]
    for file in (*folder.glob("job"), *folder.glob("steps*")):
        groups += json.loads(file.read_text())
    for group in groups + [process.pid for process in launched if process.poll() is None]:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    shutil.rmtree(folder / "slices", ignore_errors=True)  # ends connections to the log
    while launched:
        launched.pop().communicate(timeout=60)


launched: list[subprocess.Popen] = []


def launch(cloud, command: list, plan: list, **environment: str) -> subprocess.Popen:
    (cloud / "plan").write_text(json.dumps(plan))
    process = subprocess.Popen(
        command,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cloud,
        start_new_session=True,
    )
    launched.append(process)
    return process


# Instead of pip: shows that the source is there, and provides `python`.
INSTALL = f"test -f train.py && mkdir -p .venv/bin && ln -s '{sys.executable}' .venv/bin/python"


def tpu_vm(cloud, plan, *options, workdir=WORKDIR, install=INSTALL) -> subprocess.Popen:
    command = [
        str(LAUNCH / "tpu_vm.sh"), "--name=pod", "--zone=zone-a", "--project=project",
        "--accelerator_type=v5litepod-8", f"--source={cloud.parent / 'source'}", "--poll=0.1",
        "--backoff=0", *([f"--install={install}"] if install else []), *options,
        "--", "python", "train.py", f"--workdir={workdir}", *AWKWARD,
    ]  # fmt: skip
    return launch(cloud, command, plan)


def finished(process: subprocess.Popen) -> tuple[int, str, str]:
    output, errors = process.communicate(timeout=60)
    return process.returncode, output, errors


def wait_for(condition, what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within a minute"
        time.sleep(0.05)


def wait_for_training(cloud, attempt: int = 0) -> None:
    wait_for(
        lambda: min(len(trained(cloud, worker)) for worker in (0, 1)) > attempt,
        f"attempt {attempt} of both workers",
    )


def calls(cloud, *beginning: str) -> list[list[str]]:
    if not (cloud / "calls").exists():
        return []
    lines = [json.loads(line) for line in (cloud / "calls").read_text().splitlines()]
    return [line for line in lines if tuple(line[: len(beginning)]) == beginning]


def requests(cloud) -> list[str]:
    """What was done to slices, in order: create and delete."""
    done = [call[4] for call in calls(cloud, "gcloud", "compute", "tpus", "queued-resources")]
    return [verb for verb in done if verb != "describe"]


def trained(cloud, worker: int) -> list[dict]:
    path = cloud / f"trained-{worker}"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def attempts(cloud) -> list[int]:
    return [len(trained(cloud, worker)) for worker in (0, 1)]


def posted(cloud, name: str) -> str:
    """The exit code in the bucket at this place below the launch's folder."""
    (path,) = (cloud / "bucket/runs").glob(f"cart pole.launch/*/{name}")
    return path.read_text().strip()


def simulate(*event: str) -> None:
    """Makes something happen to the slice, see ``EVENTS`` of the stand-in."""
    subprocess.run([sys.executable, "-S", FAKE, event[0], "pod", *event[1:]], check=True)


@pytest.mark.parametrize("script", sorted(LAUNCH.glob("*.sh")), ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script):
    shellcheck = pathlib.Path(sysconfig.get_path("scripts")) / "shellcheck"
    found = subprocess.run([shellcheck, script], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


def tpu_vm_options() -> set[str]:
    """The options that tpu_vm.sh accepts."""
    script = (LAUNCH / "tpu_vm.sh").read_text()
    return set(re.findall(r"^    (--[a-z_]+)(?:=\*| \| -h)?\) ", script, flags=re.MULTILINE))


def test_help_lists_every_option():
    command = [LAUNCH / "tpu_vm.sh", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert len(tpu_vm_options()) > 10
    listed = set(re.findall(r"^  (--[a-z_]+)", shown, flags=re.MULTILINE))
    assert tpu_vm_options() - {"--help"} == listed
    # Each default that it names is the script's.
    script = (LAUNCH / "tpu_vm.sh").read_text()
    flags = re.findall(r"^  --([a-z_]+)=(.*?)(?=^  --|\n\n)", shown, re.MULTILINE | re.DOTALL)
    named = {name: re.search(r"default:\s+(\d+)", text) for name, text in flags}
    numbers = {name: found[1] for name, found in named.items() if found}
    assert numbers.keys() >= {"max_restarts", "backoff", "retry_for", "patience", "poll"}
    for name, number in numbers.items():
        assert re.search(rf"\b{name}={number}\b", script), name
    # A cloud that rejects a deletion for some minutes must not leave a slice behind.
    assert numbers["retry_for"] == "600"


def test_tpu_vm_pauses_longer_after_each_failure():
    script = (LAUNCH / "tpu_vm.sh").read_text()
    (pause,) = re.findall(r"^pause\(\) \{.*?^\}", script, re.MULTILINE | re.DOTALL)
    code = (
        f"backoff=30; sleep() {{ echo $1; }}\n{pause}\nfor n in 0 1 2 3 4 5 70; do pause $n; done"
    )
    shown = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.split() == ["30", "60", "120", "240", "480", "600", "600"]


def test_tpu_vm_creates_installs_trains_and_deletes(cloud):
    options = ("--spot", "--create_flag=--service-account=me")
    code, _, errors = finished(tpu_vm(cloud, [[0, 0]], *options, install=None))
    assert code == 0, errors
    assert requests(cloud) == ["create", "delete"]
    (create,) = calls(cloud, "gcloud", "compute", "tpus", "queued-resources", "create")
    assert {
        "pod", "--node-id=pod", "--zone=zone-a", "--project=project", "--spot",
        "--accelerator-type=v5litepod-8", "--service-account=me",
    } <= set(create)  # fmt: skip
    # Both architectures are installed: Sebulba needs envpool.
    install = [
        "python3",
        "-m",
        "uv",
        "pip",
        "install",
        "--quiet",
        "-e",
        ".[tpu,gcs,sebulba,remote]",
    ]
    assert calls(cloud, "python3", "-m", "uv", "pip") == [install] * 2
    for worker in (0, 1):
        (note,) = trained(cloud, worker)
        assert note["argv"] == [f"--workdir={WORKDIR}", *AWKWARD]
        assert note["cwd"].endswith(f"worker-{worker}/source")
        assert note["uncommitted"]
    assert not list((cloud / "slices").iterdir())


def test_tpu_vm_shows_what_it_would_do(cloud):
    code, output, errors = finished(tpu_vm(cloud, [], "--dry_run", "--spot"))
    assert (code, errors) == (0, "")
    assert not calls(cloud), "a dry run must not reach the cloud"
    request, _, *script = output.splitlines()
    assert request.startswith("gcloud compute tpus queued-resources create pod ")
    assert {"--spot", "--project=project"} <= set(shlex.split(request))
    assert re.search(r"^source=gs://bucket/.*/source\.tar\.gz$", output, re.MULTILINE)
    subprocess.run(["bash", "-n"], input="\n".join(script), text=True, check=True)


def test_tpu_vm_trains_from_a_git_repository(cloud):
    source = f"--source=file://{cloud.parent / 'source'}#HEAD"
    code, _, errors = finished(tpu_vm(cloud, [[0, 0]], source))
    assert code == 0, errors
    assert [trained(cloud, worker)[0]["uncommitted"] for worker in (0, 1)] == [False, False]


RESTARTED = [[42, 42], [4, 1], [42, 0], [137, 42], [0, 0]]  # two of these count as failures
# Attempts of which three count, and with MAX_RESTARTS = 2 the code of the last one is final.
GIVEN_UP = [[5, 0], [42, 42], [0, 6], [75, 0]]
# The last code is final, although the other process ends with one that is not.
ENDED = [([2, 2], 2), ([4, 3], 3), ([7, 4], 7), ([42, 130], 130)]


def test_tpu_vm_restarts_on_the_same_slice(cloud):
    code, _, errors = finished(tpu_vm(cloud, RESTARTED, "--max_restarts=2"))
    assert code == 0, errors
    assert attempts(cloud) == [5, 5]
    assert requests(cloud) == ["create", "delete"]


@pytest.mark.parametrize(
    ("codes", "final"), [ENDED[0], *(pytest.param(*x, marks=SLOW) for x in ENDED[1:])]
)
def test_tpu_vm_does_not_restart_after_final_codes(cloud, codes, final):
    code, _, errors = finished(tpu_vm(cloud, [codes]))
    assert code == final, errors
    assert attempts(cloud) == [1, 1]
    assert requests(cloud) == ["create", "delete"]
    assert "training 1 0" in errors  # the log of the other worker, too


@SLOW
def test_tpu_vm_gives_up_after_too_many_failures(cloud):
    code, _, errors = finished(tpu_vm(cloud, GIVEN_UP, "--max_restarts=2"))
    assert code == 75, errors
    assert attempts(cloud) == [4, 4]
    assert requests(cloud) == ["create", "delete"]


@pytest.mark.parametrize(
    ("options", "track", "flags"),
    [
        pytest.param((), (), [], marks=SLOW),
        (("--keep", "--internal_ip"), (), ["--internal-ip"]),
        pytest.param(("--iap",), ("alpha",), ["--tunnel-through-iap"], marks=SLOW),
    ],
)
def test_tpu_vm_shows_the_log_and_deletes_after_ctrl_c(cloud, options, track, flags):
    process = tpu_vm(cloud, [["until SIGTERM"] * 2], *options)
    assert process.stdout.readline() == "training 0 0\n"  # shown while it runs
    os.killpg(process.pid, signal.SIGINT)
    code, _, errors = finished(process)
    assert code == 130
    ssh = calls(cloud, "gcloud", *track, "compute", "tpus", "tpu-vm", "ssh", "pod", "--worker=0")
    where = ["--zone=zone-a", "--project=project"]
    assert all(set(call) >= {*flags, *where} for call in ssh)
    assert ssh
    keep = "--keep" in options
    assert requests(cloud) == (["create"] if keep else ["create", "delete"])
    assert (cloud / "slices/pod").exists() == keep
    if keep:
        assert "queued-resources delete pod --force --zone=zone-a --project=project" in errors


def test_tpu_vm_replaces_a_preempted_slice_however_often_that_fails(cloud):
    outcomes = ["works", "rejected", "FAILED", "created, answer lost"]
    (cloud / "creates").write_text(json.dumps(outcomes))
    process = tpu_vm(cloud, [["until SIGTERM"] * 2, [0, 0]])
    wait_for_training(cloud)
    simulate("preempt")
    code, _, errors = finished(process)
    assert code == 0, errors
    # Preempted; rejected, so that there is nothing to delete; FAILED; and one that works.
    replaced = ["create", "delete", "create", "create", "delete", "create", "delete"]
    assert requests(cloud) == replaced
    for worker in (0, 1):
        first, second = trained(cloud, worker)
        assert first["argv"] == second["argv"]
        # SIGTERM reached the trainer, which had its time to save and to end with 42.
        assert posted(cloud, f"slice-0/0/worker-{worker}.exit") == "42"


@pytest.mark.parametrize(
    ("outcome", "done", "reason"),
    [
        ("rejected", ["create"], "no quota"),
        ("FAILED", ["create", "delete"], "no capacity"),
        ("taken by another", ["create"], "was not created by this launcher"),
    ],
)
def test_tpu_vm_ends_when_the_first_request_fails(cloud, outcome, done, reason):
    (cloud / "creates").write_text(json.dumps([outcome]))
    code, _, errors = finished(tpu_vm(cloud, []))
    assert code == 1
    assert requests(cloud) == done
    assert reason in errors
    assert "COULD NOT BE DELETED" not in errors


@pytest.mark.parametrize("outcome", ["no answer", "created, no answer"])
def test_tpu_vm_deletes_what_an_interrupted_request_has_created(cloud, outcome):
    (cloud / "creates").write_text(json.dumps([outcome]))
    process = tpu_vm(cloud, [["until SIGTERM"] * 2], "--retry_for=1")
    wait_for(lambda: requests(cloud), "request for a slice")
    if outcome != "no answer":
        wait_for((cloud / "slices/pod/state").exists, "slice")
    os.killpg(process.pid, signal.SIGINT)
    code, _, errors = finished(process)
    assert code == 130, errors
    assert "COULD NOT BE DELETED" not in errors
    assert not (cloud / "slices/pod").exists()


@SLOW
def test_tpu_vm_retries_a_failing_deletion(cloud):
    (cloud / "failing-deletions").write_text("4")
    code, _, errors = finished(tpu_vm(cloud, [[0, 0]]))
    assert code == 0, errors
    assert not (cloud / "slices/pod").exists()


@SLOW
def test_tpu_vm_reports_a_slice_that_it_cannot_delete(cloud):
    (cloud / "failing-deletions").write_text("1000000")
    code, _, errors = finished(tpu_vm(cloud, [[0, 0]], "--retry_for=1"))
    assert code == 1
    assert "COULD NOT BE DELETED" in errors
    assert "queued-resources delete pod --force --zone=zone-a --project=project" in errors


@SLOW
def test_tpu_vm_reports_a_slice_that_somebody_else_deletes(cloud):
    process = tpu_vm(cloud, [["until SIGTERM"] * 2])
    wait_for_training(cloud)
    simulate("remove")
    code, _, errors = finished(process)
    assert code == 1
    assert "was deleted by somebody else" in errors


@SLOW
def test_tpu_vm_retries_a_failing_install_and_deletes(cloud):
    install = "echo no such package; echo >>$CLOUD/install-$TPU_WORKER_ID; false"
    code, _, errors = finished(tpu_vm(cloud, [], "--max_restarts=1", install=install))
    assert code == 1
    assert "no such package" in errors
    assert [(cloud / f"install-{worker}").read_text() for worker in (0, 1)] == ["\n\n"] * 2
    assert requests(cloud) == ["create", "delete"]
    assert not trained(cloud, 0)


def test_tpu_vm_does_not_wait_for_workers_that_cannot_report(cloud):
    (cloud / "no-permission").touch()
    code, _, errors = finished(tpu_vm(cloud, [], "--patience=1"))
    assert code == 1
    assert "is the slice's service account allowed to write there?" in errors
    assert requests(cloud) == ["create", "delete"]


@SLOW
@pytest.mark.parametrize(("how", "lost"), [("graceful", "42"), ("new-disk", "137")])
def test_tpu_vm_resumes_after_a_worker_has_rebooted(cloud, how, lost):
    (cloud / "slow-kill").touch()  # the trainer ends while its worker still handles the signal
    process = tpu_vm(cloud, [[1, 1], ["4 after reboot", "until SIGTERM"], [0, 0]])
    wait_for_training(cloud, attempt=1)
    simulate("reboot", how)
    (cloud / "reboot").touch()
    code, _, errors = finished(process)
    assert code == 0, errors
    assert attempts(cloud) == [3, 3]
    assert posted(cloud, "slice-0/1/worker-1.exit") == lost


@SLOW
def test_a_reboot_after_the_end_of_a_run_changes_nothing(cloud):
    assert finished(tpu_vm(cloud, [[1, 1], [0, 0]], "--keep"))[0] == 0

    def reports() -> int:
        uploads = calls(cloud, "gcloud", "storage", "cp")
        return sum(upload[-1].endswith("slice-0/worker-1.exit") for upload in uploads)

    assert reports() == 1
    simulate("reboot", "hard")
    wait_for(lambda: reports() == 2, "exit code of the run after the reboot")
    assert attempts(cloud) == [2, 2]
    assert posted(cloud, "slice-0/worker-1.exit") == "0"


@SLOW
def test_a_worker_that_never_reports_counts_as_crashed(cloud):
    plan = [["4 after loss", "until SIGTERM"], [4, 0]]
    process = tpu_vm(cloud, plan, "--max_restarts=1", "--report_timeout=1")
    wait_for_training(cloud)
    os.killpg(int((cloud / "slices/pod/worker-1/group").read_text()), signal.SIGKILL)
    (cloud / "loss").touch()
    code, _, errors = finished(process)
    assert code == 4, errors
    assert attempts(cloud) == [2, 1]
    assert [posted(cloud, f"slice-0/{attempt}/worker-1.exit") for attempt in (0, 1)] == ["1", "1"]


def test_worker_0_deletes_the_slice_of_a_launcher_that_was_killed(cloud):
    process = tpu_vm(cloud, [["0 after kill"] * 2], "--self_delete")
    wait_for_training(cloud)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=60)
    assert (cloud / "slices/pod").exists()
    (cloud / "kill").touch()
    wait_for(lambda: not (cloud / "slices/pod").exists(), "deletion of the slice")
    assert [posted(cloud, f"slice-0/worker-{worker}.exit") for worker in (0, 1)] == ["0", "0"]
    (delete,) = calls(cloud, "gcloud", "compute", "tpus", "queued-resources", "delete")
    flags = ["--force", "--async", "--quiet", "--zone=zone-a", "--project=project"]
    assert delete[5:] == ["pod", *flags]
    process.communicate(timeout=60)  # the process that follows the log has ended, too


@SLOW
def test_tpu_vm_chooses_the_runtime_version(cloud):
    versions = {
        "v2-8": "tpu-ubuntu2204-base",
        "v3-32": "tpu-ubuntu2204-base",
        "v4-8": "tpu-ubuntu2204-base",
        "v5litepod-16": "v2-alpha-tpuv5-lite",
        "v5p-8": "v2-alpha-tpuv5",
        "v6e-256": "v2-alpha-tpuv6e",
    }
    (cloud / "creates").write_text(json.dumps(["rejected"] * 8))
    for accelerator, version in versions.items():
        assert finished(tpu_vm(cloud, [], f"--accelerator_type={accelerator}"))[0] == 1
        create = calls(cloud, "gcloud", "compute", "tpus", "queued-resources", "create")[-1]
        assert f"--accelerator-type={accelerator}" in create
        assert f"--runtime-version={version}" in create
    new = ("--accelerator_type=v9-8", "--runtime_version=v9-image")
    assert finished(tpu_vm(cloud, [], *new))[0] == 1
    create = calls(cloud, "gcloud", "compute", "tpus", "queued-resources", "create")[-1]
    assert "--runtime-version=v9-image" in create


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--source=no/such"], "--source=no/such is neither a folder nor a URL"),
        (["--patience=1h"], "--patience=1h is not a whole number"),
        (["--poll=x"], "--poll=x is not a positive number"),
        (["--name=My_run"], "--name=My_run must begin with a letter and have lower-case"),
        (["--keep", "--self_delete"], "--keep and --self_delete exclude each other"),
        (["--accelerator_type=v5e-16"], "v4-N, v5litepod-N (v5e), v5p-N and v6e-N"),
        (["python"], "unknown option python; put '--' before the command"),
        (["--accelerator_type=v6e"], "unknown --accelerator_type=v6e;"),
        (["--accelerator_type=tpu7x-8"], "unknown --accelerator_type=tpu7x-8;"),
    ],
)
def test_tpu_vm_rejects_impossible_options_before_anything_is_billed(cloud, options, message):
    code, _, errors = finished(tpu_vm(cloud, [], *options))
    assert code == 2
    assert message in errors
    assert not calls(cloud)


def test_tpu_vm_rejects_what_cannot_run_before_anything_is_billed(cloud):
    code, _, errors = finished(tpu_vm(cloud, [], workdir="runs/pod"))
    assert code == 2
    assert "gs://BUCKET/..., which all workers can reach; got 'runs/pod'" in errors
    for workdir in ("gs://BUCKET/pod", "gs://bucket", "gs://bucket//", "gs://b/pod"):
        code, _, errors = finished(tpu_vm(cloud, [], workdir=workdir))
        assert code == 2
        assert f"{workdir} (--workdir) is no folder of a bucket" in errors
    code, _, errors = finished(tpu_vm(cloud, [], "--", "python", "--config=new.py"))
    assert code == 2
    assert "new.py (--config) is not tracked by git" in errors
    assert not calls(cloud)
    shipped = ("--dry_run", "--", "python", "--config=cartpole", "--config=train.py")
    assert finished(tpu_vm(cloud, [], *shipped))[0] == 0
    (cloud / "slices/pod").mkdir(parents=True)
    (cloud / "slices/pod/state").write_text("ACTIVE")
    code, _, errors = finished(tpu_vm(cloud, []))
    assert code == 2
    assert "pod already exists in zone-a (state ACTIVE)" in errors
    assert requests(cloud) == []
    assert (cloud / "slices/pod").exists()  # of another launcher


def slurm(cloud, plan, *options: str, **environment: str) -> subprocess.Popen:
    script = [str(LAUNCH / "slurm.sh"), sys.executable, str(cloud.parent / "source/train.py")]
    command = ["sbatch", "--nodes=2", *options, *script, *AWKWARD]
    return launch(cloud, command, plan, **environment)


def slurm_log(cloud) -> str:
    (log,) = cloud.glob("slurm-*.out")
    return log.read_text()


def test_slurm_requeues_what_can_be_resumed(cloud):
    options = ("--gpus-per-node=4", "--cpus-per-task=12")
    code = finished(slurm(cloud, RESTARTED, *options, MAX_RESTARTS="2"))[0]
    assert code == 0, slurm_log(cloud)
    assert attempts(cloud) == [5, 5]
    assert calls(cloud, "scontrol") == [["scontrol", "requeue", "7"]] * 4
    for note in trained(cloud, 0) + trained(cloud, 1):
        assert note["argv"] == AWKWARD
        assert note["gpus"] == "0,1,2,3"  # all GPUs of the node; JAX would use one
        assert note["cpus"] == "12"  # all cores of the task; srun would use one
    assert all(f"training {worker} 4" in slurm_log(cloud) for worker in (0, 1))


# With srun's --kill-on-bad-exit the second process would not live to report its final code.
@pytest.mark.parametrize(("codes", "final"), [*ENDED, ([4, "2 after failed"], 2)])
def test_slurm_does_not_requeue_after_final_codes(cloud, codes, final):
    assert finished(slurm(cloud, [codes]))[0] == final, slurm_log(cloud)
    assert attempts(cloud) == [1, 1]
    assert not calls(cloud, "scontrol")


def test_slurm_gives_up_after_too_many_failures(cloud):
    assert finished(slurm(cloud, GIVEN_UP, MAX_RESTARTS="2"))[0] == 75, slurm_log(cloud)
    assert attempts(cloud) == [4, 4]


def test_slurm_saves_before_the_time_limit(cloud):
    process = slurm(cloud, [["until SIGTERM"] * 2, [0, 0]])
    wait_for_training(cloud)
    (cloud / "time-limit").touch()
    assert finished(process)[0] == 0, slurm_log(cloud)
    assert attempts(cloud) == [2, 2]
    codes = cloud / "slurm-7.codes"  # the trainers' own codes, and not counted as failures
    assert [(codes / "0" / task).read_text() for task in "01"] == ["42\n", "42\n"]
    assert not (codes / "crashes").exists()


def test_slurm_does_not_requeue_a_cancelled_job(cloud):
    process = slurm(cloud, [["until SIGTERM"] * 2])
    wait_for_training(cloud)
    (cloud / "scancel").touch()
    assert finished(process)[0] != 0
    assert not calls(cloud, "scontrol")


def test_slurm_requeues_after_the_loss_of_a_node(cloud):
    process = slurm(cloud, [["until SIGTERM", "0 after loss"], [0, 0]])
    wait_for_training(cloud)
    os.killpg(json.loads((cloud / "steps").read_text())[0], signal.SIGKILL)
    (cloud / "loss").touch()
    assert finished(process)[0] == 0, slurm_log(cloud)
    assert attempts(cloud) == [2, 2]
    assert len((cloud / "slurm-7.codes/crashes").read_text().splitlines()) == 1


def test_slurm_lets_jax_find_all_processes(cloud):
    """JAX's own detection, from SLURM's variables alone."""
    (cloud.parent / "source/train.py").write_text(
        "import jax, os, pathlib\n"
        "jax.distributed.initialize()\n"
        "assert jax.local_device_count() * jax.process_count() == jax.device_count()\n"
        "place = pathlib.Path(os.environ['CLOUD']) / f'process-{jax.process_index()}'\n"
        "place.write_text(str(jax.process_count()))\n"
        "jax.distributed.shutdown()\n"
    )
    with socket.socket() as taken:  # JAX derives the coordinator's port from the job's number
        for job in range(4096):
            with contextlib.suppress(OSError):
                taken.bind(("localhost", 61440 + job))
                break
    code = finished(slurm(cloud, [], JOB=str(job), JAX_PLATFORMS="cpu"))[0]
    assert code == 0, slurm_log(cloud)
    assert not calls(cloud, "scontrol"), slurm_log(cloud)
    assert [(cloud / f"process-{task}").read_text() for task in (0, 1)] == ["2", "2"]


def strict(required: dict, **optional) -> dict:
    """The schema of an object that has these fields and no others."""
    return {
        "type": "object",
        "properties": required | optional,
        "required": list(required),
        "additionalProperties": False,
    }


TEXT, COUNT = {"type": "string", "minLength": 1}, {"type": "integer", "minimum": 0}
TEXTS = {"type": "array", "items": TEXT, "uniqueItems": True}
ACTIONS = ["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]
# The part of JobSet v1alpha2 that is in use; Jobs are Kubernetes' own and held to its schema.
JOBSET = strict(
    {
        "apiVersion": {"const": "jobset.x-k8s.io/v1alpha2"},
        "kind": {"const": "JobSet"},
        "metadata": strict(
            {"name": {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]{0,50}[a-z0-9])?$"}},
            annotations={"type": "object", "additionalProperties": TEXT},
        ),
        "spec": strict(
            {
                "replicatedJobs": {
                    "type": "array",
                    "minItems": 1,
                    "items": strict(
                        {"name": TEXT, "template": strict({"spec": {"type": "object"}})},
                        replicas=COUNT,
                    ),
                }
            },
            ttlSecondsAfterFinished=COUNT,
            failurePolicy=strict(
                {},
                maxRestarts=COUNT,
                rules={
                    "type": "array",
                    "items": strict(
                        {
                            "name": {
                                "type": "string",
                                "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*\\w)?$",
                            },
                            "action": {"enum": ACTIONS},
                        },
                        onJobFailureReasons=TEXTS,
                        onJobFailureMessagePatterns=TEXTS,
                    ),
                },
            ),
        ),
    }
)


@pytest.fixture(scope="module")
def jobset():
    return yaml.safe_load((LAUNCH / "jobset.yaml").read_text())


def job_of(jobset) -> dict:
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": replicated["name"]}}
    return job | replicated["template"]


def test_jobset_fits_its_schemas(jobset):
    jsonschema.Draft202012Validator.check_schema(JOBSET)
    jsonschema.validate(jobset, JOBSET)
    kubernetes_validate.validate(job_of(jobset), "1.31", strict=True)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(jobset | {"spec": jobset["spec"] | {"maxRestarts": 3}}, JOBSET)
    job = job_of(jobset)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job | {"spec": job["spec"] | {"a": 1}}, "1.31", strict=True)


def test_jobset_requests_one_whole_slice(jobset):
    assert jobset["metadata"]["annotations"] == {
        "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
    }
    job = job_of(jobset)["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert job["completionMode"] == "Indexed"
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice",
        "cloud.google.com/gke-tpu-topology": "4x4",
    }
    assert container["resources"] == {"limits": {"google.com/tpu": 4}}
    assert job["parallelism"] == job["completions"] == 4 * 4 // 4
    assert [port["containerPort"] for port in container["ports"]] == [8471, 8482]


def test_jobset_gives_trainers_time_to_save(jobset):
    pod = job_of(jobset)["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 120
    assert pod["restartPolicy"] == "Never"


def matching_rule(jobset, code: int, conditions: set[str]) -> str | None:
    """What Kubernetes' Job controller reports when a rule matches the pod, in its words."""
    job = job_of(jobset)["spec"]
    (container,) = job["template"]["spec"]["containers"]
    for index, rule in enumerate(job["podFailurePolicy"]["rules"]):
        matched = f"matching {rule['action']} rule at index {index}"
        if "onExitCodes" in rule:
            exits = rule["onExitCodes"]
            assert (exits["containerName"], exits["operator"]) == (container["name"], "In")
            if code in exits["values"]:
                failed = f"Container {container['name']} for pod default/pod-0 failed with"
                return f"{failed} exit code {code} {matched}"
        for condition in rule.get("onPodConditions", []):
            if condition["type"] in conditions and condition["status"] == "True":
                return f"Pod default/pod-0 has condition {condition['type']} {matched}"
    return None


def action_for(jobset, code: int, conditions: set[str]) -> str:
    """What happens when a pod ends in this way: Kubernetes' rules for the Job, then JobSet's."""
    assert job_of(jobset)["spec"]["backoffLimit"] == 0
    reason, message = "PodFailurePolicy", matching_rule(jobset, code, conditions)
    if message is None:
        reason, message = "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    for rule in jobset["spec"]["failurePolicy"]["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        if reason in rule["onJobFailureReasons"] and any(re.search(p, message) for p in patterns):
            return rule["action"]
    return "RestartJobSet"  # counted, up to maxRestarts


def test_jobset_restarts_what_can_be_resumed(jobset):
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] == 3
    for codes, action in (
        (FINAL - {0}, "FailJobSet"),
        (UNLIMITED, "RestartJobSetAndIgnoreMaxRestarts"),
        (COUNTED | {137, 143}, "RestartJobSet"),
    ):
        found = {code: action_for(jobset, code, set()) for code in codes}
        assert found == dict.fromkeys(codes, action)


@pytest.mark.parametrize("code", [1, 4, 42, 137])
def test_jobset_restarts_when_a_node_is_taken_away(jobset, code):
    """Whatever the exit code of the trainer, unless it is final."""
    action = action_for(jobset, code, {"DisruptionTarget"})
    assert action == "RestartJobSetAndIgnoreMaxRestarts"


def extras(text: str) -> set[str]:
    (listed,) = re.findall(r"'\.\[([\w,]+)\]'", text)
    return set(listed.split(","))


def test_the_image_can_run_both_architectures_on_tpus():
    dockerfile = (LAUNCH / "Dockerfile").read_text()
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert extras(dockerfile) == {"tpu", "gcs", "sebulba", "remote"}
    assert extras(dockerfile) <= known["optional-dependencies"].keys()
    (base,) = re.findall(r"^FROM (\S+)$", dockerfile, flags=re.MULTILINE)
    assert base == "python:3.12-slim"


def in_build_context(path: str) -> bool:
    """Whether Docker sends a file, by its rules: the last pattern that matches it decides."""
    included = True
    parts = path.split("/")
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!").strip()
        if not pattern or pattern.startswith("#"):
            continue
        anywhere = pattern.startswith("**/")
        starts = range(len(parts)) if anywhere else [0]
        folders = [
            "/".join(parts[start:end])
            for start in starts
            for end in range(start + 1, len(parts) + 1)
        ]
        if any(fnmatch.fnmatchcase(folder, pattern.removeprefix("**/")) for folder in folders):
            included = line.startswith("!")
    return included


def test_the_image_holds_the_project_and_nothing_private():
    tracked = subprocess.run(
        ["git", "ls-files", "podracer", "configs"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*tracked, "pyproject.toml", project["readme"], *project["license-files"]]
    assert len(needed) > 20
    assert [path for path in needed if not in_build_context(path)] == []
    unwanted = (
        ".git/config", ".venv/bin/python", ".env", "key.json", "runs/cartpole/config.json",
        "podracer/__pycache__/cli.pyc", "podracer/nets/__pycache__/cores.pyc",
        "podracer.egg-info/PKG-INFO", "slurm-7.codes/0/0",
    )  # fmt: skip
    assert [path for path in unwanted if in_build_context(path)] == []


PAGES = {name: (ROOT / f"docs/launch-{name}.md").read_text() for name in ("tpu-vm", "gke", "slurm")}


@pytest.mark.parametrize("page", PAGES)
def test_pages_agree_on_the_exit_codes(page):
    """Each page has a table of the exit codes, the same for all launchers."""
    rows = re.findall(r"^\| ([^|]*`\d+`[^|]*) \| ([^|]*) \|$", PAGES[page], flags=re.MULTILINE)
    codes = {action: {int(code) for code in re.findall(r"`(\d+)`", cell)} for cell, action in rows}
    final, unlimited, counted = codes
    assert "final" in final
    assert codes[final] == FINAL
    assert "as often as needed" in unlimited
    assert codes[unlimited] == UNLIMITED
    assert "3 times" in counted
    assert codes[counted] == COUNTED


@pytest.mark.parametrize("page", PAGES)
def test_pages_name_files_that_exist(page):
    files = set(re.findall(r"\b(?:launch|tests|configs)/[\w./]+\w", PAGES[page]))
    assert any(file.startswith("launch/") for file in files)
    assert "tests/launch/test_launch.py" in files
    assert [file for file in files if not (ROOT / file).is_file()] == []


def shell_commands(page: str, program: str) -> list[list[str]]:
    """The arguments of each command of a page that calls this program."""
    blocks = re.findall(r"(?:^(?: {4,}.*)?\n)+", PAGES[page], flags=re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    words = [shlex.split(line) for line in lines if program in line]
    return [line[line.index(program) + 1 :] for line in words if program in line]


def names(arguments: list[str]) -> set[str]:
    options = itertools.takewhile(lambda argument: argument != "--", arguments)
    return {option.partition("=")[0] for option in options if option.startswith("--")}


def test_tpu_vm_page_shows_options_that_exist():
    commands = shell_commands("tpu-vm", "launch/tpu_vm.sh")
    assert commands
    assert set().union(*map(names, commands)) <= tpu_vm_options()
    mentioned = set(re.findall(r"`(--[a-z]+(?:_[a-z]+)*)", PAGES["tpu-vm"]))
    assert mentioned <= tpu_vm_options()


def test_slurm_page_shows_options_that_exist():
    (command,) = shell_commands("slurm", "sbatch")
    script = command.index("launch/slurm.sh")
    assert names(command[:script]) == {"--nodes", "--gpus-per-node", "--cpus-per-task"}
    assert command[script + 1 : script + 4] == ["python", "-m", "podracer.anakin"]
    shown = set(re.findall(r"\b[A-Z]+_[A-Z_]+\b", PAGES["slurm"]))
    assert "MAX_RESTARTS" in shown
    assert [name for name in shown if name not in (LAUNCH / "slurm.sh").read_text()] == []


def test_gke_page_fits_the_manifest(jobset):
    job = job_of(jobset)["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    (pool,) = [
        c for c in shell_commands("gke", "gcloud") if c[:3] == ["container", "node-pools", "create"]
    ]
    assert {
        "--machine-type=ct5lp-hightpu-4t",
        f"--tpu-topology={pod['nodeSelector']['cloud.google.com/gke-tpu-topology']}",
        f"--num-nodes={job['parallelism']}",
    } <= set(pool)
    commands = [" ".join(c) for c in shell_commands("gke", "gcloud")]
    for needed in (
        "artifacts repositories create REPOSITORY .*--repository-format=docker",
        "artifacts repositories add-iam-policy-binding REPOSITORY .*roles/artifactregistry.reader",
        "projects add-iam-policy-binding PROJECT ",
        "auth configure-docker REGION-docker.pkg.dev",
    ):
        assert [c for c in commands if re.match(needed, c)], needed
    docker = shell_commands("gke", "docker")
    assert [command[0] for command in docker] == ["build", "push"]
    assert {"--platform=linux/amd64", "--file=launch/Dockerfile"} <= set(docker[0])
    assert f"--tag={container['image']}" in docker[0]
    assert docker[1][1] == container["image"]
    (xpk,) = [c for c in shell_commands("gke", "xpk") if c[:2] == ["workload", "create"]]
    # xpk itself restarts after 42 and after 127 to 255.
    assert f"--restart-on-exit-codes={','.join(map(str, sorted(COUNTED)))}" in xpk
    assert f"--termination-grace-period-seconds={pod['terminationGracePeriodSeconds']}" in xpk
    assert ["create", "serviceaccount", pod["serviceAccountName"]] in shell_commands(
        "gke", "kubectl"
    )
