"""What a small case is: kernels, random inputs on the CPU with the reference's answer, and a launch."""

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch

from lorikeet_kernels.testing import relative_error

T = TypeVar("T")

TOLERANCE = 5e-3
"""Relative error of 16-bit results whose inputs and reference were rounded as well."""


@dataclass(frozen=True, slots=True)
class SmallProblem:
    """`expected` by the reference on the CPU; `launch` moves the inputs, runs kernels and returns as many.

    Integers must be equal, but for as many places as `tolerance` says.
    """

    expected: tuple[torch.Tensor, ...]
    launch: Callable[[torch.device], tuple[torch.Tensor, ...]]
    tolerance: float = TOLERANCE


@dataclass(frozen=True, slots=True)
class SmallCase:
    """A named problem of a 16-bit dtype, and the kernels that its launch reaches.

    `kernels` are named by their module below lorikeet_kernels and their function. `needs_gpu`: Triton's
    interpreter does not run them, or not to the bit.
    """

    name: str
    kernels: tuple[str, ...]
    build: Callable[[torch.dtype], SmallProblem]
    needs_gpu: bool = False


def moved(value: T, device: torch.device) -> T:
    """A copy of a tensor, or of a dataclass or tuple of them, on `device`; all else as it is."""
    copied: Any = value
    if isinstance(value, torch.Tensor):
        copied = value.to(device, copy=True)
    elif isinstance(value, tuple):
        copied = tuple(moved(part, device) for part in value)  # pyright: ignore[reportUnknownVariableType]
    elif is_dataclass(value) and not isinstance(value, type):
        parts: dict[str, Any] = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
        copied = replace(value, **{name: moved(part, device) for name, part in parts.items()})
    return copied


def poisoned(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Memory for a result, NaN where the kernel writes nothing."""
    return torch.full(like.shape, float("nan"), dtype=like.dtype, device=device)


def error_of(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error of floats, infinite where what is no number differs; places that differ of integers."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return float("inf")
    if not expected.is_floating_point():
        return float((got != expected).sum())
    special = ~(got.isfinite() & expected.isfinite())
    if not torch.equal(got[special].nan_to_num(nan=0.5), expected[special].nan_to_num(nan=0.5)):
        return float("inf")
    return relative_error(got.masked_fill(special, 0.0), expected.masked_fill(special, 0.0))


def largest_error(problem: SmallProblem, device: torch.device) -> float:
    """Launch on `device` and compare; the worst of the results."""
    results = problem.launch(device)
    pairs = zip(results, problem.expected, strict=True)
    return max(error_of(got.cpu(), expected) for got, expected in pairs)
