"""Stands in for Google Cloud and SLURM: the tools on PATH that the launchers call.

``python -S fake_cloud.py TOOL ARGUMENT ...`` records the call and simulates the tool; workers and
tasks are real processes. All state is in the folder ``$CLOUD``:

  calls                    one JSON list per call
  bucket/                  the objects of gs://bucket
  slices/NAME/             a slice: state, description, scripts, and a folder for each worker
  creates                  JSON list of what the next requests for a slice do, see ``create``
  failing-deletions        how many of the next deletions fail
  no-permission            exists if workers may not use the bucket
  resources/KIND/NAME      what was created otherwise: a secret's data, or the flags
  refused                  JSON list of commands that fail, such as "secrets create"
  addresses                of the hosts of the slice, as gcloud prints them
  slow-kill                exists if a worker's kill returns only after the trainer has ended
  time-limit, scancel      created to let the SLURM job reach --signal, or be cancelled
"""

import contextlib
import glob
import itertools
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

CLOUD = pathlib.Path(os.environ["CLOUD"])
WORKER_HOME = "/var/lib/podracer"  # on a real worker
GCLOUD_FLAGS = {
    "compute firewall-rules create": "action direction network priority project rules "
    "source-ranges source-tags target-tags",
    "compute firewall-rules delete": "project quiet",
    "compute firewall-rules list": "format project quiet",
    "compute instance-groups managed create": "project size template zone",
    "compute instance-groups managed delete": "project quiet zone",
    "compute instance-groups managed list": "format project quiet zones",
    "compute instance-groups managed resize": "project size zone",
    "compute instance-templates create": "image-family image-project instance-termination-action "
    "machine-type metadata-from-file network no-address project provisioning-model scopes "
    "service-account tags",
    "compute instance-templates delete": "project quiet",
    "compute instance-templates list": "format project quiet",
    "compute tpus queued-resources create": "accelerator-type description metadata-from-file "
    "node-id project quiet runtime-version service-account spot zone",
    "compute tpus queued-resources delete": "async force project quiet zone",
    "compute tpus queued-resources describe": "format project zone",
    "compute tpus tpu-vm describe": "format project zone",
    "compute tpus tpu-vm ssh": "command internal-ip project quiet worker zone",
    "alpha compute tpus tpu-vm ssh": "command project quiet tunnel-through-iap worker zone",
    "secrets add-iam-policy-binding": "member project role",
    "secrets create": "data-file project replication-policy",
    "secrets delete": "project quiet",
    "secrets list": "format project quiet",
    "secrets versions access": "out-file project secret",
    "storage cat": "",
    "storage cp": "no-clobber quiet",
    "storage ls": "",
}
FORMATS = {
    "value(state.state)": "state",
    "value(tpu.nodeSpec[0].node.description)": "description",
}


def flag(arguments: list[str], name: str) -> str | None:
    return next((a.partition("=")[2] for a in arguments if a.startswith(f"--{name}=")), None)


def local(place: str) -> str:
    return str(CLOUD / place.removeprefix("gs://"))


def fail(message: str, code: int = 1) -> int:
    print(message, file=sys.stderr, flush=True)
    return code


def kill_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


# Google's side: slices.


def signal_worker(home: pathlib.Path, number: int) -> None:
    kill_group(int((home / "group").read_text()), number)


def boot(home: pathlib.Path) -> None:
    """Starts a worker: its start-up script, in a process group of its own."""
    environment = os.environ | {
        "PODRACER_HOME": str(home),
        "PODRACER_HOSTS": str(home / "etc-hosts"),
        "TPU_WORKER_ID": home.name[7:],
    }
    if (CLOUD / "slow-kill").exists():
        environment["BASH_FUNC_kill%%"] = '() { builtin kill "$@" && sleep 0.3; }'
    process = subprocess.Popen(
        ["bash", home.parent / "startup-script"],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    (home / "group").write_text(str(process.pid))


def shut_down(homes: list[pathlib.Path]) -> None:
    """Runs the shutdown script of these workers, all at once, and then ends them."""
    scripts = [
        subprocess.Popen(
            ["bash", home.parent / "shutdown-script"],
            env=os.environ | {"PODRACER_HOME": str(home)},
        )
        for home in homes
    ]
    for script in scripts:
        script.wait(timeout=30)
    for home in homes:
        signal_worker(home, signal.SIGKILL)


def preempt(arguments: list[str]) -> int:
    slice_ = CLOUD / "slices" / arguments[0]
    shut_down(list(slice_.glob("worker-*")))
    (slice_ / "state").write_text("SUSPENDED")
    return 0


def reboot(arguments: list[str]) -> int:
    """Reboots worker 1, after its shutdown script, or with a new boot disk, or neither."""
    home = CLOUD / "slices" / arguments[0] / "worker-1"
    if "graceful" in arguments:
        shut_down([home])
    signal_worker(home, signal.SIGKILL)
    if "new-disk" in arguments:
        for path in home.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    boot(home)
    return 0


def make_slice(slice_: pathlib.Path, arguments: list[str], state: str = "ACTIVE") -> int:
    slice_.mkdir()
    for item in flag(arguments, "metadata-from-file").split(","):
        key, _, path = item.partition("=")
        shutil.copy(path, slice_ / key)
    (slice_ / "description").write_text(flag(arguments, "description") or "")
    if state == "ACTIVE":
        for worker in range(int(os.environ["WORKERS"])):
            home = slice_ / f"worker-{worker}"
            home.mkdir()
            boot(home)
    (slice_ / "state").write_text(state)
    return 0


def create(slice_: pathlib.Path, arguments: list[str]) -> int:
    """Handles a request as the first entry of ``creates`` says, which is removed."""
    plan = CLOUD / "creates"
    outcome, *rest = json.loads(plan.read_text()) if plan.exists() else ["works"]
    plan.write_text(json.dumps(rest or ["works"]))
    if outcome == "rejected":
        return fail("ERROR: (gcloud...create) RESOURCE_EXHAUSTED: no quota")
    if outcome == "no answer":
        time.sleep(60)
    if outcome == "taken by another":
        slice_.mkdir()
        (slice_ / "state").write_text("WAITING_FOR_RESOURCES")
        (slice_ / "description").write_text("gs://bucket/another/run")
    if slice_.exists():
        return fail("ERROR: (gcloud...create) ALREADY_EXISTS: Resource already exists")
    if outcome == "FAILED":
        return make_slice(slice_, arguments, "FAILED")
    make_slice(slice_, arguments)
    if outcome == "created, answer lost":
        return fail("ERROR: (gcloud...create) The read operation timed out")
    if outcome == "created, no answer":
        time.sleep(60)
    assert outcome in ("works", "created, answer lost"), outcome
    return 0


def deletion_fails() -> bool:
    failing = CLOUD / "failing-deletions"
    left = int(failing.read_text()) if failing.exists() else 0
    if left:
        failing.write_text(str(left - 1))
        fail("ERROR: (gcloud...delete) UNAVAILABLE: try again later")
    return left > 0


def delete(slice_: pathlib.Path) -> int:
    if deletion_fails():
        return 1
    # In a session of its own, because a worker that deletes its slice ends with it.
    command = [sys.executable, "-S", __file__, "remove", slice_.name]
    return subprocess.run(command, check=False, start_new_session=True).returncode


def remove(arguments: list[str]) -> int:
    slice_ = CLOUD / "slices" / arguments[0]
    for home in slice_.glob("worker-*"):
        signal_worker(home, signal.SIGKILL)
    shutil.rmtree(slice_)
    return 0


def queued_resources(verb: str, arguments: list[str]) -> int:
    name, *arguments = arguments
    slice_ = CLOUD / "slices" / name
    slice_.parent.mkdir(exist_ok=True)
    if verb == "create":
        return create(slice_, arguments)
    if not slice_.exists():
        return fail(f"ERROR: (gcloud...{verb}) NOT_FOUND: Resource '{name}' was not found")
    if verb == "delete":
        return delete(slice_)
    file = FORMATS.get(flag(arguments, "format"))
    print((slice_ / file).read_text() if file else "failedData=no capacity;state=FAILED")
    return 0


# Google's side: secrets, firewall rules, and a group of machines, of which one is started.


def start_machine(group: pathlib.Path, template: str) -> None:
    home = group / "worker-0"
    home.mkdir(parents=True)
    (home / "etc-hosts").write_text("127.0.0.1 localhost\n")
    shutil.copy(CLOUD / "resources/instance-templates" / template, group / "startup-script")
    boot(home)


def make_resource(kind: str, path: pathlib.Path, arguments: list[str]) -> int:
    script = flag(arguments, "metadata-from-file") or ""
    source = flag(arguments, "data-file") or script.removeprefix("startup-script=")
    path.write_text(pathlib.Path(source).read_text() if source else json.dumps(arguments))
    if kind == "managed":
        start_machine(CLOUD / "slices" / path.name, flag(arguments, "template"))
    return 0


def delete_resource(kind: str, path: pathlib.Path) -> int:
    if deletion_fails():
        return 1
    if kind == "instance-templates" and (CLOUD / "resources/managed" / path.name).exists():
        return fail("ERROR: (gcloud...delete) the template is in use")
    if kind == "managed":
        remove([path.name])
    path.unlink()
    return 0


def resources(kind: str, verb: str, arguments: list[str]) -> int:
    folder = CLOUD / "resources" / kind
    folder.mkdir(parents=True, exist_ok=True)
    if verb == "list":
        print("\n".join(path.name for path in folder.iterdir()))
        return 0
    refused = CLOUD / "refused"
    if refused.exists() and f"{kind} {verb}" in json.loads(refused.read_text()):
        return fail(f"ERROR: (gcloud...{verb}) PERMISSION_DENIED")
    path = folder / arguments[0]
    if path.exists() == (verb == "create"):
        return fail(f"ERROR: (gcloud...{verb}) {path.name} exists already, or does not exist")
    if verb == "create":
        return make_resource(kind, path, arguments)
    return delete_resource(kind, path) if verb == "delete" else 0


def read_secret(arguments: list[str]) -> int:
    secret = CLOUD / "resources/secrets" / flag(arguments, "secret")
    if not secret.exists():
        return fail("ERROR: (gcloud.secrets.versions.access) NOT_FOUND")
    shutil.copy(secret, flag(arguments, "out-file"))
    return 0


def describe_slice() -> int:
    addresses = CLOUD / "addresses"
    if not addresses.exists():
        return fail("ERROR: (gcloud.compute.tpus.tpu-vm.describe) NOT_FOUND")
    print(addresses.read_text())
    return 0


# Google's side: the bucket and the metadata server.


def copy(source: str, target: pathlib.Path, *, clobber: bool) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{os.getpid()}")
    part.write_bytes(pathlib.Path(local(source)).read_bytes())
    if clobber:
        part.rename(target)  # an object appears whole
    else:
        with contextlib.suppress(FileExistsError):
            os.link(part, target)
        part.unlink()


def storage(verb: str, arguments: list[str]) -> int:
    if (CLOUD / "no-permission").exists() and "TPU_WORKER_ID" in os.environ:
        return fail("ERROR: (gcloud.storage) 403")
    *sources, last = [place for place in arguments if not place.startswith("--")]
    if verb == "cp":
        target = pathlib.Path(local(last)) if last.startswith("gs://") else pathlib.Path(last)
        copy(sources[0], target, clobber="--no-clobber" not in arguments)
        return 0
    found = [p for p in sorted(glob.glob(local(last), recursive=True)) if os.path.isfile(p)]
    for path in found:
        name = f"gs://{pathlib.Path(path).relative_to(CLOUD)}\n"
        print(name if verb == "ls" else pathlib.Path(path).read_text(), end="", flush=True)
    return 0 if found else fail("ERROR: (gcloud.storage) matched no objects")


def gcloud(arguments: list[str]) -> int:
    line = " ".join(arguments)
    command = next((c for c in GCLOUD_FLAGS if line.startswith(f"{c} ")), None)
    if command is None:
        return fail(f"ERROR: (gcloud) Invalid choice: {line}", 2)
    arguments = arguments[len(command.split()) :]
    known = GCLOUD_FLAGS[command].split()
    for argument in arguments:
        if argument.startswith("--") and argument[2:].partition("=")[0] not in known:
            return fail(f"ERROR: (gcloud) unrecognized arguments: {argument}", 2)
    *_, group, verb = command.split()
    if group in ("storage", "queued-resources"):
        return {"storage": storage, "queued-resources": queued_resources}[group](verb, arguments)
    if group == "tpu-vm":
        return ssh(arguments) if verb == "ssh" else describe_slice()
    return read_secret(arguments) if group == "versions" else resources(group, verb, arguments)


def ssh(arguments: list[str]) -> int:
    home = CLOUD / "slices" / arguments[0] / f"worker-{flag(arguments, 'worker')}"
    if not home.exists():
        return fail("ERROR: (gcloud) no such worker", 255)
    shell = flag(arguments, "command").replace(WORKER_HOME, str(home))
    connection = subprocess.Popen(["bash", "-c", shell], stderr=subprocess.DEVNULL)
    while connection.poll() is None and home.exists():
        time.sleep(0.05)
    connection.kill()
    return 255


def curl(arguments: list[str]) -> int:
    assert "Metadata-Flavor: Google" in arguments
    key = re.fullmatch(
        r"http://metadata.google.internal/.*/instance/attributes/(.*)", arguments[-1]
    )
    hosts = ",".join(f"host-{worker}" for worker in range(int(os.environ["WORKERS"])))
    known = {
        "agent-worker-number": os.environ["TPU_WORKER_ID"],
        "worker-network-endpoints": hosts,
    }
    print(known[key.group(1)], end="")
    return 0


def python3(arguments: list[str]) -> int:
    """The Python of a new worker, which can only install."""
    if arguments[:3] == ["-m", "uv", "venv"]:
        folder = pathlib.Path(".venv/bin")
        folder.mkdir(parents=True)
        (folder / "python").symlink_to(sys.executable)
    return 0


# SLURM.

SBATCH_OPTIONS = {
    "cpus-per-task", "gpus-per-node", "job-name", "no-kill", "nodes", "ntasks-per-node",
    "open-mode", "output", "requeue", "signal", "time",
}  # fmt: skip


def read_options(arguments: list[str]) -> dict[str, str]:
    options = {}
    for argument in arguments:
        name, _, options[name] = argument.removeprefix("--").partition("=")
    assert options.keys() <= SBATCH_OPTIONS | SRUN_OPTIONS, options
    return options


def split(words: list[str], separator: str) -> list[list[str]]:
    """The components of a heterogeneous job; one if there is no separator."""
    found = [[]]
    for word in words:
        if word == separator:
            found.append([])
        else:
            found[-1].append(word)
    return found


def job_variables(job: str, components: list[dict[str, str]]) -> dict[str, str]:
    """Of the batch script, as SLURM 22.05 sets them. In a heterogeneous job those that describe the
    tasks are missing."""
    first, *others = components
    tasks = int(first.get("nodes", 1)) * int(first.get("ntasks-per-node", 1))
    variables = {"SLURM_JOB_ID": job}
    if "gpus-per-node" in first:
        variables["SLURM_GPUS_ON_NODE"] = first["gpus-per-node"]
    if not others:
        if "cpus-per-task" in first:
            variables["SLURM_CPUS_PER_TASK"] = first["cpus-per-task"]
        return variables | {"SLURM_NTASKS": str(tasks)}
    variables["SLURM_HET_SIZE"] = str(len(components))
    for number, component in enumerate(components):
        nodes, cpus = component["nodes"], component.get("cpus-per-task", "1")
        cpus += f"(x{nodes})" if int(nodes) > 1 else ""
        names = [f"node-{number}-{node}" for node in range(int(nodes))]
        variables |= {
            f"SLURM_JOB_NODELIST_HET_GROUP_{number}": ",".join(names),
            f"SLURM_JOB_NUM_NODES_HET_GROUP_{number}": nodes,
            f"SLURM_JOB_CPUS_PER_NODE_HET_GROUP_{number}": cpus,
        }
    return variables


def sbatch(arguments: list[str]) -> int:
    """Runs a batch job to its end, over all times that it is requeued; returns its exit code."""
    at = next(i for i, word in enumerate(arguments) if not word.startswith("-") and word != ":")
    header = re.findall(r"^#SBATCH (\S+)", pathlib.Path(arguments[at]).read_text(), re.MULTILINE)
    components = [
        read_options(words) | read_options(given)
        for words, given in itertools.zip_longest(
            split(header, "hetjob"), split(arguments[:at], ":"), fillvalue=[]
        )
    ]
    options = components[0]
    job = os.environ.get("JOB", "7")
    variables = job_variables(job, components)
    requeue, output = CLOUD / "requeue", options["output"].replace("%j", job)
    assert options["open-mode"] == "append"
    for restarts in itertools.count():
        if restarts:
            variables["SLURM_RESTART_COUNT"] = str(restarts)
        requeue.unlink(missing_ok=True)
        for steps in CLOUD.glob("steps*"):
            steps.unlink()
        with open(output, "a") as log:
            process = subprocess.Popen(
                ["bash", *arguments[at:]],
                env=os.environ | variables,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            (CLOUD / "job").write_text(json.dumps([process.pid]))
            while process.poll() is None:
                send_signals(process.pid, options)
                time.sleep(0.02)
        for steps in CLOUD.glob("steps*"):  # what is still running ends with the job
            for group in json.loads(steps.read_text()):
                kill_group(group, signal.SIGKILL)
        if not requeue.exists() or "requeue" not in options:
            return process.returncode
    raise AssertionError


def send_signals(job: int, options: dict[str, str]) -> None:
    steps = json.loads((CLOUD / "steps").read_text()) if (CLOUD / "steps").exists() else []
    if steps and (CLOUD / "time-limit").exists():
        (CLOUD / "time-limit").unlink()
        what, _, _ = options["signal"].partition("@")
        batch_only, _, name = what.rpartition(":")
        for group in [job] if batch_only == "B" else steps:
            kill_group(group, signal.Signals[f"SIG{name}"])
    if steps and (CLOUD / "scancel").exists():
        (CLOUD / "scancel").unlink()
        for group in [*steps, job]:
            kill_group(group, signal.SIGTERM)


SRUN_OPTIONS = {
    "cpus-per-task", "het-group", "kill-on-bad-exit", "no-kill", "nodes", "ntasks",
    "ntasks-per-node",
}  # fmt: skip


def srun(arguments: list[str]) -> int:
    """Runs one task per node; returns the largest exit code. As since SLURM 22.05, tasks have one
    CPU unless srun itself is told otherwise; as on many clusters (KillOnBadExit), a task that fails
    ends the others unless srun is told otherwise."""
    at = next(i for i, argument in enumerate(arguments) if not argument.startswith("-"))
    options = read_options(arguments[:at])
    cpus = options.get("cpus-per-task") or os.environ.get("SRUN_CPUS_PER_TASK") or "1"
    number = options.get("ntasks") or os.environ["SLURM_NTASKS"]
    component = options.get("het-group", "0")
    tasks = [
        subprocess.Popen(
            arguments[at:],
            env=os.environ
            | {
                "SLURM_CPUS_PER_TASK": cpus,
                "SLURM_NTASKS": number,
                "SLURM_PROCID": str(task),
                "SLURM_LOCALID": "0",
                "SLURM_STEP_NODELIST": "localhost",
            },
            start_new_session=True,
        )
        for task in range(int(number))
    ]
    steps = CLOUD / ("steps" if component == "0" else f"steps-{component}")
    part = CLOUD / f"part-{component}"
    part.write_text(json.dumps([task.pid for task in tasks]))
    part.rename(steps)
    while any(task.poll() is None for task in tasks):
        if any(task.poll() for task in tasks):
            for task in tasks:
                if options.get("kill-on-bad-exit") != "0":
                    kill_group(task.pid, signal.SIGKILL)
            (CLOUD / "failed").touch()
        time.sleep(0.02)
    return max(task.returncode % 256 for task in tasks)


def scontrol(arguments: list[str]) -> int:
    if arguments[:2] == ["show", "hostnames"]:
        print(arguments[2].replace(",", "\n"))
        return 0
    assert arguments[0] == "requeue"
    (CLOUD / "requeue").touch()
    return 0


def scancel(arguments: list[str]) -> int:
    (CLOUD / "scancel").touch()
    return 0


TOOLS = [gcloud, curl, python3, sbatch, srun, scontrol, scancel]
EVENTS = [preempt, reboot, remove]  # what happens to a slice without a call by the launchers


def main(tool: str, arguments: list[str]) -> int:
    with open(CLOUD / "calls", "a") as calls:
        calls.write(json.dumps([tool, *arguments]) + "\n")
    return {function.__name__: function for function in TOOLS + EVENTS}[tool](arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
