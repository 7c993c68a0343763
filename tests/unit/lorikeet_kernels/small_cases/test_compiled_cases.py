"""What Triton's interpreter takes, its compiler may refuse: small cases for a Hopper card, without one."""

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from triton import knobs
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import KernelInterface

from lorikeet_kernels.launch.compile_ahead import compile_ahead
from lorikeet_kernels.small_cases.small_case import SmallCase
from lorikeet_kernels.small_run import CASES
from tests.support.hopper_tensors import hopper_tensors

DTYPE = torch.bfloat16
SHARED_MEMORY = 227 * 1024  # of a program
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


class _ParsedError(Exception):
    """The first IR is made."""


@pytest.fixture(autouse=True)
def _compiles_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@contextmanager
def only_parsing() -> Generator[set[str]]:
    """Have launches make their kernels' first IR and no more; collect the kernels' names."""
    parsed: set[str] = set()

    def ending_with(make_ir: Callable[..., object]) -> Callable[..., NoReturn]:
        def parse(*given: Any) -> NoReturn:
            make_ir(*given)
            raise _ParsedError

        return parse

    def only_parse(kernel: Any, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            with suppress(_ParsedError):
                kernel.run(*args, grid=grid, warmup=True, **options)
            parsed.add(f"{kernel.__module__.removeprefix('lorikeet_kernels.')}.{kernel.__name__}")

        return launch

    with pytest.MonkeyPatch.context() as patch:
        for kind in (ASTSource, GluonASTSource):
            patch.setattr(kind, "make_ir", ending_with(kind.make_ir))
        interface: Any = KernelInterface
        patch.setattr(interface, "__getitem__", only_parse)
        yield parsed


@each_case
def test_kernels_parse(case: SmallCase) -> None:
    """Names, types and shapes are what the compiler takes, in all kernels that the case names."""
    problem = case.build(DTYPE)
    with hopper_tensors() as card, only_parsing() as parsed:
        problem.launch(card)
    assert not set(case.kernels) - parsed


@pytest.mark.long
@each_case
def test_kernels_compile(case: SmallCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """All the way, and what they share fits a Hopper card."""
    shared: dict[str, int] = {}

    def note(*, src: Any, metadata: dict[str, Any], **_: object) -> None:
        shared[src.name] = max(metadata["shared"], shared.get(src.name, 0))

    compilation: Any = knobs.compilation
    monkeypatch.setattr(compilation, "listener", note)
    problem = case.build(DTYPE)

    def ask() -> None:
        problem.launch(card)

    with hopper_tensors() as card:
        compile_ahead(ask, os.cpu_count() or 1)
    assert {name: used for name, used in shared.items() if used > SHARED_MEMORY} == {}
