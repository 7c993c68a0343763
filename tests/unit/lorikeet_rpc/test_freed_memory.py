"""Freed memory goes back to the system, and threads share two of glibc's arenas."""

import subprocess
import sys

import pytest

_START = """
import ctypes, sys, threading, time
from lorikeet_rpc.freed_memory import return_freed_memory
libc = ctypes.CDLL(None)
if not hasattr(libc, "malloc_info"):
    sys.exit(77)
if sys.argv[1] == "called":
    return_freed_memory(every_s=0.05)
"""
_ARENAS = """
barrier = threading.Barrier(8)
def work():
    barrier.wait()
    kept = [bytes(5000) for _ in range(100)]
    barrier.wait()
threads = [threading.Thread(target=work) for _ in range(8)]
[t.start() for t in threads]
[t.join() for t in threads]
libc.fdopen.restype = ctypes.c_void_p
libc.malloc_info(0, ctypes.c_void_p(libc.fdopen(1, b"w")))
libc.fflush(None)
"""
_PAGES = """
def held_mib():
    status = open("/proc/self/status").read()
    return int(status.split("RssAnon:")[1].split()[0]) >> 10
before = held_mib()
blocks = [bytes(20_000) for _ in range(5000)]  # below the size that malloc maps by itself
pins = blocks[::100]
del blocks
end = time.monotonic() + (30 if sys.argv[1] == "called" else 1)
while held_mib() - before > 20 and time.monotonic() < end:
    time.sleep(0.05)
print(held_mib() - before, len(pins))
"""


def outcome(code: str, word: str) -> str:
    """What a process prints that did or did not call the function first."""
    done = subprocess.run(
        [sys.executable, "-c", _START + code, word], capture_output=True, text=True, check=False, timeout=60
    )
    if done.returncode == 77:
        pytest.skip("no glibc here")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_threads_share_two_arenas() -> None:
    """Without the call the same process has more: the test can fail."""
    assert outcome(_ARENAS, "called").count("<heap nr=") <= 2
    assert outcome(_ARENAS, "not called").count("<heap nr=") > 2


def test_free_pages_between_used_ones_go_back() -> None:
    """95 MiB are freed, but a block here and there is kept; without the call they stay."""
    assert int(outcome(_PAGES, "called").split()[0]) <= 20
    assert int(outcome(_PAGES, "not called").split()[0]) > 20
