"""The small cases that Triton's interpreter can run, run by test_small_run.py in a process of its own.

float16, since the interpreter multiplies bfloat16 as bit patterns.
"""

import sys
from typing import Any

import torch
from triton.runtime import interpreter

from lorikeet_kernels.small_cases.small_case import largest_error
from lorikeet_kernels.small_run import CASES

_patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor_for_numpy(tensor: Any, scope: Any) -> None:
    """Triton 3.6 turns arrays of one element into loop bounds by int(), which NumPy 2.4 refuses."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_tensor_for_numpy


def main(names: list[str]) -> None:
    """A line a case, with what it took; raises at the first wrong one."""
    for case in CASES:
        if case.needs_gpu or (names and case.name not in names):
            continue
        problem = case.build(torch.float16)
        error = largest_error(problem, torch.device("cpu"))
        print(case.name, error, flush=True)
        assert error <= problem.tolerance, (case.name, error)


if __name__ == "__main__":
    main(sys.argv[1:])
