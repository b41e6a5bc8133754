"""Freed memory is kept for later allocations."""

import ctypes
import os
import pathlib
import subprocess
import sys

import pytest

# Prints whether memory is kept; then the page faults of a thread that allocates and frees 20 blocks
# of 100 MB one after the other.
SCRIPT = """
import resource, runpy, sys, threading

keep_freed_memory = runpy.run_path("podracer/xla_cpu/malloc.py")["keep_freed_memory"]

def faults():
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt

def allocate():
    bytearray(100_000_000)
    before = faults()
    for _ in range(20):
        bytearray(100_000_000)
    print(faults() - before)

print(keep_freed_memory() if "keep" in sys.argv else None)
if "allocate" in sys.argv:
    thread = threading.Thread(target=allocate)
    thread.start()
    thread.join()
"""
GLIBC = hasattr(ctypes.CDLL(None), "gnu_get_libc_version")
pytestmark = pytest.mark.skipif(not GLIBC, reason="the setting is of glibc")
CLEAN = {
    name: value
    for name, value in os.environ.items()
    if name != "GLIBC_TUNABLES" and not name.startswith("MALLOC_")
}


def output(*arguments: str, **environment: str) -> list[str]:
    """What the script prints with these arguments and environment variables."""
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments],
        cwd=pathlib.Path(__file__).parents[2],
        env={**CLEAN, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return run.stdout.split()


def test_large_blocks_are_kept_for_the_next_one():
    done, kept = output("keep", "allocate")
    assert done == "True"
    _, fresh = output("allocate")
    # A block has 24,414 pages of 4 KB; where pages are larger, it has fewer.
    assert int(fresh) > 1000
    assert int(kept) < int(fresh) / 10


def test_settings_of_the_environment_take_precedence():
    assert output("keep", MALLOC_ARENA_MAX="4") == ["False"]
    assert output("keep", GLIBC_TUNABLES="glibc.malloc.trim_threshold=1") == ["False"]
