"""Large blocks that were freed serve the next trajectories."""

import ctypes
import os
import pathlib
import subprocess
import sys

import pytest

# Pages that 20 blocks of 100 MB are made of, taken and freed one after the other in a thread.
SCRIPT = """
import resource, runpy, sys, threading

keep_freed = runpy.run_path("podracer/sebulba/memory.py")["keep_freed"]

def faults():
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt

def take():
    bytearray(100_000_000)
    before = faults()
    for _ in range(20):
        bytearray(100_000_000)
    print(faults() - before)

print(keep_freed() if "keep" in sys.argv else None)
thread = threading.Thread(target=take)
thread.start()
thread.join()
"""
GLIBC = hasattr(ctypes.CDLL(None), "gnu_get_libc_version")
pytestmark = pytest.mark.skipif(not GLIBC, reason="the setting is one of glibc")
CLEAN = {
    name: value
    for name, value in os.environ.items()
    if name != "GLIBC_TUNABLES" and not name.startswith("MALLOC_")
}


def answers(*arguments: str, **environment: str) -> list[str]:
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments],
        cwd=pathlib.Path(__file__).parent.parent,
        env={**CLEAN, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return run.stdout.split()


def test_large_blocks_are_kept_for_the_next_one():
    done, kept = answers("keep")
    assert done == "True"
    _, fresh = answers()
    # A block has 24,414 pages of 4 KB; where pages are larger, it has fewer.
    assert int(fresh) > 1000
    assert int(kept) < int(fresh) / 10


def test_what_was_set_from_outside_stays():
    assert answers("keep", MALLOC_ARENA_MAX="4")[0] == "False"
    assert answers("keep", GLIBC_TUNABLES="glibc.malloc.trim_threshold=1")[0] == "False"
