"""Who may connect to whom: certificates, a shared token, and where a server may listen."""

import hmac
import ipaddress
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from podracer.errors import ConfigError, missing_extra
from podracer.remote.settings import RemoteConfig

TOKEN = "PODRACER_TOKEN"
METADATA = "authorization"


def import_grpc() -> Any:
    """The package ``grpc``.

    Raises:
      ConfigError: it is not installed.
    """
    # It would print a line for each stranger whose handshake fails.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    # Environments may be processes that are forked from several threads at once, such as those of
    # ViZDoom, which gRPC would take for an error of its own. It is not used after a fork here.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    try:
        import grpc
    except ImportError as error:
        raise missing_extra("remote", "a run with remote workers") from error
    return grpc


def is_loopback(address: str) -> bool:
    """Whether HOST:PORT can only be reached from the same machine."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_token(file: str) -> str:
    """The token in a file, or in the environment variable if none is named; "" if there is none.

    Raises:
      ConfigError: the file can't be read, or is empty.
    """
    name, token = TOKEN, os.environ.get(TOKEN, "")
    if file:
        name, token = f"token_file={file}", _read("token_file", file).decode(errors="replace")
    token = token.strip()
    if not token.isascii() or not token.isprintable() or (file and not token):
        raise ConfigError(f"{name} must contain a token of printable ASCII characters")
    return token


def _read(name: str, file: str) -> bytes:
    try:
        return pathlib.Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(f"{name}={file} can't be read: {error.strerror}") from error


def check_server(options: RemoteConfig, token: str) -> None:
    """Raises ``ConfigError`` if a server would not start, or if strangers could connect to it."""
    import_grpc()
    if options.listen:
        check_address("remote.listen", options.listen)
    _check_open(options, token)
    server_credentials(options)


def _check_open(options: RemoteConfig, token: str) -> None:
    """Raises ``ConfigError`` if strangers could connect, unless the user said that they may."""
    if not options.listen or is_loopback(options.listen) or options.insecure:
        return
    if not (options.tls_cert and token):
        raise ConfigError(
            f"remote.listen={options.listen} can be reached from other machines, which needs "
            "remote.tls_cert and remote.tls_key, and a token in remote.token_file or "
            f"{TOKEN}; remote.insecure=True listens to everyone who can reach this port"
        )


def check_token_hidden(
    addresses: Sequence[str], token: str, authority: str, *, insecure: bool
) -> None:
    """Raises ``ConfigError`` if a worker's token could be read on its way to other machines, unless
    the user said that it may."""
    if token and not (authority or insecure or all(map(is_loopback, addresses))):
        raise ConfigError(
            "a token must not be sent to other machines without TLS; set --tls_ca to the server's "
            "certificate, or --insecure to send it all the same"
        )


def check_address(name: str, address: str) -> None:
    """Raises ``ConfigError`` if an address is not HOST:PORT."""
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdigit() and int(port) < 2**16):
        raise ConfigError(f"{name}={address!r} must be HOST:PORT")


def server_credentials(options: RemoteConfig) -> Any:
    """gRPC's credentials of a server; None without a certificate."""
    if not options.tls_cert:
        return None
    key, certificate = (
        _read(f"remote.{name}", getattr(options, name)) for name in ("tls_key", "tls_cert")
    )
    clients = _read("remote.tls_clients", options.tls_clients) if options.tls_clients else None
    return import_grpc().ssl_server_credentials(
        [(key, certificate)], clients, require_client_auth=clients is not None
    )


def channel_credentials(authority: str, certificate: str, key: str) -> Any:
    """gRPC's credentials of a worker; None if no authority is named.

    Args:
      authority: file with the certificate of the authority that the server's comes from, or with
        the server's own.
      certificate, key: files with the worker's certificate and key, for servers that ask for them.
    """
    if not authority:
        return None
    chain = [
        _read(name, file) if file else None
        for name, file in (("tls_key", key), ("tls_cert", certificate))
    ]
    return import_grpc().ssl_channel_credentials(_read("tls_ca", authority), *chain)


def token_metadata(token: str) -> tuple[tuple[str, str], ...]:
    """What a worker sends with its call."""
    return ((METADATA, f"Bearer {token}"),) if token else ()


def has_token(metadata: Any, token: str) -> bool:
    """Whether a call's metadata has the token; any has, if the server asks for none."""
    given = [str(value) for name, value in metadata if name == METADATA]
    wanted = f"Bearer {token}".encode()
    return not token or any(hmac.compare_digest(x.encode(), wanted) for x in given)
