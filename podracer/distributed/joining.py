"""How the processes of a run find each other and connect, through ``jax.distributed``.

JAX detects Cloud TPUs, SLURM, Open MPI and Kubernetes. Elsewhere the address is given by flags or
by JAX's environment variables. What only the user can change raises ``ConfigError``. A metadata
service, a name server or a coordinator that fails may work later: detection is repeated, and then
``TransientError`` is raised, after which launchers run the same command again.
"""

import dataclasses
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

# Partly private to JAX, but the only way to detect a cluster without starting a device.
from jax._src import cloud_tpu_init, clusters
from jax._src.clusters import cloud_tpu_cluster

from podracer.distributed import signals
from podracer.distributed.abort import on_abort
from podracer.errors import ConfigError, ExitCode, PreemptedError, TransientError, see

# Seconds between two attempts to detect the cluster; doubled after each.
FIRST_DELAY_S, LONGEST_DELAY_S = 1.0, 30.0


@dataclasses.dataclass(frozen=True)
class HostsConfig:
    """How devices and processes watch over each other.

    Attributes:
      timeout_s: seconds after which a process that sends nothing, or a run in which no process
        makes progress, counts as hanging; all processes then end. Set it higher than the longest
        call, evaluation or checkpoint takes.
      start_timeout_s: the same limit until all processes have joined and begun to train. Set it
        higher than the longest compilation takes, and higher than the time between the starts of
        the first and the last host.
      drift_every: number of updates between two checks that the devices of an agent hold the same
        weights, rounded up to whole host calls; 0 disables the check.
    """

    timeout_s: float = 300.0
    start_timeout_s: float = 900.0
    drift_every: int = 1000

    def __post_init__(self):
        if min(self.timeout_s, self.start_timeout_s) <= 0 or self.drift_every < 0:
            raise ConfigError(
                "hosts.timeout_s and hosts.start_timeout_s must be positive and hosts.drift_every "
                f"must not be negative, got {self.timeout_s}, {self.start_timeout_s} and "
                f"{self.drift_every}"
            )


class Address(NamedTuple):
    """How a process finds the others; None where JAX should detect the value.

    Attributes:
      coordinator: host and port of process 0, as HOST:PORT.
      num_processes: number of processes of the run; 1 runs this process alone.
      process_id: number of this process, from 0.
    """

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None


def from_environment(address: Address, environment: Mapping[str, str]) -> Address:
    """Completes an address from JAX's environment variables.

    Args:
      address: values given by the user, which take precedence.
      environment: environment variables by name.

    Raises:
      ConfigError: a value is malformed or out of range.
    """

    def number(given: int | None, variable: str) -> int | None:
        value = environment.get(variable)
        if given is not None or value is None:
            return given
        if not value.isdecimal():
            raise ConfigError(f"{variable}={value!r} must be a number")
        return int(value)

    coordinator = address.coordinator or environment.get("JAX_COORDINATOR_ADDRESS")
    host, _, port = (coordinator or "").rpartition(":")
    if coordinator is not None and not (host and port.isdecimal() and 0 < int(port) < 2**16):
        raise ConfigError(f"coordinator={coordinator!r} must be HOST:PORT of process 0")
    count = number(address.num_processes, "JAX_NUM_PROCESSES")
    index = number(address.process_id, "JAX_PROCESS_ID")
    if count is not None and count < 1:
        raise ConfigError(f"num_processes={count} must be at least 1")
    if index is not None and not 0 <= index < (math.inf if count is None else count):
        raise ConfigError(
            f"process_id={index} must be from 0 to num_processes - 1, and num_processes is {count}"
        )
    return Address(coordinator, count, index)


def find(address: Address, hosts: HostsConfig) -> tuple[Address, Sequence[int] | None]:
    """Completes an address from the environment and the cluster, as far as they are known.

    Args:
      address: what the user has specified.
      hosts: the time limits.

    Returns:
      The address, and the numbers of the devices of its host that this process may use; None
      means all of them.

    Raises:
      ConfigError: the address is malformed, or the cluster's settings can't be used.
      TransientError: the cluster could not be reached.
    """
    address = from_environment(address, os.environ)
    if address.num_processes == 1 or None not in address:
        return address, None
    return _detect_with_retries(address, hosts.start_timeout_s)


def join(address: Address, hosts: HostsConfig) -> None:
    """Connects to the other processes of the run, if there are any.

    It must be called before JAX starts its devices.

    Args:
      address: what the user has specified.
      hosts: the time limits.

    Raises:
      ConfigError: the address is malformed or incomplete, or JAX already runs.
      TransientError: the cluster or the coordinator could not be reached.
    """
    if jax.distributed.is_initialized():
        return
    address, local_devices = find(address, hosts)
    if address == Address() or address.num_processes == 1:
        return
    flags = " ".join(f"--{name}={value}" for name, value in address._asdict().items())
    if address.coordinator is None or None in address:
        raise ConfigError(
            f"the other processes can't be found by {flags}: all three are needed where JAX "
            "detects no cluster, and --num_processes=1 runs this process alone"
        )
    try:
        if address.process_id == 0:
            _check_port(int(address.coordinator.rpartition(":")[2]))
        _connect(address, local_devices, hosts)
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        network = isinstance(error, (OSError, jax.errors.JaxRuntimeError))
        denied = isinstance(error, PermissionError)
        kind = TransientError if network and not denied else ConfigError
        raise kind(
            f"the other processes can't be joined by {flags}: {error}; --num_processes=1 runs "
            "this process alone"
        ) from error


def _detect_with_retries(
    address: Address, timeout_s: float
) -> tuple[Address, Sequence[int] | None]:
    """``_detect``, repeated until it succeeds or ``timeout_s`` seconds have passed."""
    deadline, delay = time.monotonic() + timeout_s, FIRST_DELAY_S
    while True:
        try:
            return _detect(address, max(1.0, deadline - time.monotonic()))
        except TransientError as error:
            left = deadline - time.monotonic()
            if left <= 0:
                raise
            if delay == FIRST_DELAY_S:
                print(f"warning: {error}; trying again", file=sys.stderr, flush=True)
            time.sleep(min(delay, left))
            delay = min(2 * delay, LONGEST_DELAY_S)


def _detect(address: Address, timeout_s: float) -> tuple[Address, Sequence[int] | None]:
    """Completes an address from the cluster that this process runs in, if JAX detects one.

    Args:
      address: what is already known.
      timeout_s: seconds to wait for the coordinator's name to be known.

    Returns:
      The address, and the numbers of the devices of its host that this process may use; None
      means all of them. A process that is alone in its cluster uses all, where JAX would use one.

    Raises:
      ConfigError: the cluster's settings can't be used.
      TransientError: the service that describes the cluster failed.
    """
    env, cluster = clusters.ClusterEnv, None
    try:
        candidates = (each for each in env._cluster_types if not each.opt_in_only_method)
        cluster = next((each for each in candidates if each.is_env_present()), None)
        if cluster is None:
            _check_metadata_service()
            return address, None
        if address.num_processes is None and cluster.get_process_count() == 1:
            return Address(num_processes=1), None
        coordinator, count, index, devices = env.auto_detect_unset_distributed_params(
            *address, None, None, math.ceil(timeout_s)
        )
    except Exception as error:  # Clusters raise errors of any type.
        kind = TransientError if _is_transient(error, cluster) else ConfigError
        name = cluster.__name__ if cluster else "unknown"
        raise kind(
            f"the other processes can't be found, as detecting the cluster (type {name}) failed: "
            f"{type(error).__name__}: {error}; --num_processes=1 runs this process alone"
        ) from error
    # JAX reads this variable itself.
    own_devices = None if "JAX_LOCAL_DEVICE_IDS" in os.environ else devices
    return Address(coordinator, count, index), own_devices


def _check_metadata_service() -> None:
    """Raises ``OSError`` if a Cloud TPU's metadata service fails. JAX would conclude that there is
    no cluster, and a host of a slice would run alone."""
    if cloud_tpu_init.running_in_cloud_tpu_vm and "TPU_SKIP_MDS_QUERY" not in os.environ:
        _, status = cloud_tpu_cluster.get_metadata("agent-worker-number")
        if status != 404:
            raise OSError(f"the metadata service answered with status {status}")


def _is_transient(error: BaseException | None, cluster: Any) -> bool:
    """Whether a service failed that may answer later, as opposed to a wrong setting.

    Args:
      error: the exception that detecting the cluster raised.
      cluster: the JAX class that raised it; None if no cluster had been found yet.
    """
    if cluster and issubclass(cluster, cloud_tpu_cluster.BaseTpuCluster):
        # Users configure none of this, and an error page instead of an answer raises a ValueError.
        return True
    while error is not None:
        # A missing file is permanent: Kubernetes has given the pod no service account.
        network = isinstance(error, OSError) and not isinstance(error, FileNotFoundError)
        status = getattr(error, "status", None)
        busy = isinstance(status, int) and (status in (408, 429) or status >= 500)
        if network or busy or type(error).__module__.partition(".")[0] == "urllib3":
            return True
        error = error.__cause__ or error.__context__
    return False


def _check_port(port: int) -> None:
    """Raises ``OSError`` if a port of this machine is in use: jaxlib 0.10.2 may crash then."""
    if "JAX_COORDINATOR_BIND_ADDRESS" in os.environ:
        # The coordinator listens somewhere else.
        return
    ipv6 = socket.has_dualstack_ipv6()
    with socket.socket(socket.AF_INET6 if ipv6 else socket.AF_INET) as server:
        # As in JAX: the port of a process that has just ended may be used again.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if ipv6:
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        server.bind(("", port))


def _connect(address: Address, local_devices: Sequence[int] | None, hosts: HostsConfig) -> None:
    """Connects to all processes of a complete address.

    If they do not join in time, this ends the process; JAX would do so without naming a process.
    """
    who = (
        f"process {address.process_id} of {address.num_processes}, which was joining the others at "
        f"{address.coordinator},"
    )

    def report(event: str) -> None:
        text = f"error: {who} {event}\n{see('devices-and-several-hosts')}"
        print(text, file=sys.stderr, flush=True)

    def give_up() -> None:
        limit = f"{hosts.start_timeout_s:g} s (hosts.start_timeout_s)"
        report(f"has given up after {limit}: are all running, and can they reach this address?")
        os._exit(ExitCode.STALLED)

    def stopped(number: int) -> int:
        report(f"was stopped by {signal.Signals(number).name}")
        return ExitCode.INTERRUPTED if number == signal.SIGINT else PreemptedError.code

    def aborted() -> None:
        report(
            "was aborted by JAX for the reason above: the coordinator has ended, or "
            "--num_processes differs between processes or a --process_id was given twice"
        )
        os._exit(ExitCode.TRANSIENT)

    # With asynchronous dispatch, programs with collectives could overtake each other on a CPU, and
    # processes would then run them in different orders.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    # The service's handler of SIGTERM would replace ours.
    jax.config.update("jax_enable_preemption_service", False)
    timer = threading.Timer(hosts.start_timeout_s, give_up)
    timer.daemon = True
    timer.start()
    restore_abort = on_abort(aborted)
    # The watchdog must act before JAX's own timeout, which aborts without naming a process.
    late = 2 * math.ceil(max(hosts.timeout_s, hosts.start_timeout_s)) + 60
    try:
        # There is nothing to save yet, so the first signal ends the process.
        with signals.exit_on_signal(1, stopped):
            jax.distributed.initialize(
                *address,
                local_device_ids=local_devices,
                cluster_detection_method="deactivate",
                initialization_timeout=late,
                shutdown_timeout_seconds=math.ceil(hosts.timeout_s),
                heartbeat_timeout_seconds=late,
            )
    finally:
        restore_abort()
        timer.cancel()
