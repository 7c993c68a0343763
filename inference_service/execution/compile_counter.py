"""Counts kernel compilations and graph captures: after the start there must be none."""

from typing import Any

import triton

from inference_service.execution.step_graphs import StepGraphs


class CompileCounter:
    """Notes every kernel that Triton compiles, or loads from its cache, in this process from now on."""

    def __init__(self, graphs: StepGraphs) -> None:
        self._graphs = graphs
        self._num_compiled = 0
        self._num_before = 0
        runtime: Any = triton.knobs.runtime  # pyright: ignore[reportAttributeAccessIssue]
        # Who counted before goes on counting: a process may hold more than one backend.
        self._before: Any = runtime.jit_post_compile_hook
        runtime.jit_post_compile_hook = self._note

    def ready(self) -> None:
        """What came until now was the start's."""
        self._num_before = self._total()

    def since_ready(self) -> int:
        """Kernels compiled and graphs captured since `ready`."""
        return self._total() - self._num_before

    def _total(self) -> int:
        return self._num_compiled + len(self._graphs)

    def _note(self, **given: object) -> None:
        self._num_compiled += 1
        if self._before is not None:
            self._before(**given)
