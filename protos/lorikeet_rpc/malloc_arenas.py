"""Keeps a server's memory flat: fewer places for glibc to keep what was freed. For `__main__` modules."""

import ctypes
import sys

_M_ARENA_MAX = -8  # malloc.h
_MAX_ARENAS = 2


def limit_malloc_arenas() -> None:
    """Let all threads share two of glibc's arenas; call it before any thread starts. Nothing elsewhere.

    By default each of gRPC's threads gets an arena of its own, up to eight a core, and each keeps its own
    free memory: a front end grew from 42 to 55 MB over 67,000 short calls, without one Python object more.
    With two arenas it stays at 45 MB.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, _MAX_ARENAS)
