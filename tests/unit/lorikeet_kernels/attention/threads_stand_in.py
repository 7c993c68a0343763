"""Threads in Triton's interpreter: a program's partitions, programs that wait for one another, and copies.

A thread knows its program by a context variable, which threads that it starts inherit. Nobody waits for ever:
whoever waits gives up when someone has failed, or when nothing has moved for long.
"""

import inspect
import itertools
import random
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, Literal

from triton.runtime import interpreter

PATIENCE_S = 30.0
COPY_S = 1e-4
_language_lock = threading.RLock()
"""Of what the interpreter does at a device function's call, which knows no threads."""

_program: ContextVar[tuple[int, int, int]] = ContextVar("program", default=(0, 0, 0))


@dataclass(frozen=True)
class Slowness:
    """One program's copies or products take so long, in which others do all that they need not wait for."""

    program: int
    kind: Literal["copies", "products"]
    seconds: float


_slowness: ContextVar[Slowness | None] = ContextVar("slowness", default=None)


class _Progress:
    """What those who wait look at."""

    def __init__(self) -> None:
        self.failures: list[BaseException] = []
        self.moved_s = 0.0

    def move(self) -> None:
        self.moved_s = time.monotonic()


_progress = _Progress()


def move() -> None:
    """Something has happened that others may wait for."""
    _progress.move()


def keep_waiting() -> None:
    """Raise where what is waited for will not come."""
    if _progress.failures:
        raise RuntimeError("waits for someone who has failed") from _progress.failures[0]
    if time.monotonic() - _progress.moved_s > PATIENCE_S:
        raise TimeoutError("waits for something that nobody does")


def _start(work: Callable[[], None]) -> threading.Thread:
    def try_work() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 (run_together raises it)
            _progress.failures.append(error)

    thread = threading.Thread(target=copy_context().run, args=(try_work,))
    thread.start()
    return thread


def run_together(tasks: Sequence[Callable[[], Any]]) -> list[Any]:
    """What the tasks return, all of which run at once."""
    results: list[Any] = [None] * len(tasks)

    def work(index: int, task: Callable[[], Any]) -> None:
        results[index] = task()

    move()
    for thread in [_start(partial(work, index, task)) for index, task in enumerate(tasks)]:
        thread.join()
    if _progress.failures:
        raise _progress.failures[0]
    return results


def take_time(kind: Literal["copies", "products"]) -> None:
    """As much as it takes here."""
    slow = _slowness.get()
    is_slow = slow is not None and (slow.program, slow.kind) == (_program.get()[0], kind)
    time.sleep(slow.seconds if slow is not None and is_slow else COPY_S * random.expovariate(1.0))


def later(happen: Callable[[], None]) -> threading.Thread:
    """Have a copy happen soon, in no order."""

    def work() -> None:
        take_time("copies")
        happen()

    return _start(work)


def let_programs_meet(kernel: Any) -> None:
    """Have all programs of the kernel's launches run at once: the first one starts all."""
    body = kernel.rewrite()

    def run(index: tuple[int, int, int], arguments: dict[str, Any]) -> None:
        _program.set(index)
        body(**arguments)

    @wraps(body)
    def programs(**arguments: Any) -> None:
        if _program.get() == (0, 0, 0):
            x, y, z = interpreter.interpreter_builder.grid_dim
            indices = itertools.product(range(x), range(y), range(z))
            run_together([partial(run, index, arguments) for index in indices])

    vars(programs)["__signature__"] = inspect.signature(body)
    kernel.rewritten_fn[kernel.fn] = programs


@contextmanager
def slowing(slowness: Slowness) -> Generator[None]:
    """Of launches within."""
    token = _slowness.set(slowness)
    try:
        yield
    finally:
        _slowness.reset(token)


class _Builder(interpreter.InterpreterBuilder):
    """One for all threads."""

    @property
    def grid_idx(self) -> tuple[int, int, int]:
        """The asking thread's program."""
        return _program.get()

    @grid_idx.setter
    def grid_idx(self, index: tuple[int, int, int]) -> None:
        _program.set(index)


def _patch_once(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The interpreter's change of a module's languages, which it makes anew at every call, once a launch.

    Also saves most of the time.
    """
    scopes: dict[int, Any] = {}

    def patch_new(function: Any) -> Any:
        body = inspect.unwrap(function)
        with _language_lock:
            key = id(body.__globals__)
            if key not in scopes:
                scopes[key] = scope = patch(body)
                restore = scope.restore

                def restore_all() -> None:
                    scopes.clear()
                    restore()

                scope.restore = restore_all
            return scopes[key]

    return patch_new


def _patch_numbers(patch: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Triton 3.6 turns arrays of one element into numbers by int(), which NumPy 2.4 refuses."""

    def number(self: Any) -> int:
        return int(self.handle.data.item())

    def patch_tensor(tensor: Any, scope: Any) -> None:
        if (
            getattr(tensor, "__index__", None) is not number
        ):  # else other threads would see the interpreter's own for a while
            patch(tensor, scope)
            scope.set_attr(tensor, "__index__", number)
            scope.set_attr(tensor, "__int__", number)

    return patch_tensor


def install() -> None:
    """Let the interpreter's programs have threads."""
    interpreter._patch_lang = _patch_once(interpreter._patch_lang)
    interpreter._patch_lang_tensor = _patch_numbers(interpreter._patch_lang_tensor)
    interpreter.interpreter_builder.__class__ = _Builder
    rewrite = interpreter.InterpretedFunction.rewrite

    def rewrite_alone(self: Any) -> Any:
        with _language_lock:
            return rewrite(self)

    interpreter.InterpretedFunction.rewrite = rewrite_alone
