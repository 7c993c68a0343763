"""`python -m lorikeet_kernels.small_run`: a few small launches of every kernel, against the references.

Made to run under `compute-sanitizer`, which slows launches 10 to 50 times: sizes are the smallest that reach
the kernels' masks, references are computed on the CPU, and kernels are compiled before the first launch. For
memcheck set PYTORCH_NO_CUDA_MEMORY_CACHING=1: only then has each tensor an allocation of its own, and what is
beyond its end is nobody's. `make sanitize` does all that.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module

import torch
from triton.errors import TritonError
from triton.runtime.jit import JITFunction

from lorikeet_kernels.launch.compile_ahead import compile_ahead
from lorikeet_kernels.small_cases import (
    attention_cases,
    dense_cases,
    expert_cases,
    lora_cases,
    sampling_cases,
)
from lorikeet_kernels.small_cases.small_case import SmallCase, SmallProblem, largest_error

CASES: tuple[SmallCase, ...] = (
    *dense_cases.CASES,
    *attention_cases.CASES,
    *lora_cases.CASES,
    *expert_cases.CASES,
    *sampling_cases.CASES,
)
DTYPE = torch.bfloat16


def _watch(names: set[str], launched: set[str]) -> None:
    """Have every launch of these kernels leave its name in `launched`."""

    def note(name: str, *args: object, **options: object) -> None:
        del args, options
        launched.add(name)

    for name in names:
        module, _, function = name.rpartition(".")
        kernel: JITFunction[object] = getattr(import_module(f"lorikeet_kernels.{module}"), function)
        kernel.add_pre_run_hook(partial(note, name))


def run_case(case: SmallCase, problem: SmallProblem, launched: set[str], device: torch.device) -> bool:
    """Print the case's line; whether its kernels were launched, and their results are right."""
    launched.clear()
    try:
        error, failure = largest_error(problem, device), ""
    except (RuntimeError, TritonError) as raised:
        # The next case may run all the same: too much shared memory leaves nothing behind.
        error, failure = float("inf"), f"{type(raised).__name__}: {str(raised).partition(chr(10))[0]}"
    missing = ", ".join(sorted(set(case.kernels) - launched))
    is_right = error <= problem.tolerance and not missing
    verdict = "ok" if is_right else failure or (f"not launched: {missing}" if missing else "WRONG")
    names = ", ".join(sorted(launched))
    sys.stdout.write(f"{case.name:22} {error:9.2e} of {problem.tolerance:7.0e}  {verdict}  {names}\n")
    sys.stdout.flush()
    return is_right


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line a case; 1 where a result is wrong, 2 where there is no GPU or no such case."""
    parser = argparse.ArgumentParser(prog="python -m lorikeet_kernels.small_run", description=__doc__)
    parser.add_argument("--only", default="", metavar="SUBSTR", help="cases whose name or kernels contain it")
    parser.add_argument("--list", action="store_true", help="name the cases and their kernels, and run none")
    parser.add_argument("--threads", type=int, default=min(16, os.cpu_count() or 1), help="that compile")
    options = parser.parse_args(arguments)
    cases = [c for c in CASES if any(options.only in text for text in (c.name, *c.kernels))]
    if not cases:
        sys.stderr.write(f"small_run: no case contains {options.only!r}; --list names them\n")
        return 2
    if options.list:
        for case in cases:
            sys.stdout.write(f"{case.name:22} {', '.join(case.kernels)}\n")
        return 0
    if not torch.cuda.is_available():
        sys.stderr.write("small_run: needs a GPU, torch.cuda.is_available() is False here\n")
        return 2
    device = torch.device("cuda")
    problems = [case.build(DTYPE) for case in cases]

    def launch_all() -> None:
        for problem in problems:
            problem.launch(device)

    compiled = compile_ahead(launch_all, options.threads)
    sys.stdout.write(f"{torch.cuda.get_device_name()}: {len(cases)} cases, {compiled} kernels compiled\n")
    launched: set[str] = set()
    _watch({name for case in cases for name in case.kernels}, launched)
    right = [run_case(c, problem, launched, device) for c, problem in zip(cases, problems, strict=True)]
    sys.stdout.write(f"{sum(right)} of {len(cases)} cases right\n")
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
