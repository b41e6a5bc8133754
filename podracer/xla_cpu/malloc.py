"""Makes glibc keep freed memory for later allocations, where actors and learners run on a CPU.

By default glibc returns large blocks to the kernel when they are freed, and the kernel clears every
page of a new one. An update on a CPU allocates and frees a few blocks of the size of all its
trajectories. Keeping them lowered the cost of a thousand Atari steps from 0.50 to 0.39 CPU seconds
(benchmarks/README.md).
"""

import ctypes
import os

# Parameters of mallopt, from glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8
LARGEST = 2**31 - 1


def keep_freed_memory() -> bool:
    """Makes glibc keep freed memory, unless environment variables configure malloc.

    Returns:
      Whether the setting was made; False with other C libraries, which have no such setting.
    """
    if "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # No block is allocated with mmap, none is returned to the kernel, and all threads share one
    # heap, because the heaps of short-lived threads are too small for large blocks.
    settings = {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: LARGEST, M_ARENA_MAX: 1}
    return all(mallopt(name, value) for name, value in settings.items())
