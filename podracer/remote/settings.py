"""The settings of remote environments."""

import dataclasses

from podracer.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class RemoteConfig:
    """Environments on other machines, see ``podracer.worker``; Sebulba only.

    With them, ``num_envs`` is the number of unrolls of an update, which environments contribute as
    they complete them.

    Attributes:
      num_envs: places for environments that workers may bring, over all hosts; 0 has none, and
        steps environments in the learner's own process.
      listen: HOST:PORT at which each host waits for workers; "" waits for local workers only.
      local_workers: number of workers that each host starts itself, which share its places.
      batch: most environments that are acted on at once, for each actor thread.
      wait_ms: milliseconds for which the first environment that has arrived waits for others.
      timeout_s: seconds after which a worker that says nothing is dropped, and its places are free.
      start_timeout_s: the same until a worker has made its environments, which may keep its threads
        from saying anything.
      max_workers: most workers of a host.
      tls_cert, tls_key: files with the server's certificate and its key, PEM; both or neither.
      tls_clients: file with the certificates of authorities that workers' certificates must come
        from; "" asks workers for none.
      token_file: file with the token that workers must show; "" takes it from the environment
        variable PODRACER_TOKEN.
      insecure: listen to other machines without certificate or token.
    """

    num_envs: int = 0
    listen: str = ""
    local_workers: int = 0
    batch: int = 64
    wait_ms: float = 5.0
    timeout_s: float = 30.0
    start_timeout_s: float = 600.0
    max_workers: int = 128
    tls_cert: str = ""
    tls_key: str = ""
    tls_clients: str = ""
    token_file: str = ""
    insecure: bool = False

    @property
    def workers(self) -> str:
        """Where workers are, in words."""
        local = f"of {self.local_workers} local workers" if self.local_workers else ""
        listen = f"of workers that connect to {self.listen}" if self.listen else ""
        return " and ".join(filter(None, (local, listen)))

    def __post_init__(self):
        for key in ("num_envs", "local_workers", "wait_ms"):
            if getattr(self, key) < 0:
                raise ConfigError(f"remote.{key} must not be negative, got {getattr(self, key)}")
        for key in ("batch", "timeout_s", "start_timeout_s", "max_workers"):
            if getattr(self, key) <= 0:
                raise ConfigError(f"remote.{key} must be positive, got {getattr(self, key)}")
        has_workers = bool(self.listen) or self.local_workers > 0
        if has_workers != (self.num_envs > 0):
            raise ConfigError(
                f"remote.num_envs={self.num_envs} is the number of environments that workers may "
                "bring, which is set together with remote.listen=HOST:PORT, for workers of other "
                "machines, or remote.local_workers"
            )
        if bool(self.tls_cert) != bool(self.tls_key) or (self.tls_clients and not self.tls_cert):
            raise ConfigError(
                "remote.tls_cert and remote.tls_key belong together, and remote.tls_clients needs "
                "both"
            )
