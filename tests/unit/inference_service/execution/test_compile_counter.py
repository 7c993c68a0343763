"""What is compiled or captured after a start is counted."""

from collections.abc import Iterator
from typing import Any

import pytest
import triton

from inference_service.execution.compile_counter import CompileCounter


@pytest.fixture
def runtime() -> Iterator[Any]:
    """Triton's hooks, left as they were."""
    found: Any = triton.knobs.runtime
    before = found.jit_post_compile_hook
    found.jit_post_compile_hook = None
    yield found
    found.jit_post_compile_hook = before


def test_only_what_comes_after_the_start_counts(runtime: Any) -> None:
    """Kernels by Triton's hook, graphs by their number; a second counter takes nothing from the first."""
    graphs: Any = [1, 2]
    first = CompileCounter(graphs)
    runtime.jit_post_compile_hook(key="a", repr="kernel", already_compiled=False)
    graphs.append(3)
    first.ready()
    assert first.since_ready() == 0
    second = CompileCounter([])  # type: ignore[arg-type]
    second.ready()
    runtime.jit_post_compile_hook(key="b", repr="kernel", already_compiled=False)
    assert (first.since_ready(), second.since_ready()) == (1, 1)
    graphs.append(4)
    assert (first.since_ready(), second.since_ready()) == (2, 1)
