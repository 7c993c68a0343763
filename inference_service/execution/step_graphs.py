"""CUDA graphs of steps, one for each fixed shape, with adapters and without, over one memory pool."""

from dataclasses import dataclass
from typing import Any

import torch

from inference_service.execution.forward_pass import ForwardPass, Hidden
from inference_service.execution.step_buffers import StepInputs, StepShape


@dataclass(frozen=True, slots=True, eq=False)
class _Captured:
    graph: torch.cuda.CUDAGraph
    hidden: Hidden


class StepGraphs:
    """Runs the forward pass of fixed shapes: replayed where captured, launched one by one where not.

    Nothing is captured after `capture` was called for all shapes; on a CPU nothing ever is, and the same
    inputs run through the same buffers.
    """

    def __init__(self, forward: ForwardPass) -> None:
        self._forward = forward
        self._captured: dict[tuple[StepShape, bool], _Captured] = {}
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None

    def __len__(self) -> int:
        return len(self._captured)

    def run(self, inputs: StepInputs, *, has_adapters: bool) -> Hidden:
        """Enqueue the pass over a fixed shape's inputs; the result holds until the next `run`."""
        captured = self._captured.get((inputs.shape.of_forward, has_adapters))
        if captured is None:
            return self._forward.run(inputs, has_adapters=has_adapters)
        captured.graph.replay()
        return captured.hidden

    def capture(self, inputs: StepInputs, *, has_adapters: bool) -> None:
        """Capture a shape whose buffers hold a valid step; it runs once before. GPU only.

        The run before compiles what is new, fills the ops' workspaces and lets libraries load their kernels:
        none of that may happen in a capture. Threads that read adapters may pin memory meanwhile, hence the
        thread-local mode. torch.cuda.graph would empty the allocator's cache each time, which costs more than
        the capture.
        """
        device = self._forward.sampled.device
        if self._stream is None:
            # The pool gives a graph the memory of those before it only where all use one stream.
            # Higher than the side stream's priority, which a graph's nodes remember.
            self._stream = torch.cuda.Stream(device, priority=-1)
            self._pool = torch.cuda.graph_pool_handle()
        current = torch.cuda.current_stream(device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            self._forward.run(inputs, has_adapters=has_adapters)
            torch.cuda.synchronize(device)
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                hidden = self._forward.run(inputs, has_adapters=has_adapters)
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        self._captured[inputs.shape.of_forward, has_adapters] = _Captured(graph, hidden)
