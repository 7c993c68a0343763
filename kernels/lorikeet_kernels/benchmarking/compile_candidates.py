"""Compiling before timing: nothing is timed while kernels are compiled."""

import os
import sys
import time
from collections.abc import Callable

from lorikeet_kernels.launch.compile_ahead import compile_ahead


def compile_candidates(ask: Callable[[], None]) -> None:
    """Compile what `ask` launches on all cores, and say how many kernels that were."""
    begin = time.monotonic()
    count = compile_ahead(ask, os.cpu_count() or 1)
    sys.stdout.write(f"compiled {count} kernels in {time.monotonic() - begin:.1f} s\n")
