"""How processes find each other: what is read, retried, rejected, and how long they wait."""

import signal
import socket

import jax
import pytest
from jax._src import cloud_tpu_init, clusters
from jax._src.clusters import cloud_tpu_cluster
from jax._src.lib import _jax

from podracer.distributed import joining
from podracer.distributed.joining import Address, HostsConfig, from_environment, join
from podracer.distributed.processes import joined
from podracer.errors import ConfigError, ExitCode, TransientError
from tests.distributed.jobs import free_port, start

# One attempt to detect a cluster, and enough for several.
ONCE, LONG = HostsConfig(start_timeout_s=1e-9), HostsConfig(start_timeout_s=60.0)


def test_an_address_is_read_from_the_environment():
    environment = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "4"}
    address = Address(num_processes=2, process_id=1)
    assert from_environment(address, environment) == ("a:1", 2, 1)
    assert from_environment(Address(), environment) == ("a:1", 4, None)


@pytest.mark.parametrize(
    ("address", "environment", "message"),
    [
        (Address("host0"), {}, "coordinator='host0' must be HOST:PORT"),
        (Address("1234"), {}, "coordinator='1234' must be HOST:PORT"),
        (Address(":1234"), {}, "coordinator=':1234' must be HOST:PORT"),
        (Address("host0:70000"), {}, "coordinator='host0:70000' must be HOST:PORT"),
        (Address("a:1", 2), {"JAX_PROCESS_ID": "x"}, "JAX_PROCESS_ID='x' must be a number"),
        (Address("a:1", 0, 0), {}, "num_processes=0 must be at least 1"),
        (Address("a:1", 2, 2), {}, "process_id=2 must be from 0 to num_processes - 1"),
        (Address("a:1", None, -1), {}, "process_id=-1 must be from 0"),
    ],
)
def test_a_wrong_address_is_rejected(address, environment, message):
    with pytest.raises(ConfigError, match=message):
        from_environment(address, environment)


def test_without_a_cluster_a_process_is_alone():
    with joined(Address(), HostsConfig()) as processes:
        assert (processes.index, processes.count) == (0, 1)
        assert processes.broadcast(lambda: 7) == 7
        assert processes.all_gather(8) == [8]
    assert not jax.distributed.is_initialized()


def test_without_a_cluster_all_flags_are_needed():
    with pytest.raises(ConfigError, match="--process_id=None: all three are needed"):
        join(Address("localhost:1", 2), HostsConfig())


def slurm(monkeypatch, tasks: str) -> None:
    """Sets the variables of a job on the first of its nodes."""
    values = {"JOB_ID": "1", "STEP_NODELIST": "127.0.0.1", "PROCID": "0", "LOCALID": "0"}
    for name, value in {**values, "NTASKS": tasks}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)


def test_a_cluster_of_several_processes_is_joined(monkeypatch):
    slurm(monkeypatch, "1")
    join(Address(), HostsConfig())
    assert not jax.distributed.is_initialized()
    slurm(monkeypatch, "2")
    # JAX already runs in this process.
    with pytest.raises(ConfigError, match=r"must be called before .* --num_processes=1 runs this"):
        join(Address(), HostsConfig())


def test_settings_of_a_cluster_that_are_wrong_are_rejected_at_once(monkeypatch):
    slurm(monkeypatch, "many")
    with pytest.raises(ConfigError, match=r"SlurmCluster\) failed: ValueError: invalid"):
        join(Address(), LONG)


@pytest.fixture
def metadata(monkeypatch):
    """A Cloud TPU's metadata service: its answers by key, (text, status), or what it raises."""
    answers = {}

    def get(key):
        answer = answers[key]
        if isinstance(answer, list):
            answer = answer.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)
    for module in (cloud_tpu_cluster, cloud_tpu_init):
        monkeypatch.setattr(module, "running_in_cloud_tpu_vm", True)
    monkeypatch.setattr(cloud_tpu_cluster, "get_metadata", get)
    monkeypatch.setattr(joining, "FIRST_DELAY_S", 0.0)
    monkeypatch.setattr(clusters.ClusterEnv, "_cluster_types", [clusters.GceTpuCluster])
    return answers


@pytest.mark.parametrize(
    ("number", "hosts"),
    [
        (ConnectionError("no route"), None),
        # JAX concludes that there is no cluster, and the process would run alone.
        (("busy", 503), None),
        # JAX takes this page for the name of a host.
        (("0", 200), ("<a:b>", 503)),
    ],
)
def test_a_metadata_service_that_fails_is_transient(metadata, number, hosts, capsys):
    metadata |= {"agent-worker-number": number, "worker-network-endpoints": hosts}
    with pytest.raises(TransientError, match=r"detecting the cluster .* failed"):
        join(Address(), ONCE)


def test_a_metadata_service_that_answers_later_is_queried_again(metadata, capsys):
    metadata |= {
        # Each failed attempt asks twice.
        "agent-worker-number": [ConnectionError("no route"), ("", 503), ("", 503), ("0", 200)],
        "worker-network-endpoints": ("10.0.0.2", 200),
        "tpu-env": ("", 200),
    }
    join(Address(), LONG)
    assert not metadata["agent-worker-number"]
    assert "no route" in capsys.readouterr().err


def test_a_tpu_without_a_cluster_runs_alone(metadata):
    metadata["agent-worker-number"] = ("not found", 404)
    join(Address(), LONG)


class ApiError(Exception):
    def __init__(self, status: int):
        self.status = status


@pytest.mark.parametrize(("status", "kind"), [(503, TransientError), (403, ConfigError)])
def test_an_error_of_kubernetes_is_transient_unless_access_is_denied(monkeypatch, status, kind):
    def fail():
        try:
            raise ApiError(status)
        except ApiError as error:
            raise RuntimeError("Kubernetes API Error") from error

    monkeypatch.setattr(clusters.ClusterEnv, "_cluster_types", [clusters.K8sCluster])
    monkeypatch.setattr(clusters.K8sCluster, "is_env_present", lambda: True)
    monkeypatch.setattr(clusters.K8sCluster, "get_process_count", fail)
    with pytest.raises(kind, match=r"K8sCluster\) failed: RuntimeError: Kubernetes API"):
        join(Address(), ONCE)


JOIN = """
import signal, sys
from podracer.distributed import joining
from podracer.errors import run_command
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: None)
def initialize(*arguments, **options):
    print("connecting", flush=True)
    original(*arguments, **options)
original, joining.jax.distributed.initialize = joining.jax.distributed.initialize, initialize
port, count, index, timeout = sys.argv[1:]
address = joining.Address(f"127.0.0.1:{port}", int(count), int(index))
hosts = joining.HostsConfig(start_timeout_s=float(timeout))
sys.exit(run_command(lambda: joining.join(address, hosts)))
"""


def run_join(port: int, count: int, index: int, *, timeout=600.0, stop=None) -> tuple[int, str]:
    """Runs a process that joins others.

    Args:
      port: port of the coordinator.
      count: number of processes.
      index: number of the process.
      timeout: its limit of waiting.
      stop: a signal that it receives once it connects.

    Returns:
      Its exit code and errors.
    """
    with start("-c", JOIN, str(port), str(count), str(index), str(timeout)) as process:
        try:
            assert process.stdout.readline() == "connecting\n"
            if stop is not None:
                process.send_signal(stop)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    return process.returncode, errors


@pytest.mark.parametrize("index", [0, 1])
def test_a_process_waits_for_a_missing_one_until_the_limit(index):
    port = free_port()
    code, errors = run_join(port, 2, index, timeout=0.5)
    assert code == ExitCode.STALLED, errors
    assert f"process {index} of 2, which was joining the others at 127.0.0.1:{port}," in errors
    assert "has given up after 0.5 s (hosts.start_timeout_s)" in errors


@pytest.mark.parametrize(
    ("number", "expected"),
    [(signal.SIGTERM, ExitCode.PREEMPTED), (signal.SIGINT, ExitCode.INTERRUPTED)],
)
def test_a_process_that_waits_for_others_can_be_stopped(number, expected):
    code, errors = run_join(free_port(), 2, 0, stop=number)
    assert code == expected, errors
    assert f"was stopped by {signal.Signals(number).name}" in errors


def test_a_process_that_the_coordinator_rejects_says_why():
    port = free_port()
    service = _jax.get_distributed_runtime_service(f"127.0.0.1:{port}", 2)
    try:
        # It was started with another number of processes than the coordinator.
        code, errors = run_join(port, 3, 2)
    finally:
        service.shutdown()
    assert code == ExitCode.TRANSIENT, errors
    assert "Unexpected task registered with task=2" in errors
    assert "--num_processes differs between processes" in errors


def test_a_port_that_is_in_use_is_transient():
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        address = Address(f"127.0.0.1:{server.getsockname()[1]}", 2, 0)
        with pytest.raises(TransientError, match="Address already in use"):
            join(address, HostsConfig())


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (jax.errors.JaxRuntimeError("UNAVAILABLE"), TransientError),
        (PermissionError("Permission denied"), ConfigError),
    ],
)
def test_a_failure_to_connect_is_transient_unless_it_is_not_permitted(monkeypatch, error, kind):
    def initialize(*_, **__):
        raise error

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    with pytest.raises(kind, match=r"can't be joined by --coordinator=127\.0\.0\.1:1 "):
        join(Address("127.0.0.1:1", 2, 1), HostsConfig())
