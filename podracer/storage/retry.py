"""Storage errors: which of them are transient, and how an operation is retried.

A cluster's file system or an object store fails now and then: a server restarts, a connection times
out, credentials are refreshed. Such an error says nothing about the files, so it must neither count
as damage nor end a run permanently. The stores' own clients retry a request for about half a
minute. The policy here is applied in addition, and also covers file systems, which do not retry.
"""

import enum
import errno
import pathlib
import re
import ssl
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import tenacity

from podracer.errors import ERRORS, ConfigError, TransientError

T = TypeVar("T")

# The policy: the total number of attempts at an operation, and the seconds between two attempts,
# which add up to about 35.
ATTEMPTS = 6
WAIT: tenacity.wait.wait_base = tenacity.wait_exponential_jitter(initial=1, max=30)


class Fault(enum.Enum):
    """What kind of error a storage operation ended with.

    Attributes:
      TRANSIENT: the same operation may succeed later.
      PERMANENT: the user must change something, such as a permission or the free space.
      DAMAGED: content is missing, incomplete or unreadable.
    """

    TRANSIENT = enum.auto()
    PERMANENT = enum.auto()
    DAMAGED = enum.auto()


# Error numbers that persist until the user changes something. All others (EIO, ESTALE, ETIMEDOUT,
# ENOMEM, EMFILE, ...) count as transient, because ending a run permanently does more harm.
_PERMANENT_ERRNOS = frozenset({
    errno.EACCES, errno.EDQUOT, errno.EEXIST, errno.EFBIG, errno.EINVAL, errno.ELOOP,
    errno.ENAMETOOLONG, errno.ENODEV, errno.ENOSPC, errno.ENOSYS, errno.ENOTEMPTY, errno.ENOTSUP,
    errno.EOPNOTSUPP, errno.EPERM, errno.EROFS, errno.EXDEV,
})  # fmt: skip

# Messages of TensorStore and JAX begin with one of Abseil's status codes.
# https://abseil.io/docs/cpp/guides/status-codes
_STATUS = re.compile(r"([A-Z_]+): ")
_STATUS_FAULTS = {
    **dict.fromkeys(
        ("ABORTED", "CANCELLED", "DEADLINE_EXCEEDED", "INTERNAL", "RESOURCE_EXHAUSTED",
         "UNAVAILABLE", "UNKNOWN"),
        Fault.TRANSIENT,
    ),
    "PERMISSION_DENIED": Fault.PERMANENT,
}  # fmt: skip

# Packages whose errors the clients of a bucket raise, in addition to ``OSError``.
_NETWORK_PACKAGES = frozenset({"aiohttp", "gcsfs", "google", "grpc", "http", "requests", "urllib3"})
_RETRIED_HTTP_CODES = frozenset({408, 429})


def fault(error: BaseException) -> Fault | None:
    """The kind of a storage error; None for an error that is not one, such as a bug.

    Libraries wrap errors, so the errors that led to this one count as well. If one of them is
    transient, so is the whole: its consequences (content that could not be parsed, because only
    half of it was read) are not damage.
    """
    if isinstance(error, ERRORS) or not isinstance(error, Exception):
        return None
    found = {_own_fault(each) for each in _causes(error)}
    return next((each for each in Fault if each in found), None)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and the errors that led to it, as a traceback shows them."""
    while error is not None:
        yield error
        if isinstance(error, BaseExceptionGroup):
            for each in error.exceptions:
                yield from _causes(each)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _own_fault(error: BaseException) -> Fault | None:
    if type(error).__module__.partition(".")[0] in _NETWORK_PACKAGES:
        return _network_fault(error)
    for types, classify in _CLASSIFIERS:
        if isinstance(error, types):
            return classify(error)
    return None


def _os_fault(error: OSError) -> Fault:
    # gcsfs turns HTTP code 403 into an error with this text.
    permanent = error.errno in _PERMANENT_ERRNOS or str(error).startswith("Forbidden")
    return Fault.PERMANENT if permanent else Fault.TRANSIENT


def _value_fault(error: ValueError) -> Fault:
    """TensorStore raises ``ValueError`` for every error, and parsers for bad content."""
    status = _status(error)
    if status == "UNAUTHENTICATED":
        return _credentials_fault()
    return _STATUS_FAULTS.get(status, Fault.DAMAGED)


def _status(error: Exception) -> str:
    found = _STATUS.match(str(error))
    return found.group(1) if found else ""


def _network_fault(error: BaseException) -> Fault:
    text = str(getattr(error, "code", None) or getattr(error, "status", None))
    code = int(text) if text.isdecimal() else 0
    names = {each.__name__ for each in type(error).__mro__}
    if code == 401 or names & {"DefaultCredentialsError", "RefreshError"}:
        return _credentials_fault()
    rejected = 400 <= code < 500 and code not in _RETRIED_HTTP_CODES
    return Fault.PERMANENT if rejected else Fault.TRANSIENT


def _credentials_fault() -> Fault:
    """Credentials are missing or were rejected. A machine of Google's gets them from its
    metadata server, which may not answer yet when a preempted machine starts again. Elsewhere, the
    user has to log in."""
    try:
        product = pathlib.Path("/sys/class/dmi/id/product_name").read_text()
    except OSError:
        product = ""
    return Fault.TRANSIENT if product.startswith("Google") else Fault.PERMANENT


# The first match counts.
_CLASSIFIERS: tuple[tuple[type | tuple[type, ...], Callable[[Any], Fault | None]], ...] = (
    (ERRORS, lambda _: None),
    ((FileNotFoundError, IsADirectoryError, NotADirectoryError), lambda _: Fault.DAMAGED),
    ((FileExistsError, PermissionError), lambda _: Fault.PERMANENT),
    ((MemoryError, ssl.SSLError), lambda _: Fault.TRANSIENT),
    (OSError, _os_fault),
    (ValueError, _value_fault),
    # Raised by parsers for content with another structure.
    ((LookupError, TypeError, AttributeError, EOFError), lambda _: Fault.DAMAGED),
    # Raised by JAX if a device's memory is full. Its other errors are not storage errors.
    (
        RuntimeError,
        lambda error: Fault.TRANSIENT if _status(error) == "RESOURCE_EXHAUSTED" else None,
    ),
)


def reason(error: BaseException) -> str:
    """An error as part of a one-line message."""
    if isinstance(error, ERRORS):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename!r}" if error.filename else error.strerror
    text = str(error).strip().partition("\n")[0][:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def final_error(
    what: str, error: BaseException, otherwise: Callable[[str], Exception]
) -> Exception:
    """The error that ends a run after a storage error.

    Args:
      what: what could not be done, as the beginning of the message.
      error: the storage error.
      otherwise: the type of error to return if it is not transient.
    """
    if isinstance(error, TransientError):
        return TransientError(f"{what}: {error}")
    if fault(error) is Fault.TRANSIENT:
        return TransientError(f"{what}: {reason(error)}; the same command may work later")
    return otherwise(f"{what}: {reason(error)}")


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def call(
    what: str,
    function: Callable[[], T],
    log: Callable[[str], None] = _print,
    advice: str = "",
) -> T:
    """Calls a function, and calls it again after each transient error, with growing waits.

    Args:
      what: what could not be done if the function fails, as the beginning of a message.
      function: takes no arguments; must be safe to call again after a failure.
      log: called with a line of text before each wait.
      advice: the end of the message if the user must change something.

    Raises:
      TransientError: the last attempt also failed with a transient error.
      ConfigError: the user must change something.
      Exception: any other error of ``function``, such as damage, unchanged.
    """

    def log_wait(state: tenacity.RetryCallState) -> None:
        error = state.outcome and state.outcome.exception()
        seconds = state.next_action.sleep if state.next_action else 0.0
        log(f"{what}: {reason(error) if error else ''}; next attempt in {seconds:.0f} s")

    attempts = tenacity.Retrying(
        retry=tenacity.retry_if_exception(lambda error: fault(error) is Fault.TRANSIENT),
        wait=WAIT,
        stop=tenacity.stop_after_attempt(ATTEMPTS),
        before_sleep=log_wait,
        reraise=True,
    )
    try:
        return attempts(function)
    except Exception as error:
        if fault(error) not in (Fault.TRANSIENT, Fault.PERMANENT):
            raise
        raise final_error(what, error, lambda text: ConfigError(text + advice)) from error
