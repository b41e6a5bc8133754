"""Which errors of storage count as transient, permanent or damage, and how they are retried."""

import errno

import aiohttp
import gcsfs.retry
import google.api_core.exceptions
import google.auth.exceptions
import jax
import pytest
import requests
import tenacity

from podracer.errors import ConfigError, PreemptedError, TransientError
from podracer.storage import retry
from podracer.storage.retry import Fault, fault


@pytest.fixture(autouse=True)
def no_wait(monkeypatch):
    monkeypatch.setattr(retry, "WAIT", tenacity.wait_none())


def chained(error, cause):
    error.__cause__ = cause
    return error


TRANSIENT = [
    OSError(errno.EIO, "Input/output error"),
    OSError(errno.ESTALE, "Stale file handle"),
    TimeoutError(),
    MemoryError(),
    ValueError("UNAVAILABLE: 503 from the server"),
    jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"),
    gcsfs.retry.HttpError({"code": 503}),
    gcsfs.retry.HttpError({"code": "429"}),
    requests.exceptions.ConnectionError(),
    aiohttp.ClientError(),
    google.api_core.exceptions.ServiceUnavailable("x"),
    google.auth.exceptions.TransportError("x"),
    # The consequence of a transient error is not damage.
    chained(ValueError("not JSON"), OSError(errno.EIO, "Input/output error")),
    chained(Exception("while reading array index"), ValueError("DEADLINE_EXCEEDED: x")),
    ExceptionGroup("x", [ValueError("not JSON"), ConnectionResetError()]),
]
PERMANENT = [
    PermissionError(errno.EACCES, "Permission denied"),
    OSError(errno.EROFS, "Read-only file system"),
    OSError(errno.ENOSPC, "No space left on device"),
    OSError("Forbidden: https://storage.googleapis.com/x"),
    ValueError("PERMISSION_DENIED: x"),
    gcsfs.retry.HttpError({"code": 401}),
    google.api_core.exceptions.Forbidden("x"),
    google.auth.exceptions.DefaultCredentialsError("x"),
]
DAMAGED = [
    FileNotFoundError("x"),
    ValueError("DATA_LOSS: bad checksum"),
    ValueError("OUT_OF_RANGE: truncated"),
    ValueError("Expecting value: line 1"),
    KeyError("Item 'rest' was not found"),
    chained(Exception("while reading array index"), ValueError("DATA_LOSS: x")),
]
OTHER = [
    RuntimeError("a bug"),
    jax.errors.JaxRuntimeError("INTERNAL: the device is gone"),
    ConfigError("x"),
    chained(PreemptedError("x"), OSError(errno.EIO, "x")),
]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        *((error, Fault.TRANSIENT) for error in TRANSIENT),
        *((error, Fault.PERMANENT) for error in PERMANENT),
        *((error, Fault.DAMAGED) for error in DAMAGED),
        *((error, None) for error in OTHER),
    ],
    ids=repr,
)
def test_kinds_of_errors(error, expected):
    assert fault(error) is expected


def test_missing_credentials_are_transient_on_a_machine_of_google(monkeypatch):
    """There they come from the metadata server, which may start later than the run."""
    monkeypatch.setattr(retry.pathlib.Path, "read_text", lambda _: "Google Compute Engine\n")
    assert fault(google.auth.exceptions.DefaultCredentialsError("x")) is Fault.TRANSIENT
    assert fault(gcsfs.retry.HttpError({"code": 401})) is Fault.TRANSIENT


class Fails:
    """A function that raises an error a number of times and then returns 1."""

    def __init__(self, times, error):
        self.calls, self._times, self._error = 0, times, error

    def __call__(self):
        self.calls += 1
        if self.calls <= self._times:
            raise self._error
        return 1


def test_transient_errors_are_retried_and_logged():
    function, logged = Fails(2, OSError(errno.EIO, "Input/output error")), []
    assert retry.call("file x can't be read", function, logged.append) == 1
    assert function.calls == 3
    assert len(logged) == 2
    assert logged[0].startswith("file x can't be read: Input/output error; next attempt in")


@pytest.mark.parametrize(
    ("error", "raised", "calls"),
    [
        (OSError(errno.EIO, "Input/output error"), TransientError, retry.ATTEMPTS),
        (PermissionError(errno.EACCES, "Permission denied"), ConfigError, 1),
        (FileNotFoundError("x"), FileNotFoundError, 1),
        (RuntimeError("a bug"), RuntimeError, 1),
        (PreemptedError("SIGTERM"), PreemptedError, 1),
    ],
    ids=repr,
)
def test_how_other_errors_end(error, raised, calls):
    function = Fails(1000, error)
    with pytest.raises(raised) as caught:
        retry.call("file x can't be read", function, [].append)
    assert function.calls == calls
    assert type(caught.value) is raised
    assert raised not in (TransientError, ConfigError) or "file x" in str(caught.value)


def test_waits_grow():
    policy = tenacity.wait_exponential_jitter(initial=1, max=30)
    state = tenacity.RetryCallState(tenacity.Retrying(), None, (), {})
    waits = []
    for state.attempt_number in range(1, retry.ATTEMPTS):
        waits.append(policy(state))
    assert 31 <= sum(waits) <= 31 + len(waits)
