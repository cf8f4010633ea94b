"""Threads that read bodies one after the other leave their holes in one heap."""

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import ctypes, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from splittime.core.this_process import share_one_heap

MB = 2**20
if sys.argv[1] == "shared":
    share_one_heap()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def taken(num_bytes):
    block = libc.malloc(num_bytes)
    ctypes.memset(block, 1, num_bytes)
    return block

def bodies():
    libc.free(taken(30 * MB))  # by itself malloc would learn from this that 30 MB are usual
    large = []
    for _ in range(5):
        large.append(taken(3 * MB))
        taken(5000)  # stays
    for block in large:
        libc.free(block)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / MB

readers = [ThreadPoolExecutor(1) for _ in range(5)]  # threads that live on, as a server's do
resident_mb = [reader.submit(bodies).result() for reader in readers]
print(resident_mb[0], resident_mb[-1])
"""


def grown_mb(how: str) -> float:
    """Return by how much a process grew with four more threads that read what one had read."""
    told = subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, check=True, timeout=60)
    first, last = map(float, told.stdout.split())
    return last - first


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc has other habits")
def test_bodies_leave_their_holes_in_one_heap():
    assert grown_mb("each its own") > 40  # else the test sees none
    assert grown_mb("shared") < 4
