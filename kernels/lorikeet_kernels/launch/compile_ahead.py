"""Compile on several threads what many launches ask for, before the first of them is launched.

A model asks for some two hundred kernels, each of about half a second of Triton's. A fifth of that, from
Python source to the first IR, holds the interpreter's lock; passes, LLVM and ptxas do not. So n threads take
about max(1 / 5, 1 / n) of the time.
"""

import gc
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from typing import Any

from triton import AsyncCompileMode
from triton.runtime.jit import KernelInterface


def compile_ahead(ask: Callable[[], None], num_threads: int) -> int:
    """Call `ask`, whose launches compile and launch nothing; returns how many kernels it asked for.

    What `ask` computes by kernels is whatever lies in memory: it must not read it, on the host or as indices
    of torch's ops. Afterwards the same launches find their kernels, which were compiled, or read from
    Triton's cache on disk where that has them. One call at a time in a process, and no launches beside it.

    Raises:
        Exception: what `ask` raised; else what the compiler raised for the first kernel, in the order of
            launches, that it refused.
    """

    def record() -> None:
        # A refused kernel must not keep the mode from ending, nor the others from being compiled.
        with AsyncCompileMode(threads, ignore_errors=True) as mode, _launching_nothing():
            modes.append(mode)
            try:
                ask()
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                mode.raw_futures.clear()  # the mode's end would wait for the cancelled ones, without an end
                raise

    modes: list[AsyncCompileMode] = []
    with _not_collecting(), ThreadPoolExecutor(num_threads, thread_name_prefix="compile") as threads:
        # Triton keeps the mode in a context variable: in a context of its own, no failure can leave it on.
        copy_context().run(record)
    futures: list[Any] = modes[0].raw_futures
    for future in futures:
        future.result()
    return len(futures)


@contextmanager
def _not_collecting() -> Generator[None]:
    """Keep the garbage collector from running within the threads' parsing.

    CPython 3.11 counts the depth of all parsers in one number. The collector can hand a parser's lock to
    another one, whose count then fails both: "AST constructor recursion depth mismatch" (cpython#106905).
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def _launching_nothing() -> Generator[None]:
    """Have `kernel[grid](...)` do as `kernel.warmup(..., grid=grid)`, for every kernel there is.

    Triton has no switch for that, and a wrapper of our own around each launch is one that a new op can
    forget: a kernel launched on what another one was kept from computing may read anywhere.
    """

    def only_compile(kernel: Any, grid: Any) -> Callable[..., Any]:
        return partial(kernel.run, grid=grid, warmup=True)

    interface: Any = KernelInterface
    before = interface.__getitem__
    interface.__getitem__ = only_compile
    try:
        yield
    finally:
        interface.__getitem__ = before
