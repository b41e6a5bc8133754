"""The launchers, run for real with stand-ins for the cloud; manifests against their schemas."""

import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import textwrap
import time

import jsonschema
import kubernetes_validate
import pytest
import yaml

ROOT = pathlib.Path(__file__).parent.parent
LAUNCH = ROOT / "launch"
FAKE = ROOT / "tests" / "fake_cloud.py"
# What a shell could break: spaces, quotes, expansions, an empty argument, a second line.
AWKWARD = ["--config.env=two words", 'it\'s "quoted" $HOME *', "", "a\nb"]
WORKDIR = "gs://bucket/runs/cart pole"
# What the exit codes of the processes mean: final code, or None for another attempt.
VERDICTS = [
    ([2, 2], 2),
    ([3, 3], 3),
    ([4, 2], 2),  # the others fail because one refuses
    ([42, 42], None),
    ([4, 1], None),
    ([0, 0], 0),
    ([130, 130], 130),
    ([42, 0], None),
    ([137, 42], None),
]

# Plays the trainer: notes how it was called and ends as $PLAN says, a list of codes an attempt.
TRAINER = """
    import json, os, pathlib, signal, sys, time
    cloud = pathlib.Path(os.environ["CLOUD"])
    worker = os.environ.get("TPU_WORKER_ID") or os.environ["SLURM_PROCID"]
    notes = cloud / f"trained-{worker}"
    attempt = len(notes.read_text().splitlines()) if notes.exists() else 0
    code = json.loads(os.environ["PLAN"])[attempt][int(worker)]
    local = os.environ.get("JAX_LOCAL_DEVICE_IDS")
    if code == "until SIGTERM":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(42))
    with notes.open("a") as file:
        uncommitted = pathlib.Path(__file__).read_text().endswith("# not committed\\n")
        note = {"argv": sys.argv[1:], "cwd": os.getcwd()}
        note |= {"local": local, "uncommitted": uncommitted}
        file.write(json.dumps(note) + "\\n")
    print("training", worker, attempt, flush=True)
    while code == "until SIGTERM":
        time.sleep(0.05)
    sys.exit(code)
"""


@pytest.fixture
def cloud(tmp_path, monkeypatch):
    """A folder that stands for the cloud, with its tools on PATH; ends what is left running."""
    folder, tools, source = tmp_path / "cloud", tmp_path / "tools", tmp_path / "source"
    for path in (folder, tools, source):
        path.mkdir()
    for tool in ("gcloud", "curl", "srun", "scontrol"):
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
    # Only a failed test leaves something.
    groups = [int(path.read_text()) for path in folder.glob("slices/*/worker-*/group")]
    while launched:
        process = launched.pop()
        if process.poll() is None:
            tasks = folder / "step"
            groups += [process.pid, *(json.loads(tasks.read_text()) if tasks.exists() else [])]
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


launched: list[subprocess.Popen] = []


def launch(cloud, command: list, environment: dict) -> subprocess.Popen:
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


# In the place of pip: shows that the source is there, and what `python` is then.
INSTALL = f"test -f train.py && mkdir -p .venv/bin && ln -s '{sys.executable}' .venv/bin/python"


def tpu_vm(cloud, plan, *options, name="pod", workdir=WORKDIR) -> subprocess.Popen:
    command = [
        str(LAUNCH / "tpu_vm.sh"), f"--name={name}", "--zone=zone-a", "--project=project",
        "--accelerator_type=v5litepod-8", f"--source={cloud.parent / 'source'}",
        f"--install={INSTALL}", "--poll=0.1", *options,
        "--", "python", "train.py", f"--workdir={workdir}", *AWKWARD,
    ]  # fmt: skip
    return launch(cloud, command, {"PLAN": json.dumps(plan)})


def finished(process: subprocess.Popen) -> tuple[int, str, str]:
    output, errors = process.communicate(timeout=60)
    return process.returncode, output, errors


def wait_for(condition, what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within a minute"
        time.sleep(0.05)


def calls(cloud, *beginning: str) -> list[list[str]]:
    if not (cloud / "calls").exists():
        return []
    lines = [json.loads(line) for line in (cloud / "calls").read_text().splitlines()]
    return [line for line in lines if tuple(line[: len(beginning)]) == beginning]


def slice_calls(cloud) -> list[str]:
    """What was done to slices, in order, without the looks at them."""
    done = [call[4] for call in calls(cloud, "gcloud", "compute", "tpus")]
    return [verb for verb in done if verb != "describe"]


def trained(cloud, worker: int) -> list[dict]:
    path = cloud / f"trained-{worker}"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize("script", sorted(LAUNCH.glob("*.sh")), ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script):
    shellcheck = pathlib.Path(sysconfig.get_path("scripts")) / "shellcheck"
    found = subprocess.run([shellcheck, script], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


def test_help_names_every_option():
    script = LAUNCH / "tpu_vm.sh"
    shown = subprocess.run([script, "--help"], capture_output=True, text=True, check=True).stdout
    parsed = re.findall(
        r"^    (--[a-z_]+)(?:=\*| \| -h)?\) ", script.read_text(), flags=re.MULTILINE
    )
    assert len(parsed) > 10
    assert set(parsed) - {"--help"} == set(re.findall(r"^  (--[a-z_]+)", shown, flags=re.MULTILINE))


def test_tpu_vm_creates_trains_and_deletes(cloud):
    options = ("--spot", "--create_flag=--service-account=me")
    code, _, errors = finished(tpu_vm(cloud, [[0, 0]], *options))
    assert code == 0, errors
    assert [verb for verb in slice_calls(cloud) if verb != "ssh"] == ["create", "delete"]
    (create,) = calls(cloud, "gcloud", "compute", "tpus", "queued-resources", "create")
    assert {
        "pod", "--node-id=pod", "--zone=zone-a", "--project=project", "--spot",
        "--accelerator-type=v5litepod-8", "--runtime-version=v2-alpha-tpuv5-lite",
        "--service-account=me",
    } <= set(create)  # fmt: skip
    for worker in (0, 1):
        (note,) = trained(cloud, worker)
        assert note["argv"] == [f"--workdir={WORKDIR}", *AWKWARD]
        assert note["cwd"].endswith(f"worker-{worker}/source")
        assert note["uncommitted"]
    assert not list((cloud / "slices").iterdir())


SLOW = [pytest.param(*verdict, marks=pytest.mark.slow) for verdict in VERDICTS[5:]]


def test_tpu_vm_takes_a_git_repository(cloud):
    source = f"--source=file://{cloud.parent / 'source'}#HEAD"
    code, _, errors = finished(tpu_vm(cloud, [[0, 0]], source))
    assert code == 0, errors
    assert [trained(cloud, worker)[0]["uncommitted"] for worker in (0, 1)] == [False, False]


@pytest.mark.parametrize(("codes", "final"), [*VERDICTS[:5], *SLOW])
def test_tpu_vm_runs_again_what_can_be_resumed(cloud, codes, final):
    plan = [codes] if final is not None else [codes, [0, 0]]
    code, _, errors = finished(tpu_vm(cloud, plan))
    assert code == (final or 0), errors
    assert [len(trained(cloud, worker)) for worker in (0, 1)] == [len(plan)] * 2
    assert slice_calls(cloud)[-1] == "delete"
    assert slice_calls(cloud).count("create") == 1  # the slice is kept for the next attempt
    assert ("training 1 0" in errors) == (code != 0)  # a failure is shown


def test_tpu_vm_gives_up_after_crashes(cloud):
    plan = [[1, 4], [42, 42], [1, 4], [0, 0]]
    code, _, _ = finished(tpu_vm(cloud, plan, "--max_restarts=1"))
    assert code == 1
    assert [len(trained(cloud, worker)) for worker in (0, 1)] == [3, 3]
    assert slice_calls(cloud)[-1] == "delete"


@pytest.mark.parametrize(("options", "last"), [((), "delete"), (("--keep",), "ssh")])
def test_tpu_vm_shows_the_log_and_deletes_after_ctrl_c(cloud, options, last):
    process = tpu_vm(cloud, [["until SIGTERM"] * 2], *options)
    assert process.stdout.readline() == "training 0 0\n"  # shown while it runs
    os.killpg(process.pid, signal.SIGINT)
    code, _, errors = finished(process)
    assert code == 130
    assert [verb for verb in slice_calls(cloud) if verb != "ssh"][1:] == [last] * (last != "ssh")
    assert (cloud / "slices/pod").exists() == bool(options)
    if options:
        assert "queued-resources delete pod --force --zone=zone-a --project=project" in errors


def test_tpu_vm_asks_again_for_a_preempted_slice(cloud):
    process = tpu_vm(cloud, [["until SIGTERM"] * 2, [0, 0]])
    wait_for(lambda: trained(cloud, 0) and trained(cloud, 1), "training on both workers")
    preempt = "import fake_cloud, pathlib, sys; fake_cloud.preempt(pathlib.Path(sys.argv[1]))"
    subprocess.run(
        [sys.executable, "-c", preempt, cloud / "slices/pod"], cwd=FAKE.parent, check=True
    )
    code, _, errors = finished(process)
    assert code == 0, errors
    done = [verb for verb in slice_calls(cloud) if verb != "ssh"]
    assert done == ["create", "delete", "create", "delete"]
    for worker in (0, 1):
        first, second = trained(cloud, worker)
        assert first["argv"] == second["argv"]
        # SIGTERM came to the trainer, which had its time to save and end with 42.
        (saved,) = (cloud / "bucket").glob(f"runs/*.launch/*/slice-0/0/worker-{worker}.exit")
        assert saved.read_text() == "42\n"


def test_tpu_vm_says_so_when_it_cannot_delete(cloud):
    (cloud / "cannot-delete").touch()
    code, _, errors = finished(tpu_vm(cloud, [[0, 0]]))
    assert code == 1
    assert "COULD NOT BE DELETED" in errors
    assert slice_calls(cloud)[-3:] == ["delete"] * 3


def test_tpu_vm_deletes_when_the_install_fails(cloud):
    code, _, errors = finished(tpu_vm(cloud, [], "--install=echo no such package && false"))
    assert code == 1
    assert "no such package" in errors
    assert slice_calls(cloud)[-1] == "delete"
    assert not trained(cloud, 0)


def test_tpu_vm_does_not_wait_for_workers_that_cannot_report(cloud):
    (cloud / "no-permission").touch()
    code, _, errors = finished(tpu_vm(cloud, [], "--patience=1"))
    assert code == 1
    assert "may the slice's service account write there?" in errors
    assert slice_calls(cloud)[-1] == "delete"


def test_tpu_vm_refuses_before_anything_costs(cloud):
    code, _, errors = finished(tpu_vm(cloud, [], workdir="runs/pod"))
    assert code == 2
    assert "gs://BUCKET/..., which all workers reach; it has 'runs/pod'" in errors
    code, _, errors = finished(tpu_vm(cloud, [], "--source=no/such"))
    assert code == 2
    assert "--source=no/such is neither a folder nor a URL" in errors
    assert not calls(cloud)
    (cloud / "slices/pod").mkdir(parents=True)
    (cloud / "slices/pod/state").write_text("ACTIVE")
    code, _, errors = finished(tpu_vm(cloud, []))
    assert code == 2
    assert "pod exists already in zone-a" in errors
    assert slice_calls(cloud) == []
    assert (cloud / "slices/pod").exists()  # somebody else's


def slurm(cloud, plan, attempt: int, **environment) -> subprocess.Popen:
    """What sbatch does with the script, once it is the job's turn."""
    variables = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "PLAN": json.dumps(plan)}
    if attempt:
        variables["SLURM_RESTART_COUNT"] = str(attempt)
    command = [LAUNCH / "slurm.sh", sys.executable, cloud.parent / "source/train.py", *AWKWARD]
    return launch(cloud, command, variables | environment)


@pytest.mark.parametrize(("codes", "final"), VERDICTS)
def test_slurm_requeues_what_can_be_resumed(cloud, codes, final):
    code, _, errors = finished(slurm(cloud, [codes], 0, SLURM_GPUS_ON_NODE="4"))
    assert code == (final or 0), errors
    requeued = [["scontrol", "requeue", "7"]] if final is None else []
    assert calls(cloud, "scontrol") == requeued
    for worker in (0, 1):
        (note,) = trained(cloud, worker)
        assert note["argv"] == AWKWARD
        assert note["local"] == "0,1,2,3"  # all GPUs of the node, not JAX's one a process


def test_slurm_saves_ahead_of_the_time_limit(cloud):
    process = slurm(cloud, [["until SIGTERM"] * 2], 0)
    wait_for(lambda: trained(cloud, 0) and trained(cloud, 1), "training on both nodes")
    for task in json.loads((cloud / "step").read_text()):
        os.killpg(task, signal.SIGTERM)  # as --signal does: the steps, shells included
    code, _, errors = finished(process)
    assert code == 0, errors
    assert calls(cloud, "scontrol") == [["scontrol", "requeue", "7"]]
    codes = cloud / "slurm-7.codes"  # the trainers' own, and no crash
    assert [(codes / "0" / task).read_text() for task in "01"] == ["42\n", "42\n"]
    assert not (codes / "crashes").exists()


def test_slurm_gives_up_after_crashes(cloud):
    plan = [[1, 4], [42, 42], [1, 4], [0, 0]]
    for attempt, code in enumerate((0, 0, 1)):
        assert finished(slurm(cloud, plan, attempt, MAX_RESTARTS="1"))[0] == code
    assert len(calls(cloud, "scontrol")) == 2


def test_slurm_requeues_after_the_loss_of_a_node(cloud):
    process = slurm(cloud, [["until SIGTERM", 0]], 0)
    wait_for(lambda: trained(cloud, 0) and trained(cloud, 1), "training on both nodes")
    os.killpg(json.loads((cloud / "step").read_text())[0], signal.SIGKILL)
    assert finished(process)[0] == 0
    assert calls(cloud, "scontrol") == [["scontrol", "requeue", "7"]]


def test_slurm_lets_jax_find_all_processes(cloud):
    """JAX's own detection, with nothing but what SLURM sets."""
    (cloud.parent / "source/train.py").write_text(
        "import jax, os, pathlib\n"
        "jax.distributed.initialize()\n"
        "assert jax.local_device_count() * jax.process_count() == jax.device_count()\n"
        "place = pathlib.Path(os.environ['CLOUD']) / f'process-{jax.process_index()}'\n"
        "place.write_text(str(jax.process_count()))\n"
        "jax.distributed.shutdown()\n"
    )
    with socket.socket() as taken:  # JAX makes the coordinator's port from the job's number
        for job in range(4096):
            with contextlib.suppress(OSError):
                taken.bind(("localhost", 61440 + job))
                break
    code, _, errors = finished(slurm(cloud, [], 0, SLURM_JOB_ID=str(job), JAX_PLATFORMS="cpu"))
    assert code == 0, errors
    assert not calls(cloud, "scontrol"), errors
    assert [(cloud / f"process-{task}").read_text() for task in (0, 1)] == ["2", "2"]


def test_slurm_signals_the_steps_only():
    lines = re.findall(r"^#SBATCH (.*)", (LAUNCH / "slurm.sh").read_text(), flags=re.MULTILINE)
    assert {"--ntasks-per-node=1", "--requeue", "--signal=TERM@300"} <= set(lines)
    assert "--kill-on-bad-exit=0" in (LAUNCH / "slurm.sh").read_text()


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


def test_jobset_asks_for_a_whole_slice(jobset):
    job = job_of(jobset)["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert job["parallelism"] == job["completions"]
    rows, columns = map(int, pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x"))
    chips = container["resources"]["limits"]["google.com/tpu"]
    assert job["parallelism"] * chips == rows * columns


def action_for(jobset, code: int) -> str:
    """What happens when a container ends so: Kubernetes' rules for the Job, then JobSet's."""
    job = job_of(jobset)["spec"]
    (container,) = job["template"]["spec"]["containers"]
    reason, message = "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    assert job["backoffLimit"] == 0
    for index, rule in enumerate(job["podFailurePolicy"]["rules"]):
        exits = rule.get("onExitCodes", {"values": []})
        if code in exits["values"]:
            assert exits["containerName"] == container["name"]
            reason = "PodFailurePolicy"
            # The words of Kubernetes' Job controller.
            message = (
                f"Container {container['name']} for pod default/pod-0 failed with exit code {code} "
                f"matching {rule['action']} rule at index {index}"
            )
            break
    for rule in jobset["spec"]["failurePolicy"]["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        if reason in rule["onJobFailureReasons"] and any(re.search(p, message) for p in patterns):
            return rule["action"]
    return "RestartJobSet"  # counted, up to maxRestarts


@pytest.mark.parametrize("code", [1, 2, 3, 4, 42, 130, 137, 143])
def test_jobset_restarts_what_can_be_resumed(jobset, code):
    special = {2: "FailJobSet", 3: "FailJobSet", 130: "FailJobSet"}
    special[42] = "RestartJobSetAndIgnoreMaxRestarts"
    assert action_for(jobset, code) == special.get(code, "RestartJobSet")


@pytest.mark.parametrize("page", ["tpu-vm", "gke", "slurm"])
def test_pages_name_what_there_is(page):
    """Every file of launch/ and every option that a page shows exists."""
    text = (ROOT / "docs" / f"launch-{page}.md").read_text()
    files = set(re.findall(r"launch/[\w.]+", text))
    assert files
    assert all((ROOT / file).is_file() for file in files), files
    script = (LAUNCH / "tpu_vm.sh").read_text()
    for command in re.findall(r"launch/tpu_vm\.sh((?:.|\\\n)*?) -- ", text):
        for option in re.findall(r"--[a-z_]+", command):
            assert f"    {option}" in script, option
