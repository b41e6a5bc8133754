"""Stands in for Google Cloud and SLURM: the tools on PATH that the launchers call.

``python -S fake_cloud.py TOOL ARGUMENT ...`` records the call and simulates the tool; workers and
tasks are real processes. All state is in the folder ``$CLOUD``:

  calls                    one JSON list per call
  bucket/                  the objects of gs://bucket
  slices/NAME/             a slice: state, description, scripts, and a folder for each worker
  creates                  JSON list of what the next requests for a slice do, see ``create``
  failing-deletions        how many of the next deletions fail
  no-permission            exists if workers may not use the bucket
  slow-kill                exists if a worker's kill returns only after the trainer has ended
  time-limit, scancel      created by a test to let the SLURM job reach --signal, or be cancelled
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
    "compute tpus queued-resources create": "accelerator-type description metadata-from-file "
    "node-id project quiet runtime-version service-account spot zone",
    "compute tpus queued-resources delete": "async force project quiet zone",
    "compute tpus queued-resources describe": "format project zone",
    "compute tpus tpu-vm ssh": "command internal-ip project quiet worker zone",
    "alpha compute tpus tpu-vm ssh": "command project quiet tunnel-through-iap worker zone",
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
    environment = os.environ | {"PODRACER_HOME": str(home), "TPU_WORKER_ID": home.name[7:]}
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


def delete(slice_: pathlib.Path) -> int:
    failing = CLOUD / "failing-deletions"
    left = int(failing.read_text()) if failing.exists() else 0
    if left:
        failing.write_text(str(left - 1))
        return fail("ERROR: (gcloud...delete) UNAVAILABLE: try again later")
    # In a session of its own, because a worker that deletes its slice ends with it.
    command = [sys.executable, "-S", __file__, "remove", slice_.name]
    return subprocess.run(command, check=False, start_new_session=True).returncode


def remove(arguments: list[str]) -> int:
    slice_ = CLOUD / "slices" / arguments[0]
    for home in slice_.glob("worker-*"):
        signal_worker(home, signal.SIGKILL)
    shutil.rmtree(slice_)
    return 0


def queued_resources(verb: str, name: str, arguments: list[str]) -> int:
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
    if group == "storage":
        return storage(verb, arguments)
    if group == "queued-resources":
        return queued_resources(verb, arguments[0], arguments[1:])
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
    "cpus-per-task", "gpus-per-node", "job-name", "nodes", "ntasks-per-node", "open-mode", "output",
    "requeue", "signal", "time",
}  # fmt: skip


def read_options(arguments: list[str]) -> dict[str, str]:
    options = {}
    for argument in arguments:
        name, _, options[name] = argument.removeprefix("--").partition("=")
    return options


def sbatch(arguments: list[str]) -> int:
    """Runs a batch job to its end, over all times that it is requeued; returns its exit code."""
    at = next(i for i, argument in enumerate(arguments) if not argument.startswith("-"))
    header = re.findall(r"^#SBATCH (\S+)", pathlib.Path(arguments[at]).read_text(), re.MULTILINE)
    options = read_options(header) | read_options(arguments[:at])
    assert options.keys() <= SBATCH_OPTIONS, options
    job = os.environ.get("JOB", "7")
    tasks = int(options.get("nodes", 1)) * int(options.get("ntasks-per-node", 1))
    variables = {"SLURM_JOB_ID": job, "SLURM_NTASKS": str(tasks)}
    for option, variable in (
        ("cpus-per-task", "SLURM_CPUS_PER_TASK"),
        ("gpus-per-node", "SLURM_GPUS_ON_NODE"),
    ):
        if option in options:
            variables[variable] = options[option]
    requeue, output = CLOUD / "requeue", options["output"].replace("%j", job)
    assert options["open-mode"] == "append"
    for restarts in itertools.count():
        if restarts:
            variables["SLURM_RESTART_COUNT"] = str(restarts)
        requeue.unlink(missing_ok=True)
        (CLOUD / "steps").unlink(missing_ok=True)
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


def srun(arguments: list[str]) -> int:
    """Runs one task per node; returns the largest exit code. As since SLURM 22.05, tasks have one
    CPU unless srun itself is told otherwise; as on many clusters (KillOnBadExit), a task that fails
    ends the others unless srun is told otherwise."""
    at = next(i for i, argument in enumerate(arguments) if not argument.startswith("-"))
    options = read_options(arguments[:at])
    cpus = options.get("cpus-per-task") or os.environ.get("SRUN_CPUS_PER_TASK") or "1"
    tasks = [
        subprocess.Popen(
            arguments[at:],
            env=os.environ
            | {
                "SLURM_CPUS_PER_TASK": cpus,
                "SLURM_PROCID": str(task),
                "SLURM_LOCALID": "0",
                "SLURM_STEP_NODELIST": "localhost",
            },
            start_new_session=True,
        )
        for task in range(int(os.environ["SLURM_NTASKS"]))
    ]
    (CLOUD / "steps.part").write_text(json.dumps([task.pid for task in tasks]))
    (CLOUD / "steps.part").rename(CLOUD / "steps")
    while any(task.poll() is None for task in tasks):
        if any(task.poll() for task in tasks):
            for task in tasks:
                if options.get("kill-on-bad-exit") != "0":
                    kill_group(task.pid, signal.SIGKILL)
            (CLOUD / "failed").touch()
        time.sleep(0.02)
    return max(task.returncode % 256 for task in tasks)


def scontrol(arguments: list[str]) -> int:
    assert arguments[0] == "requeue"
    (CLOUD / "requeue").touch()
    return 0


TOOLS = [gcloud, curl, python3, sbatch, srun, scontrol]
EVENTS = [preempt, reboot, remove]  # what happens to a slice without a call by the launchers


def main(tool: str, arguments: list[str]) -> int:
    with open(CLOUD / "calls", "a") as calls:
        calls.write(json.dumps([tool, *arguments]) + "\n")
    return {function.__name__: function for function in TOOLS + EVENTS}[tool](arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
