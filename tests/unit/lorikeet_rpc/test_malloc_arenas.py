"""The limit on glibc's arenas holds, and is harmless where there is no glibc."""

import subprocess
import sys

import pytest

_COUNT = """
import ctypes, sys, threading
from lorikeet_rpc.malloc_arenas import limit_malloc_arenas
libc = ctypes.CDLL(None)
if not hasattr(libc, "malloc_info"):
    sys.exit(77)
if sys.argv[1] == "limited":
    limit_malloc_arenas()
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


def num_arenas(word: str) -> int:
    """Arenas of a process whose eight threads all allocated at once."""
    done = subprocess.run(
        [sys.executable, "-c", _COUNT, word], capture_output=True, text=True, check=False, timeout=60
    )
    if done.returncode == 77:
        pytest.skip("no glibc here")
    assert done.returncode == 0, done.stderr
    return done.stdout.count("<heap nr=")


def test_threads_share_two_arenas() -> None:
    """Without the limit the same process has more: the test can fail."""
    assert num_arenas("limited") <= 2 < num_arenas("not limited")
