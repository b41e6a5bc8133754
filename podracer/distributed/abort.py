"""Calls Python when a C++ library aborts the process.

JAX aborts a process from C++ when the coordinator rejects it or closes the connection. Python runs
its own signal handlers between bytecodes of the main thread, and thus never after an abort. A C
handler runs immediately, in the thread that aborts.
"""

import ctypes
import signal
from collections.abc import Callable


def on_abort(handler: Callable[[], None]) -> Callable[[], None]:
    """Installs a handler for the signal SIGABRT of this process.

    Args:
      handler: called in the thread that aborts. It should report the cause and end the process; if
        it returns, the abort continues.

    Returns:
      A function that restores the previous handler. Keep a reference to it while the
      handler is installed: it holds the callback that C calls.
    """
    # C keeps no reference to the callback.
    callback = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda _: handler())
    set_handler = ctypes.CDLL(None).signal
    set_handler.restype = ctypes.c_void_p
    set_handler.argtypes = (ctypes.c_int, ctypes.c_void_p)
    previous = set_handler(signal.SIGABRT, ctypes.cast(callback, ctypes.c_void_p))

    def restore(callback: object = callback) -> None:
        set_handler(signal.SIGABRT, previous)

    return restore
