"""The launchers of remote workers, with stand-ins for the cloud; manifests and the page."""

import copy
import itertools
import json
import os
import pathlib
import re
import shlex
import signal
import stat
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import grpc
import jsonschema
import kubernetes_validate
import pytest
import yaml

from podracer import config as config_lib
from podracer.config.sizes import make_sizes
from podracer.remote import access
from podracer.remote.settings import RemoteConfig
from podracer.training import command_line
from tests.launch import test_launch
from tests.launch.test_launch import (
    AWKWARD,
    ENDED,
    JOBSET,
    LAUNCH,
    ROOT,
    attempts,
    calls,
    finished,
    job_of,
    launch,
    slurm_log,
    trained,
    wait_for,
)

cloud = test_launch.cloud  # the fixture
PAGE = (ROOT / "docs/launch-workers.md").read_text()

# Plays a worker: notes how it was called, and ends as the plan says: with an exit code, or never.
WORKER = """
    import json, os, pathlib, sys, time
    cloud = pathlib.Path(os.environ["CLOUD"])
    worker = os.environ.get("SLURM_PROCID") or os.environ["TPU_WORKER_ID"]
    notes = cloud / f"worked-{worker}"
    attempt = len(notes.read_text().splitlines()) if notes.exists() else 0
    flags = dict(x[2:].split("=", 1) for x in sys.argv[3:])
    files = {x: pathlib.Path(flags[x]).read_text() for x in ("token_file", "tls_ca")}
    names = ("SLURM_CPUS_PER_TASK", "SLURM_GPUS_ON_NODE", "no_grpc_proxy")
    variables = {x: os.environ.get(x) for x in names}
    with notes.open("a") as lines:
        note = {"argv": sys.argv[1:3], "flags": flags, "files": files, "variables": variables}
        lines.write(json.dumps(note) + "\\n")
    plan = json.loads((cloud / "worker-plan").read_text())
    code = plan[min(attempt, len(plan) - 1)]
    while code == "never":
        time.sleep(0.1)
    sys.exit(code)
"""


@pytest.fixture
def workers(cloud):
    """The cloud, whose ``python`` plays a worker that never ends."""
    (cloud / "worker.py").write_text(textwrap.dedent(WORKER))
    python = cloud.parent / "tools/python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "{cloud}/worker.py" "$@"\n')
    python.chmod(0o755)
    (cloud / "worker-plan").write_text('["never"]')
    (cloud / "addresses").write_text("10.0.0.2;10.0.0.3")
    return cloud


def worked(cloud, worker: int) -> list[dict]:
    path = cloud / f"worked-{worker}"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# Cloud TPU VMs.

# Instead of pip: shows that the source is there, and provides the worker's Python.
INSTALL = 'test -f train.py && mkdir -p .venv/bin && ln -s "$(command -v python)" .venv/bin/python'
SECRETS = {"pod-token", "pod-tls"}
EVERYTHING = {
    *SECRETS, "pod-workers", "pod-workers-allow", "pod-workers-deny",
}  # fmt: skip


def tpu_workers(cloud, action: str, *options: str, command=()) -> subprocess.Popen:
    given = ["--name=pod", "--zone=zone-a", "--project=project", "--poll=0.1"]
    if action in ("run", "create"):
        given += [
            "--size=3", "--folder=gs://bucket/runs", "--worker_account=worker@example.org",
            "--slice_account=slice@example.org", f"--source={cloud.parent / 'source'}",
            f"--install={INSTALL}", "--num_envs=96", "--worker_flag=--allow_env=two words",
        ]  # fmt: skip
    script = [str(LAUNCH / "tpu_workers.sh"), action, *given, *options]
    return launch(cloud, [*script, *(["--", *command] if command else [])], [])


def existing(cloud) -> set[str]:
    return {path.name for path in (cloud / "resources").glob("*/*")}


def pretend(cloud) -> None:
    """Everything exists, without a machine."""
    kinds = {
        "secrets": SECRETS,
        "firewall-rules": {"pod-workers-allow", "pod-workers-deny"},
        "instance-templates": {"pod-workers"},
        "managed": {"pod-workers"},
    }
    for kind, names in kinds.items():
        (cloud / "resources" / kind).mkdir(parents=True)
        for name in names:
            (cloud / "resources" / kind / name).touch()
    (cloud / "slices/pod-workers").mkdir(parents=True)


def created(cloud, *command: str) -> list[set[str]]:
    found = calls(cloud, "gcloud", *command)
    assert all("--project=project" in call for call in found)
    return [set(call[1 + len(command) :]) for call in found]


def until(cloud, file: str) -> tuple[str, ...]:
    """A launcher that waits for a file in the cloud and ends with 3, or with 130 after Ctrl-C."""
    wait = f"for _ in {{1..600}}; do [ -e '{cloud}/{file}' ] && break; sleep 0.1; done"
    return ("bash", "-c", f"trap 'exit 130' INT; touch '{cloud}/launched'; {wait}; exit 3")


def test_tpu_workers_run_makes_workers_and_deletes_them(workers):
    process = tpu_workers(workers, "run", command=until(workers, "done"))
    wait_for(lambda: worked(workers, 0), "worker")
    (note,) = worked(workers, 0)
    assert existing(workers) == EVERYTHING
    home = workers / "slices/pod-workers/worker-0"
    secrets = {x: (workers / "resources/secrets" / x).read_text() for x in SECRETS}
    hosts = (home / "etc-hosts").read_text()
    (workers / "done").touch()
    code, _, errors = finished(process)
    assert code == 3, errors  # the launcher's
    assert existing(workers) == set()

    assert note["argv"] == ["-m", "podracer.worker"]
    assert note["flags"]["connect"] == "host-0.podracer.internal:5000,host-1.podracer.internal:5000"
    assert note["flags"]["num_envs"] == "96"
    assert note["flags"]["allow_env"] == "two words"
    assert hosts.startswith("127.0.0.1 localhost\n")
    assert re.findall("^10.*", hosts, re.MULTILINE) == [
        "10.0.0.2 host-0.podracer.internal # podracer",
        "10.0.0.3 host-1.podracer.internal # podracer",
    ]
    assert re.fullmatch(r"[0-9a-f]{64}\n", secrets["pod-token"])
    assert note["files"]["token_file"] == secrets["pod-token"]
    # Workers get the certificate, but not its key.
    assert "PRIVATE KEY" not in note["files"]["tls_ca"]
    assert secrets["pod-tls"].startswith(note["files"]["tls_ca"])
    assert "PRIVATE KEY" in secrets["pod-tls"]


@pytest.mark.slow
def test_tpu_workers_restrict_who_reaches_what(workers):
    assert finished(tpu_workers(workers, "create", "--template_flag=--no-address"))[0] == 0
    allow, deny = created(workers, "compute", "firewall-rules", "create")
    common = {
        "--network=default", "--direction=INGRESS", "--rules=tcp:5000",
        "--target-tags=pod-learner", "--project=project",
    }  # fmt: skip
    allows = {"pod-workers-allow", "--action=ALLOW", "--priority=900", "--source-tags=pod-workers"}
    denies = {"pod-workers-deny", "--action=DENY", "--priority=910", "--source-ranges=0.0.0.0/0"}
    assert allow == common | allows
    assert deny == common | denies
    grants = created(workers, "secrets", "add-iam-policy-binding")
    role, project = "--role=roles/secretmanager.secretAccessor", "--project=project"
    assert grants == [
        {"pod-token", "--member=serviceAccount:slice@example.org", role, project},
        {"pod-token", "--member=serviceAccount:worker@example.org", role, project},
        {"pod-tls", "--member=serviceAccount:slice@example.org", role, project},
    ]
    (template,) = created(workers, "compute", "instance-templates", "create")
    assert {
        "--provisioning-model=SPOT", "--tags=pod-workers", "--service-account=worker@example.org",
        "--scopes=cloud-platform", "--machine-type=c2d-highcpu-8", "--no-address",
    } <= template  # fmt: skip
    (group,) = created(workers, "compute", "instance-groups", "managed", "create")
    assert {"pod-workers", "--template=pod-workers", "--size=3", "--zone=zone-a"} <= group
    script = (workers / "resources/instance-templates/pod-workers").read_text()
    assert "PRIVATE KEY" not in script
    assert (workers / "resources/secrets/pod-token").read_text().strip() not in script
    # Nothing but delete removes them, and their machines.
    assert existing(workers) == EVERYTHING
    assert finished(tpu_workers(workers, "delete"))[0] == 0
    assert existing(workers) == set()
    assert not (workers / "slices/pod-workers").exists()


def test_tpu_workers_follow_the_slice_and_serve_the_next_run(workers):
    (workers / "worker-plan").write_text('[75, 0, "never"]')
    (workers / "addresses").unlink()  # the slice does not exist yet
    process = tpu_workers(workers, "create")
    assert finished(process)[0] == 0
    asked = ("gcloud", "compute", "tpus", "tpu-vm", "describe", "pod", "--zone=zone-a")
    wait_for(lambda: len(calls(workers, *asked)) > 1, "second request for the addresses")
    assert not worked(workers, 0)
    (workers / "addresses").write_text("10.0.0.2")
    wait_for(lambda: len(worked(workers, 0)) == 3, "third start of the worker")
    assert worked(workers, 0)[2]["flags"]["connect"] == "host-0.podracer.internal:5000"
    (workers / "addresses").write_text("10.0.9.9")  # preempted and replaced
    hosts = workers / "slices/pod-workers/worker-0/etc-hosts"
    wait_for(lambda: "10.0.9.9 host-0.podracer.internal" in hosts.read_text(), "new address")
    assert "10.0.0.2" not in hosts.read_text()
    assert "127.0.0.1 localhost" in hosts.read_text()


@pytest.mark.parametrize(
    "refused",
    [
        *(
            pytest.param(command, marks=pytest.mark.slow)
            for command in ("secrets add-iam-policy-binding", "firewall-rules create")
        ),
        "managed create",
    ],
)
def test_tpu_workers_leave_nothing_behind_when_creating_fails(workers, refused):
    (workers / "refused").write_text(json.dumps([refused]))
    (workers / "failing-deletions").write_text("1")
    code, _, errors = finished(tpu_workers(workers, "run", command=until(workers, "never")))
    assert code == 1
    assert "PERMISSION_DENIED" in errors
    assert "COULD NOT BE DELETED" not in errors
    assert existing(workers) == set()
    assert not (workers / "launched").exists()


@pytest.mark.parametrize(
    ("number", "final"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)],
)
def test_tpu_workers_pass_signals_on_and_delete(workers, number, final):
    process = tpu_workers(workers, "run", command=until(workers, "never"))
    wait_for((workers / "launched").exists, "launcher")
    os.kill(process.pid, number)
    code, _, errors = finished(process)
    assert code == final, errors
    assert existing(workers) == set()


def test_tpu_workers_report_what_they_cannot_delete(workers):
    pretend(workers)
    (workers / "failing-deletions").write_text("1000000")
    code, _, errors = finished(tpu_workers(workers, "delete", "--retry_for=0"))
    assert code == 1
    assert errors.count("COULD NOT BE DELETED") == len(EVERYTHING) + 1  # a group and its template
    flags = "--quiet --project=project"
    assert f"instance-groups managed delete pod-workers {flags} --zone=zone-a\n" in errors
    assert f"gcloud secrets delete pod-token {flags}\n" in errors


def test_tpu_workers_do_not_touch_what_exists(workers):
    (workers / "resources/secrets").mkdir(parents=True)
    for name in ("pod-token", "another-pod-tls", "pod-tls-2"):
        (workers / "resources/secrets" / name).touch()
    code, _, errors = finished(tpu_workers(workers, "create"))
    assert code == 2
    assert "pod-token exists" in errors
    assert finished(tpu_workers(workers, "delete"))[0] == 0
    assert existing(workers) == {"another-pod-tls", "pod-tls-2"}


def test_tpu_workers_resize(workers):
    pretend(workers)
    assert finished(tpu_workers(workers, "resize", "--size=24"))[0] == 0
    (call,) = created(workers, "compute", "instance-groups", "managed", "resize")
    assert call == {"pod-workers", "--size=24", "--zone=zone-a", "--project=project"}


def test_tpu_workers_give_the_learner_its_secrets(workers):
    assert finished(tpu_workers(workers, "create", "--port=5001"))[0] == 0
    code = "import os, sys; print(os.getpid(), *map(repr, sys.argv[1:]), sep='\\n')"
    command = (sys.executable, "-c", code, *AWKWARD)
    process = tpu_workers(workers, "learner", "--port=5001", command=command)
    status, output, errors = finished(process)
    assert status == 0, errors
    lines = output.splitlines()
    assert int(lines[0]) == process.pid  # in place of the script: SIGTERM reaches the learner
    argv = [eval(line) for line in lines[1:]]
    assert argv[: len(AWKWARD)] == AWKWARD
    flags = dict(x.split("=") for x in argv[len(AWKWARD) :])
    assert flags["--config.remote.listen"] == "0.0.0.0:5001"
    for name, secret in (("token_file", "token"), ("tls_cert", "tls"), ("tls_key", "tls")):
        file = pathlib.Path(flags[f"--config.remote.{name}"])
        assert file.read_text() == (workers / f"resources/secrets/pod-{secret}").read_text()
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    options = RemoteConfig(
        num_envs=1,
        **{x.removeprefix("--config.remote."): value for x, value in flags.items()},
    )
    certificate = re.search("-----BEGIN CERT.*?-----END.*?\n", file.read_text(), re.DOTALL)[0]
    (workers / "certificate").write_text(certificate)
    authority = str(workers / "certificate")
    assert connects(options, authority, name="host-3.podracer.internal")
    assert not connects(options, authority, name="host-3.example.org")


@pytest.mark.parametrize(
    ("action", "options", "command", "message"),
    [
        ("create", ["--folder=runs"], (), "--folder=runs is not a gs:// folder"),
        ("create", ["--worker_account="], (), "--worker_account and --slice_account"),
        ("create", [], ("true",), "create takes no command"),
        ("run", [], (), "'-- COMMAND ...' is missing"),
        ("resize", ["--size=x"], (), "--size=x is not a whole number"),
        ("delete", ["--name=My_pod"], (), "--name=My_pod is not the name of a slice"),
        ("delete", ["--zone="], (), "--zone is required"),
        ("delete", ["--no_such"], (), "unknown option --no_such"),
        ("start", [], (), "unknown action start"),
    ],
)
def test_tpu_workers_reject_impossible_options(workers, action, options, command, message):
    code, _, errors = finished(tpu_workers(workers, action, *options, command=command))
    assert code == 2
    assert message in errors
    assert not calls(workers)


def tpu_workers_options() -> set[str]:
    script = (LAUNCH / "tpu_workers.sh").read_text()
    return set(re.findall(r"^    (--[a-z_]+)(?:=\*| \| -h)?\) ", script, flags=re.MULTILINE))


def test_tpu_workers_help_lists_every_option():
    command = [LAUNCH / "tpu_workers.sh", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert len(tpu_workers_options()) > 10
    listed = set(re.findall(r"^  (--[a-z_]+)", shown, flags=re.MULTILINE))
    assert tpu_workers_options() - {"--help"} == listed
    # Each default that it names is the script's.
    script = (LAUNCH / "tpu_workers.sh").read_text()
    flags = re.findall(r"^  --([a-z_]+)=(.*?)(?=^  --|\n\n)", shown, re.MULTILINE | re.DOTALL)
    named = {name: re.search(r"default:\s+([\w-]+)$", text.strip()) for name, text in flags}
    defaults = {name: found[1] for name, found in named.items() if found}
    assert defaults.keys() >= {"network", "port", "machine_type", "num_envs", "retry_for", "poll"}
    for name, value in defaults.items():
        assert re.search(rf"\b{name}={value}\b", script), name


# SLURM.


def slurm(cloud, plan, *worker_flags: str, **environment: str) -> subprocess.Popen:
    (cloud / "launch").symlink_to(LAUNCH)  # the folder that jobs are submitted from
    sleep = cloud.parent / "tools/sleep"
    sleep.write_text("#!/bin/sh\nexec /bin/sleep 0.02\n")
    sleep.chmod(0o755)
    command = [
        "sbatch", "--nodes=2", "--gpus-per-node=4", "--cpus-per-task=12", ":", "--nodes=3",
        "--cpus-per-task=64", "launch/slurm_workers.sh", "--num_envs=96", *worker_flags,
        "--", sys.executable, str(cloud.parent / "source/train.py"), *AWKWARD,
    ]  # fmt: skip
    return launch(cloud, command, plan, JOB="12345", **environment)


def start_of_workers(cloud, number: int = 1) -> None:
    wait_for(
        lambda: min(len(worked(cloud, worker)) for worker in range(3)) >= number, "three workers"
    )


def test_slurm_workers_find_the_learner(workers):
    process = slurm(workers, [["0 after works"] * 2], "--allow_env=two words", PORT="")
    start_of_workers(workers)
    folder = workers / "slurm-12345.remote"
    (workers / "works").touch()
    assert finished(process)[0] == 0, slurm_log(workers)
    address = "node-0-0:22345,node-0-1:22345"
    for worker in range(3):
        (note,) = worked(workers, worker)
        assert note["argv"] == ["-m", "podracer.worker"]
        assert note["flags"] == {
            "connect": address,
            "token_file": f"{folder}/token",
            "tls_ca": f"{folder}/learner.crt",
            "num_envs": "96",
            "allow_env": "two words",
        }
        assert re.fullmatch(r"[0-9a-f]{64}\n", note["files"]["token_file"])
        assert note["variables"] == {
            "SLURM_CPUS_PER_TASK": "64",
            "SLURM_GPUS_ON_NODE": None,
            "no_grpc_proxy": "node-0-0,node-0-1",
        }
    for task in (0, 1):
        (note,) = trained(workers, task)
        assert note["argv"] == [
            *AWKWARD,
            "--config.remote.listen=0.0.0.0:22345",
            f"--config.remote.token_file={folder}/token",
            f"--config.remote.tls_cert={folder}/learner.crt",
            f"--config.remote.tls_key={folder}/learner.key",
        ]
        assert note["cpus"] == "12"
        assert note["gpus"] == "0,1,2,3"
    assert (folder / "connect").read_text() == f"{address}\n"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.glob("[clot]*")} == {0o600}
    options = RemoteConfig(
        num_envs=1,
        listen="127.0.0.1:0",
        tls_cert=str(folder / "learner.crt"),
        tls_key=str(folder / "learner.key"),
    )
    for name, known in (("node-0-0", True), ("node-0-1", True), ("node-1-0", False)):
        assert connects(options, str(folder / "learner.crt"), name=name) == known


def test_slurm_workers_are_started_again_until_the_run_is_over(workers):
    (workers / "worker-plan").write_text("[75, 137, 0]")
    process = slurm(workers, [["0 after works"] * 2])
    start_of_workers(workers, 3)
    ended = workers / "slurm-12345.remote"
    wait_for(lambda: len(list(ended.glob("worker-*"))) == 3, "end of the workers")
    (workers / "works").touch()
    assert finished(process)[0] == 0, slurm_log(workers)
    assert [len(worked(workers, worker)) for worker in range(3)] == [3] * 3
    assert not calls(workers, "scancel")


def test_slurm_workers_are_requeued_with_the_learner(workers):
    process = slurm(workers, [["42 after works"] * 2, ["0 after again"] * 2])
    start_of_workers(workers)
    (workers / "works").touch()
    start_of_workers(workers, 2)
    (workers / "again").touch()
    assert finished(process)[0] == 0, slurm_log(workers)
    assert calls(workers, "scontrol", "requeue") == [["scontrol", "requeue", "12345"]]
    assert attempts(workers) == [2, 2]
    first, second = (note["files"]["tls_ca"] for note in worked(workers, 0))
    assert first != second  # the hosts may be others


@pytest.mark.parametrize(("codes", "final"), ENDED[:2])
def test_slurm_workers_do_not_keep_a_job_alive(workers, codes, final):
    assert finished(slurm(workers, [codes]))[0] == final, slurm_log(workers)
    assert not calls(workers, "scontrol", "requeue")
    assert not calls(workers, "scancel")


def test_slurm_cancels_a_job_whose_workers_are_all_refused(workers):
    (workers / "worker-plan").write_text("[75, 2]")
    process = slurm(workers, [["until SIGTERM"] * 2])
    assert finished(process)[0] != 0
    assert calls(workers, "scancel") == [["scancel", "12345"]]
    assert not calls(workers, "scontrol", "requeue")
    assert "the learner wants none of the workers" in slurm_log(workers)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([":", "--nodes=1", "launch/slurm_workers.sh", "--num_envs=1"], "'-- COMMAND ...'"),
        (["launch/slurm_workers.sh", "--", "true"], "the job must have two components"),
    ],
)
def test_slurm_workers_reject_what_cannot_run(workers, arguments, message):
    (workers / "launch").symlink_to(LAUNCH)
    if arguments[0] != ":":  # as a script without the second component in its header
        script = (LAUNCH / "slurm_workers.sh").read_text().replace("#SBATCH hetjob", "")
        (workers / "one.sh").write_text(script.replace("#SBATCH --no-kill", ""))
        arguments = ["one.sh", *arguments[1:]]
    assert finished(launch(workers, ["sbatch", "--nodes=1", *arguments], []))[0] == 2
    assert message in slurm_log(workers)
    assert not calls(workers, "srun")


def test_slurm_workers_have_the_options_of_slurm():
    """The learner's component has those of slurm.sh, and the second one inherits its time limit."""
    headers = [
        re.findall(r"^#SBATCH (.*)", (LAUNCH / file).read_text(), re.MULTILINE)
        for file in ("slurm.sh", "slurm_workers.sh")
    ]
    alone, both = headers
    at = both.index("hetjob")
    assert both[:at] == alone
    assert both[at + 1 :] == ["--nodes=1", "--ntasks-per-node=1", "--no-kill"]


def parse(flags: list[str]) -> config_lib.Config:
    """The configuration of a learner; its launcher adds the address."""
    flags = [x.replace("configs/", f"{ROOT}/configs/", 1) for x in flags if x[:8] == "--config"]
    flags = ["sebulba", *flags, "--config.remote.listen=0.0.0.0:5000"]
    return config_lib.parse(command_line.parse_config("sebulba", {}, flags)[0])


# GKE.


@pytest.fixture(scope="module")
def manifests():
    documents = yaml.safe_load_all((LAUNCH / "workers.yaml").read_text())
    return {document["kind"]: document for document in documents}


def with_page(jobset) -> dict:
    """The JobSet with the lines that the page adds."""
    (block,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    added, changed = yaml.safe_load(block), copy.deepcopy(jobset)
    pod = job_of(changed)["spec"]["template"]["spec"]
    (container,), (more,) = pod["containers"], added["containers"]
    assert container["name"] == more["name"]
    ports = container["ports"] + more.pop("ports")
    container.update(more, ports=ports)
    pod["volumes"] = added["volumes"]
    return changed


@pytest.fixture(scope="module")
def jobset():
    return with_page(yaml.safe_load((LAUNCH / "jobset.yaml").read_text()))


def worker_pod(manifests) -> dict:
    return manifests["Deployment"]["spec"]["template"]["spec"]


def worker_flags(manifests) -> dict[str, str]:
    command = worker_pod(manifests)["containers"][0]["command"]
    assert command[:3] == ["python", "-m", "podracer.worker"]
    return dict(flag.removeprefix("--").split("=") for flag in command[3:])


def test_workers_fit_kubernetes_schemas(manifests, jobset):
    assert manifests.keys() == {"Deployment", "HorizontalPodAutoscaler", "NetworkPolicy"}
    for manifest in manifests.values():
        kubernetes_validate.validate(manifest, "1.31", strict=True)
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(manifest | {"a": 1}, "1.31", strict=True)
    jsonschema.validate(jobset, JOBSET)
    kubernetes_validate.validate(job_of(jobset), "1.31", strict=True)


def test_workers_connect_to_every_host_of_the_slice(manifests, jobset):
    (replicated,) = jobset["spec"]["replicatedJobs"]
    name, hosts = jobset["metadata"]["name"], replicated["template"]["spec"]["parallelism"]
    # How JobSet names pods, in a headless Service that has its own name.
    known = [f"{name}-{replicated['name']}-0-{host}.{name}" for host in range(hosts)]
    flags = worker_flags(manifests)
    assert flags["connect"] == ",".join(f"{host}:5000" for host in known)
    (container,) = job_of(jobset)["spec"]["template"]["spec"]["containers"]
    assert "--config.remote.listen=0.0.0.0:5000" in container["command"]
    assert {"containerPort": 5000} in container["ports"]
    # The certificate that the page makes is for these names.
    (names,) = re.findall(r"names=(\$\(printf .*\))$", PAGE, re.MULTILINE)
    made = subprocess.run(["bash", "-c", f"echo {names}"], capture_output=True, text=True).stdout
    assert made.strip() == "".join(f"DNS:{host}," for host in known)


def test_workers_and_learner_have_the_same_secrets(manifests, jobset):
    pod, learner = worker_pod(manifests), job_of(jobset)["spec"]["template"]["spec"]
    (worker,), (trainer,) = pod["containers"], learner["containers"]
    assert worker["env"] == trainer["env"]
    assert worker["env"][0]["name"] == access.TOKEN
    commands = [shlex.split(line) for line in re.findall(r"kubectl create (.*)", PAGE)]
    assert commands == [
        ["secret", "generic", "podracer-token", "--from-file=token"],
        ["secret", "tls", "podracer-tls", "--cert=learner.crt", "--key=learner.key"],
        ["configmap", "podracer-certificate", "--from-file=learner.crt"],
    ]
    reference = {"secretKeyRef": {"name": "podracer-token", "key": "token"}}
    assert worker["env"][0]["valueFrom"] == reference
    # Workers see the certificate without its key.
    assert pod["volumes"] == [
        {"name": "certificate", "configMap": {"name": "podracer-certificate"}}
    ]
    (mount,) = worker["volumeMounts"]
    assert worker_flags(manifests)["tls_ca"] == f"{mount['mountPath']}/learner.crt"
    assert learner["volumes"] == [{"name": "tls", "secret": {"secretName": "podracer-tls"}}]
    (mount,) = trainer["volumeMounts"]
    folder = mount["mountPath"]
    assert f"--config.remote.tls_cert={folder}/tls.crt" in trainer["command"]
    assert f"--config.remote.tls_key={folder}/tls.key" in trainer["command"]


def test_workers_run_on_their_own_spot_nodes(manifests):
    pod = worker_pod(manifests)
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-nodepool": "workers",
        "cloud.google.com/gke-spot": "true",
    }
    assert pod["automountServiceAccountToken"] is False
    assert pod["terminationGracePeriodSeconds"] == 5
    (toleration,) = pod["tolerations"]
    (pool,) = (
        line.split()
        for line in PAGE.replace("\\\n", " ").splitlines()
        if "node-pools create workers" in line
    )
    taint = f"--node-taints={toleration['key']}=true:{toleration['effect']}"
    assert {"--spot", "--enable-autoscaling", "--min-nodes=0", "--num-nodes=0", taint} <= set(pool)
    cores = int(next(x for x in pool if x.startswith("--machine-type=")).rpartition("-")[2])
    (worker,) = pod["containers"]
    requests = worker["resources"]["requests"]
    assert cores / 2 < requests["cpu"] < cores  # one worker per node, beside the system's pods
    assert worker["resources"]["limits"] == {"memory": requests["memory"]}
    most = manifests["HorizontalPodAutoscaler"]["spec"]["maxReplicas"]
    assert f"--max-nodes={most}" in pool


def test_workers_are_as_many_as_the_learner_has_places(manifests, jobset):
    scaler = manifests["HorizontalPodAutoscaler"]["spec"]
    deployment = manifests["Deployment"]
    assert "replicas" not in deployment["spec"]  # applying it would undo the scaling
    assert scaler["scaleTargetRef"] == {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "name": deployment["metadata"]["name"],
    }
    (metric,) = scaler["metrics"]
    assert metric["resource"] == {
        "name": "cpu",
        "target": {"type": "Utilization", "averageUtilization": 70},
    }
    (trainer,) = job_of(jobset)["spec"]["template"]["spec"]["containers"]
    assert trainer["command"][:3] == ["python", "-m", "podracer.sebulba"]
    config = parse(trainer["command"][3:])
    each = int(worker_flags(manifests)["num_envs"])
    assert scaler["maxReplicas"] * each == config.remote.num_envs
    # On each of four hosts, one chip acts with two threads and three learn.
    threads = config.sebulba.threads
    make_sizes(config, 4 * config.sebulba.learners_per_actor, threads)
    places = config.remote.num_envs // 4
    assert places % (threads * config.sebulba.learners_per_actor) == 0
    assert places // threads % each == 0


def test_only_workers_reach_the_learner(manifests, jobset):
    policy = manifests["NetworkPolicy"]["spec"]
    slice_ = {"jobset.sigs.k8s.io/jobset-name": jobset["metadata"]["name"]}
    labels = manifests["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert manifests["Deployment"]["spec"]["selector"] == {"matchLabels": labels}
    assert policy == {
        "podSelector": {"matchLabels": slice_},
        "policyTypes": ["Ingress"],
        "ingress": [
            {"from": [{"podSelector": {"matchLabels": slice_}}]},  # the hosts, at all ports
            {
                "from": [{"podSelector": {"matchLabels": labels}}],
                "ports": [{"protocol": "TCP", "port": 5000}],
            },
        ],
    }


# The page.


def connects(
    options: RemoteConfig, authority: str, certificate: str = "", key: str = "", *, name: str
) -> bool:
    """Whether a worker with these files reaches a server with these options under this name."""
    echo = grpc.unary_unary_rpc_method_handler(lambda request, _: request)
    handler = grpc.method_handlers_generic_handler("test", {"echo": echo})
    server = grpc.server(ThreadPoolExecutor(1), handlers=[handler])
    port = server.add_secure_port("127.0.0.1:0", access.server_credentials(options))
    server.start()
    credentials = access.channel_credentials(authority, certificate, key)
    renamed = [("grpc.ssl_target_name_override", name)]
    try:
        with grpc.secure_channel(f"127.0.0.1:{port}", credentials, renamed) as channel:
            return channel.unary_unary("/test/echo")(b"x", timeout=20) == b"x"
    except grpc.RpcError:
        return False
    finally:
        server.stop(None).wait()


def indented(word: str) -> list[str]:
    """The page's commands that begin with a word, with their continuation lines."""
    lines = re.sub(r"\\\n\s*", "", PAGE).splitlines()
    return [line.strip() for line in lines if re.match(rf" {{4,}}{word} ", line)]


def test_page_makes_certificates_that_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    commands = indented("openssl")[:3]
    assert ["learner.crt" in x for x in commands] == [True, False, False]
    for command in commands:
        subprocess.run(["bash", "-c", command], check=True, capture_output=True)
    assert len(pathlib.Path("token").read_text().strip()) == 64
    flags = {"tls_cert": "learner.crt", "tls_key": "learner.key", "token_file": "token"}
    asking = flags | {"tls_clients": "worker.crt"}
    for name, value in asking.items():
        assert f"--config.remote.{name}={value}" in PAGE
    for flag in ("--tls_ca=learner.crt", "--tls_cert=worker.crt", "--tls_key=worker.key"):
        assert flag in PAGE
    listen = {"num_envs": 1, "listen": "0.0.0.0:5000"}
    plain, mutual = RemoteConfig(**listen, **flags), RemoteConfig(**listen, **asking)
    access.check_server(plain, access.read_token("token"))
    assert connects(plain, "learner.crt", name="learner-host")
    assert not connects(plain, "learner.crt", name="another-host")
    assert not connects(plain, "worker.crt", name="learner-host")
    assert connects(mutual, "learner.crt", "worker.crt", "worker.key", name="learner-host")
    assert not connects(mutual, "learner.crt", name="learner-host")
    assert not connects(mutual, "learner.crt", "learner.crt", "learner.key", name="learner-host")


def test_page_names_files_that_exist():
    files = set(re.findall(r"\b(?:launch|tests|configs)/[\w./]+\w", PAGE))
    assert files >= {"launch/workers.yaml", "launch/slurm_workers.sh", "launch/tpu_workers.sh"}
    assert [file for file in files if not (ROOT / file).is_file()] == []


def split_at(words: list[str], separator: str) -> list[list[str]]:
    groups = itertools.groupby(words, lambda word: word == separator)
    return [list(group) for is_separator, group in groups if not is_separator]


def test_page_shows_options_that_exist():
    (run, resize) = (shlex.split(re.sub(r"&&\s+", "&& ", x)) for x in whole("tpu_workers.sh"))
    mine, slice_, learner, trainer = split_at(run, "--")
    assert mine[1] == "run"
    assert resize[1] == "resize"
    names = [{word.partition("=")[0] for word in x if word[:2] == "--"} for x in (mine, resize)]
    assert set.union(*names) <= tpu_workers_options()
    assert slice_[0] == "launch/tpu_vm.sh"
    assert {x.partition("=")[0] for x in slice_[1:]} <= test_launch.tpu_vm_options()
    assert "--create_flag=--tags=football-learner" in slice_
    assert learner == ["launch/tpu_workers.sh", "learner", "--name=football"]
    assert trainer[:3] == ["python", "-m", "podracer.sebulba"]
    size, each = (int(flag.partition("=")[2]) for flag in (mine[4], "=64"))
    assert parse(trainer[3:]).remote.num_envs == size * each
    (submit, more) = (shlex.split(command) for command in indented("sbatch"))
    at = submit.index("launch/slurm_workers.sh")
    (nodes,) = (x.partition("=")[2] for x in submit[submit.index(":") : at] if "--nodes" in x)
    each = submit[at + 1].removeprefix("--num_envs=")
    assert parse(submit[at + 6 :]).remote.num_envs == int(nodes) * int(each)
    assert submit[at + 2 : at + 6] == ["--", "python", "-m", "podracer.sebulba"]
    assert "--connect=$(cat slurm-7.remote/connect)" in more[-1]


def whole(script: str) -> list[str]:
    """The page's commands that call a script, each over all of its lines."""
    text = re.sub(r"\\\n\s*", "", PAGE)
    found = re.findall(rf"^    launch/{script} .*(?:\n +.*)*", text, re.MULTILINE)
    return found + re.findall(rf"`(launch/{script} resize .*?)`", text)


@pytest.mark.parametrize("page", ["gke", "slurm", "tpu-vm", "workers"])
def test_pages_lead_to_each_other(page):
    text = (ROOT / f"docs/launch-{page}.md").read_text()
    others = ["gke", "slurm", "tpu-vm"] if page == "workers" else ["workers"]
    assert all(f"(launch-{other}.md" in text for other in others)
