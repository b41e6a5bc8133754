"""What works on a machine, and what to do about the rest.

A ``Finding`` of state "problem" prevents training, or what the user has asked for. The functions
that make them need neither JAX nor the packages that they look for.
"""

import importlib.metadata
import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from packaging.requirements import Requirement

import podracer
from podracer.errors import DISTRIBUTION, PACKAGE, ConfigError
from podracer.monitoring.formatting import size
from podracer.storage import bucket
from podracer.storage.versions import versions

State = Literal["ok", "note", "warning", "problem"]
# How everything is installed, as podracer is on no package index yet.
INSTALL = "in the clone: pip install"
MISSING = " is not installed"
# Extras for developing podracer.
OWN_EXTRAS = ("dev", "test")
# Seconds that a probe may take. A TPU needs a minute for its first program.
PROBE_S = 180
# Free bytes of a folder: with less than these it is a problem, and a warning.
LEAST_DISK, LITTLE_DISK = 100 * 2**20, 5 * 2**30
# The key by which the probe reports an accelerator, its name, and the packages that let JAX use it,
# with the extras that install them.
ACCELERATORS = (
    ("nvidia", "an NVIDIA GPU", {"jax-cuda12-plugin": "cuda12", "jax-cuda13-plugin": "cuda13"}),
    ("tpu", "a TPU", {"libtpu": "tpu"}),
)
# Variables by which a user may hide an accelerator.
HIDE = ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES")
CPU_DEVICES = "xla_force_host_platform_device_count"
LITTLE_MEMORY = 2 * 2**30
# Beginnings of the names of variables that JAX, XLA and the drivers read, and those that move
# podracer's folders.
VARIABLES = (
    "JAX_", "XLA_", "LIBTPU_", "TPU_", "CUDA_", "NVIDIA_VISIBLE", "NCCL_", "LD_LIBRARY_PATH",
    "LD_PRELOAD", "OMP_NUM_THREADS", "SLURM_NTASKS", "SLURM_PROCID", "TMPDIR", "XDG_CACHE_HOME",
    "TF_CPP_", "WANDB_MODE",
)  # fmt: skip


class Finding(NamedTuple):
    """The result of one check.

    Attributes:
      state: "ok"; "note" for what is optional; "warning" for what is probably unintended; "problem"
        for what prevents training.
      name: what was checked.
      text: what was found.
      advice: what to do.
    """

    state: State
    name: str
    text: str
    advice: str = ""


class Probe(NamedTuple):
    """The outcome of a probe, see ``probes``.

    Attributes:
      found: the values that it has printed.
      error: why it failed; empty if it did not.
      output: what JAX and others have printed on standard error.
    """

    found: Mapping[str, Any]
    error: str
    output: str


def probe(name: str, timeout_s: float = PROBE_S) -> Probe:
    """Runs a probe in a process of its own."""
    command = [sys.executable, "-m", "podracer.training.probes", name]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
        out, output, code = ended.stdout, ended.stderr, ended.returncode
    except subprocess.TimeoutExpired as error:
        out, output = (x.decode() if x else "" for x in (error.stdout, error.stderr))
        code = None
    found = {}
    for line in out.splitlines():
        if line.startswith("{"):
            found |= json.loads(line)
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    # XLA prints a stack below the reason why it aborts, and the time and file in front of it.
    reasons = [line for line in lines if "Unknown flag" in line] or lines[-1:] or [f"code {code}"]
    reason = reasons[0].rpartition("] ")[2]
    error = f"no answer within {timeout_s:g} s" if code is None else reason if code else ""
    return Probe(found, error, output)


def check_versions() -> Iterator[Finding]:
    """Python, podracer and the packages that it needs."""
    found = versions()
    found.pop("podracer", None)
    commit = found.pop("commit", "")
    clone = f", commit {commit}" if commit else ""
    yield Finding("ok", "podracer", f"{podracer.__version__} in {PACKAGE}{clone}")
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    yield Finding("ok", "Python", f"{found.pop('python')} on {system}")
    yield Finding("ok", "packages", ", ".join(f"{name} {x}" for name, x in found.items()))
    try:
        wrong = [text for each in requirements() for text in unmet(each)]
    except importlib.metadata.PackageNotFoundError:
        yield Finding("warning", "packages", "podracer itself is not installed", f"{INSTALL} -e .")
        return
    if wrong:
        yield Finding("problem", "packages", "; ".join(wrong), f"{INSTALL} -e .")


def requirements(extra: str = "", package: str = DISTRIBUTION) -> list[Requirement]:
    """The packages that a package needs; with an extra, those that the extra adds.

    Raises:
      PackageNotFoundError: the package itself is not installed.
    """
    every = map(Requirement, importlib.metadata.requires(package) or [])
    if not extra:
        return [each for each in every if not each.marker or each.marker.evaluate({"extra": ""})]
    marked = [each for each in every if each.marker and "extra" in str(each.marker)]
    return [each for each in marked if each.marker and each.marker.evaluate({"extra": extra})]


def unmet(required: Requirement) -> list[str]:
    """What a requirement lacks, as texts; none if it is met."""
    try:
        version = importlib.metadata.version(required.name)
    except importlib.metadata.PackageNotFoundError:
        return [f"{required.name}{MISSING}"]
    if not required.specifier.contains(version, prereleases=True):
        return [f"{required.name} {version} is not {required.specifier}"]
    below = [each for x in required.extras for each in requirements(x, required.name)]
    return [text for each in below for text in unmet(each)]


def check_extras() -> Iterator[Finding]:
    """The optional packages, by the extra that installs them."""
    try:
        every = importlib.metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or []
    except importlib.metadata.PackageNotFoundError:
        return  # ``check_versions`` says so.
    # An extra may need nothing here: those for accelerators are for Linux only.
    needs = {extra: requirements(extra) for extra in sorted({*every} - {*OWN_EXTRAS})}
    lacks = {
        extra: [text for each in needed for text in unmet(each)]
        for extra, needed in needs.items()
        if needed
    }
    have = [extra for extra, texts in lacks.items() if not texts]
    yield Finding("ok", "extras", ", ".join(have) or "none")
    old = {extra: [x for x in texts if not x.endswith(MISSING)] for extra, texts in lacks.items()}
    absent = [extra for extra, texts in lacks.items() if texts and not old[extra]]
    if absent:
        advice = f"for what needs one of them: {INSTALL} -e '.[EXTRA]'"
        yield Finding("note", "extras", f"not installed: {', '.join(absent)}", advice)
    for extra, texts in old.items():
        if texts:
            yield Finding("warning", "extras", "; ".join(texts), f"{INSTALL} -e '.[{extra}]'")


def check_devices(probed: Probe, environment: Mapping[str, str]) -> Iterator[Finding]:
    """The devices that JAX finds, and those that it should have found."""
    found = probed.found
    if probed.error:
        advice = (
            "a variable below may be wrong, or another process holds the device; on a slice of "
            "several hosts JAX waits for the others, and JAX_PLATFORMS=cpu does without the TPU"
        )
        yield Finding("problem", "devices", f"JAX fails: {probed.error}", advice)
    else:
        devices = found["devices"]
        yield Finding("ok", "devices", f"{len(devices)} x {found['platform']}: {devices[0]}")
    if not probed.error and found["platform"] == "cpu":
        yield from _unseen(found, probed.output, environment)


def _unseen(
    found: Mapping[str, Any], output: str, environment: Mapping[str, str]
) -> Iterator[Finding]:
    """Accelerators of the machine that JAX does not use."""
    for key, name, drivers in ACCELERATORS:
        if not found[key]:
            continue
        hide = [f"{x}={environment[x]}" for x in HIDE if x in environment]
        installed = [x for x in drivers if not unmet(Requirement(x))]
        if hide:
            advice = f"unset {' and '.join(hide)}"
        elif installed:
            advice = (
                f"{installed[0]} is installed: see whether it suits the driver (nvidia-smi prints "
                "its version), and whether another process or container holds the device"
            )
        else:
            extras = [f"-e '.[{extra}]'" for extra in drivers.values()]
            advice = f"{INSTALL} {' or '.join(extras)}"
        said = [line for line in output.splitlines() if line.strip()][-1:]
        text = f"the machine has {name}, which JAX does not use"
        yield Finding("warning", "devices", "; JAX says: ".join([text, *said]), advice)


def check_libtpu() -> Iterator[Finding]:
    """The library that drives a TPU, and compiles for one."""
    try:
        yield Finding("ok", "libtpu", importlib.metadata.version("libtpu"))
    except importlib.metadata.PackageNotFoundError:
        needed = "not installed; needed on a TPU, and by podracer.plan on any machine"
        yield Finding("note", "libtpu", needed, f"{INSTALL} -e '.[tpu]'")


def check_envpool(run: Callable[[str], Probe] = probe) -> Iterator[Finding]:
    """Whether envpool, if it is installed, makes environments and steps them."""
    if not unmet(Requirement("envpool")):
        probed = run("envpool")
        if probed.error:
            advice = f"{INSTALL} -e '.[sebulba]' --force-reinstall; gymnasium:... needs no envpool"
            yield Finding("problem", "envpool", f"does not work: {probed.error}", advice)
        else:
            yield Finding("ok", "envpool", "makes and steps environments")


def check_machine(probed: Probe, cpu_max: str = "/sys/fs/cgroup/cpu.max") -> Iterator[Finding]:
    """Memory and cores."""
    if "memory" not in probed.found:
        return  # JAX can't even be imported, which ``check_devices`` says.
    memory, cores = probed.found["memory"], probed.found["cores"]
    little = memory < LITTLE_MEMORY
    advice = "lower num_envs and replay.capacity, see podracer.plan" if little else ""
    yield Finding("warning" if little else "ok", "memory", size(memory), advice)
    # The time that a container may use within a period, or "max".
    quota, _, period = _read(cpu_max).partition(" ")
    allowed = int(quota) / int(period) if quota.isdigit() else cores
    if allowed < cores:
        text = f"{cores}, but the container's quota is the time of {allowed:g}"
        advice = f"set sebulba.pool_threads={max(1, int(allowed))}; for a worker --num_pools"
        yield Finding("warning", "cores", text, advice)
    else:
        yield Finding("ok", "cores", str(cores))


def _read(path: str) -> str:
    file = pathlib.Path(path)
    return file.read_text() if file.is_file() else ""


def check_folders(folders: Mapping[str, str | None]) -> Iterator[Finding]:
    """Space and permissions of the folders that runs write to, by what they are for."""
    for name, folder in folders.items():
        if folder is None:
            continue
        if "://" in folder:
            yield _check_bucket(name, folder)
            continue
        path = pathlib.Path(folder).expanduser().absolute()
        # A folder that does not exist will be made in the nearest one that does.
        there = next(each for each in (path, *path.parents) if each.exists())
        free = shutil.disk_usage(there).free
        text = f"{path}, {size(free)} free"
        if not os.access(there, os.W_OK):
            yield Finding("problem", name, f"{text}, but {there} is not writable", _ELSEWHERE[name])
        elif free < LITTLE_DISK:
            state = "problem" if free < LEAST_DISK else "warning"
            yield Finding(state, name, text, f"free some space, or {_ELSEWHERE[name]}")
        else:
            yield Finding("ok", name, text)


def _check_bucket(name: str, folder: str) -> Finding:
    """Whether a folder in a bucket has a possible name, and whether what accesses it is installed;
    the bucket itself is left alone."""
    missing = [x for each in ("gcsfs", "google-cloud-storage") for x in unmet(Requirement(each))]
    if missing:
        return Finding("problem", name, f"{folder}: {'; '.join(missing)}", f"{INSTALL} -e '.[gcs]'")
    try:
        bucket.locate(folder)
    except ConfigError as error:
        return Finding("problem", name, str(error), _ELSEWHERE[name])
    return Finding("note", name, f"{folder}; not checked whether a run can read and write there")


_ELSEWHERE = {
    "workdir": "choose another folder with --workdir",
    "temporary": "set TMPDIR to another folder",
    "cache": "set JAX_COMPILATION_CACHE_DIR to another folder",
}


def check_variables(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Environment variables that matter, and those that contradict each other."""
    given = {name: x for name, x in sorted(environment.items()) if name.startswith(VARIABLES)}
    yield Finding("ok", "variables", " ".join(f"{name}={x}" for name, x in given.items()) or "none")
    for name, value in given.items():
        if name.startswith("JAX_TRANSFER_GUARD") and value.startswith("disallow"):
            yield Finding("problem", "variables", f"no run starts under {name}", f"unset {name}")
    if given.get("JAX_DISABLE_JIT", "0").lower() not in ("", "0", "false"):
        text = "JAX_DISABLE_JIT is set, so that nothing is compiled"
        yield Finding("warning", "variables", text, "unset JAX_DISABLE_JIT")
    flags: dict[str, list[str]] = {}
    for flag in given.get("XLA_FLAGS", "").split():
        name, _, value = flag.lstrip("-").partition("=")
        flags.setdefault(name, []).append(value)
    if "JAX_NUM_CPU_DEVICES" in given and CPU_DEVICES in flags:
        flags[CPU_DEVICES].append(given["JAX_NUM_CPU_DEVICES"])
    for name, values in flags.items():
        if len({*values}) > 1:
            where = " and JAX_NUM_CPU_DEVICES" if name == CPU_DEVICES else ""
            text = f"XLA_FLAGS{where} give {name} several values: {', '.join(values)}"
            yield Finding("warning", "variables", text, "keep one of them")


def diagnose(
    workdir: str, check_config: Callable[[], Iterator[Finding]] | None = None
) -> Iterator[Finding]:
    """All findings, in the order in which people look for causes.

    Args:
      workdir: the folder that a run would write to.
      check_config: checks a run's settings, if JAX works.
    """
    yield from check_versions()
    yield from check_extras()
    probed = probe("devices")
    yield from check_devices(probed, os.environ)
    yield from check_libtpu()
    yield from check_envpool()
    yield from check_machine(probed)
    temporary, cache = tempfile.gettempdir(), probed.found.get("cache")
    yield from check_folders({"workdir": workdir, "temporary": temporary, "cache": cache})
    yield from check_variables(os.environ)
    if check_config and probed.error:
        yield Finding("note", "config", "not checked, because JAX fails")
    elif check_config:
        yield from check_config()
