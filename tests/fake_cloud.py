"""Stands in for gcloud, curl, srun and scontrol on PATH: records each call, runs workers for real.

``python -S fake_cloud.py TOOL ARGUMENT ...``; all it knows lies in the folder ``$CLOUD``:
``calls`` (a JSON list a line), ``bucket/`` (gs://bucket) and ``slices/NAME/``.
"""

import contextlib
import glob
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys

CLOUD = pathlib.Path(os.environ["CLOUD"])
HOME = "/var/lib/podracer"  # a worker's folder, as the launcher knows it


def flag(arguments: list[str], name: str) -> str | None:
    return next((a.partition("=")[2] for a in arguments if a.startswith(f"--{name}=")), None)


def local(place: str) -> str:
    return str(CLOUD / place.removeprefix("gs://"))


def signal_workers(slice_: pathlib.Path, number: int) -> None:
    for group in slice_.glob("worker-*/group"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(group.read_text()), number)


def create(slice_: pathlib.Path, arguments: list[str]) -> int:
    """Boots the workers: each runs the start-up script in a process group of its own."""
    slice_.mkdir(parents=True)
    for item in flag(arguments, "metadata-from-file").split(","):
        key, _, path = item.partition("=")
        shutil.copy(path, slice_ / key)
    for worker in range(int(os.environ["WORKERS"])):
        home = slice_ / f"worker-{worker}"
        home.mkdir()
        process = subprocess.Popen(
            ["bash", slice_ / "startup-script"],
            env=os.environ | {"PODRACER_HOME": str(home), "TPU_WORKER_ID": str(worker)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        (home / "group").write_text(str(process.pid))
    (slice_ / "state").write_text("ACTIVE")
    return 0


def preempt(slice_: pathlib.Path) -> None:
    """What Compute Engine does: the shut-down script, then the end."""
    scripts = [
        subprocess.Popen(
            ["bash", slice_ / "shutdown-script"], env=os.environ | {"PODRACER_HOME": str(home)}
        )
        for home in slice_.glob("worker-*")
    ]
    for script in scripts:
        script.wait(timeout=30)
    signal_workers(slice_, signal.SIGKILL)
    (slice_ / "state").write_text("SUSPENDED")


def queued_resources(arguments: list[str]) -> int:
    verb, name = arguments[:2]
    slice_ = CLOUD / "slices" / name
    if verb == "create":
        return create(slice_, arguments)
    if not slice_.exists():
        print(f"NOT_FOUND: {name}", file=sys.stderr)
        return 1
    if verb == "describe":
        print((slice_ / "state").read_text())
        return 0
    assert verb == "delete", verb
    if (CLOUD / "cannot-delete").exists():
        return 1
    signal_workers(slice_, signal.SIGKILL)
    shutil.rmtree(slice_)
    return 0


def storage(verb: str, *places: str) -> int:
    if (CLOUD / "no-permission").exists() and "TPU_WORKER_ID" in os.environ:
        return 1
    *places, last = [place for place in places if place != "--quiet"]
    if verb == "cp":
        data = sys.stdin.buffer.read() if places == ["-"] else None
        target = pathlib.Path(local(last)) if last.startswith("gs://") else pathlib.Path(last)
        target.parent.mkdir(parents=True, exist_ok=True)
        if data is None:
            data = pathlib.Path(local(places[0])).read_bytes()
        target.with_name(target.name + ".part").write_bytes(data)
        target.with_name(target.name + ".part").rename(target)  # an object appears whole
        return 0
    found = sorted(glob.glob(local(last)))
    for path in found:
        print(path if verb == "ls" else pathlib.Path(path).read_text(), end="", flush=True)
    return 0 if found else 1


def gcloud(arguments: list[str]) -> int:
    if arguments[:1] == ["storage"]:
        return storage(*arguments[1:])
    assert arguments[:2] == ["compute", "tpus"], arguments
    if arguments[2] == "queued-resources":
        return queued_resources(arguments[3:])
    assert arguments[2:4] == ["tpu-vm", "ssh"], arguments
    home = CLOUD / "slices" / arguments[4] / f"worker-{flag(arguments, 'worker')}"
    if not home.exists():
        return 255
    command = flag(arguments, "command").replace(HOME, str(home))
    return subprocess.call(["bash", "-c", command], stderr=subprocess.DEVNULL)


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


def srun(arguments: list[str]) -> int:
    """One task a node; the step's exit code is the largest, as srun's is. SIGTERM goes to all."""
    command = [a for a in arguments if not a.startswith("--kill-on-bad-exit")]
    tasks = [
        subprocess.Popen(
            command,
            env=os.environ
            | {
                "SLURM_PROCID": str(task),
                "SLURM_LOCALID": "0",
                "SLURM_STEP_NODELIST": "localhost",
            },
            start_new_session=True,
        )
        for task in range(int(os.environ["SLURM_NTASKS"]))
    ]
    (CLOUD / "step").write_text(json.dumps([task.pid for task in tasks]))
    return max(task.wait() for task in tasks)


def scontrol(arguments: list[str]) -> int:
    return 0


def main(tool: str, arguments: list[str]) -> int:
    with open(CLOUD / "calls", "a") as calls:
        calls.write(json.dumps([tool, *arguments]) + "\n")
    return {"gcloud": gcloud, "curl": curl, "srun": srun, "scontrol": scontrol}[tool](arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
