"""Keeps a server's memory flat: what it freed goes back to the system. For `__main__` modules."""

import ctypes
import sys
import threading
import time
from typing import Any

_M_ARENA_MAX = -8  # malloc.h
_MAX_ARENAS = 2
_TRIM_EVERY_S = 10.0


def return_freed_memory(every_s: float = _TRIM_EVERY_S) -> None:
    """Let all threads share two of glibc's arenas, and give free pages back now and then; else nothing.

    Call it once, before any other thread starts. By default each of gRPC's threads gets an arena of its own,
    up to eight a core, and free pages between used ones stay: a front end grew from 42 to 55 MB over 67,000
    short calls, without one Python object more. With two arenas it stays below 47 MB, with trims at 43 MB.
    """
    libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
    if not hasattr(libc, "mallopt") or not hasattr(libc, "malloc_trim"):
        return
    libc.mallopt(_M_ARENA_MAX, _MAX_ARENAS)

    def trim() -> None:
        while True:
            time.sleep(every_s)
            libc.malloc_trim(0)  # ctypes lets the interpreter go on meanwhile

    threading.Thread(target=trim, name="malloc-trim", daemon=True).start()
