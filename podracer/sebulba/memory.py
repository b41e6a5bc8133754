"""Keeps freed memory for the next trajectory, where the CPU is what actors and learners run on.

glibc gives large blocks back to the kernel when they are freed, and the kernel clears each page of
a new one. An update on a CPU takes and frees a few blocks of the size of all its trajectories: of
Atari, this made a thousand steps take 0.50 CPU seconds, not 0.39 (benchmarks/README.md).
"""

import ctypes
import os

# Of glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8
LARGEST = 2**31 - 1


def keep_freed() -> bool:
    """Makes glibc keep what is freed; whoever has set it up from outside is left alone.

    Returns:
      Whether it does so now; not on other C libraries.
    """
    if "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # No block straight from the kernel, none given back, and one heap for all threads: those of
    # threads that come and go are small, and a large block would not fit.
    settings = {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: LARGEST, M_ARENA_MAX: 1}
    return all(mallopt(name, value) for name, value in settings.items())
