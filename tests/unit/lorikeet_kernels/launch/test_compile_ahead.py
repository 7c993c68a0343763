"""Launches that only compile: on a CPU, for a GPU that is not there."""

# A Triton kernel's arguments have no Python types.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.compiler.errors import CompilationError

from lorikeet_kernels.launch.compile_ahead import compile_ahead
from tests.support.hopper_driver import HopperDriver


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    config: Any = triton.runtime.driver
    monkeypatch.setattr(config, "_active", HopperDriver())


def make_kernel() -> Any:
    """A kernel that no test has compiled."""

    @triton.jit
    def add(out_ptr, x_ptr, ADDED: tl.constexpr):  # noqa: ANN001, ANN202
        tl.static_assert(ADDED != 13, "thirteen")
        tl.static_assert(ADDED != 17, "seventeen")
        tl.store(out_ptr, tl.load(x_ptr) + ADDED)

    return add


def launch(kernel: Any, *added: int) -> None:
    """One launch a number, over memory that holds anything."""
    x = torch.empty(1)
    for number in added:
        kernel[(1,)](x, x, ADDED=number)


def compiled(kernel: Any) -> set[int]:
    """For which numbers a launch would find a kernel."""
    cache = kernel.device_caches[0][0]
    return {entry.src.constants[(2,)] for entry in cache.values()}


def test_each_kernel_is_compiled_once_and_none_is_launched(tmp_path: Path) -> None:
    """Asked again they are there; the hook that counts compilations hears of each one once."""
    heard: list[object] = []

    def hear(**given: object) -> None:
        heard.append(given["key"])

    runtime: Any = triton.knobs.runtime  # pyright: ignore[reportAttributeAccessIssue]
    before, runtime.jit_post_compile_hook = runtime.jit_post_compile_hook, hear
    try:
        kernel = make_kernel()
        assert compile_ahead(lambda: launch(kernel, 1, 2, 1, 3), num_threads=2) == 3
        assert compiled(kernel) == {1, 2, 3}
        assert len(heard) == 3
        assert compile_ahead(lambda: launch(kernel, 3, 2), num_threads=2) == 0
        assert len(heard) == 3
    finally:
        runtime.jit_post_compile_hook = before
    assert len(list(tmp_path.rglob("add.cubin"))) == 3


def test_the_first_refused_kernel_is_what_fails() -> None:
    """In the order of launches, however many threads there are; the others are compiled all the same."""
    kernel = make_kernel()
    with pytest.raises(CompilationError, match="thirteen"):
        compile_ahead(lambda: launch(kernel, 1, 13, 17, 2), num_threads=4)
    assert compiled(kernel) == {1, 2}
    # Nothing of the failed call is left.
    assert compile_ahead(lambda: launch(kernel, 4), num_threads=1) == 1


def test_what_asks_may_fail_itself() -> None:
    """Its own error comes out, though kernels wait for a thread, and launches are launches again."""
    kernel = make_kernel()

    def ask() -> None:
        launch(kernel, 1, 3, 4)
        raise ValueError("of my own")

    launches = triton.runtime.jit.KernelInterface.__getitem__
    with pytest.raises(ValueError, match="of my own"):
        compile_ahead(ask, num_threads=1)
    assert triton.runtime.jit.KernelInterface.__getitem__ is launches
    assert compile_ahead(lambda: launch(kernel, 2), num_threads=1) == 1


@pytest.mark.parametrize("collects", [True, False])
def test_nothing_is_collected_meanwhile(collects: bool) -> None:
    """CPython 3.11's parsers fail in threads that the collector switches; it stays as it was afterwards."""
    kernel = make_kernel()
    heard: list[bool] = []

    def ask() -> None:
        heard.append(gc.isenabled())
        launch(kernel, 1)
        raise ValueError("of my own")

    was_on = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        with pytest.raises(ValueError, match="of my own"):
            compile_ahead(ask, num_threads=1)
        assert heard == [False]
        assert gc.isenabled() is collects
    finally:
        (gc.enable if was_on else gc.disable)()
