"""Counts the experts that decode steps read: the backend of a routing probe's engine process.

It sees each layer's routing by standing in front of `Experts.__call__`, for the life of that process only.
"""

import dataclasses
import inspect
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from inference_service.execution.backend import load_backend
from inference_service.execution.config import BackendConfig
from inference_service.layers.moe import Experts
from inference_service.ports import Backend
from lorikeet_bench.engine.watched_runner import DecodeStep, WatchedBackend, WatchedRunner, trace_file
from lorikeet_bench.load.routing import RoutedStep

# The switch under which the backend replays graphs, in which no layer's code runs.
_GRAPH_FIELDS = ("cuda_graphs",)


def load_watched_backend(config: BackendConfig) -> Backend:
    """The real backend without graphs, whose decode steps' routing is written to the trace, a line a step."""
    fields = {field.name for field in dataclasses.fields(config)}
    eager = dataclasses.replace(config, **{name: False for name in _GRAPH_FIELDS if name in fields})
    watch = _RoutingWatch(Path(trace_file()))
    watch.stand_in_front_of_experts()
    backend = load_backend(eager)
    return WatchedBackend(backend, WatchedRunner(backend.runner, watch.step))


class _RoutingWatch:
    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._slots: np.ndarray | None = None  # [T] of the decode step that runs
        self._layers = self._num_experts = self._top_k = self._experts = self._pairs = 0

    def stand_in_front_of_experts(self) -> None:
        call = Experts.__call__
        signature = inspect.signature(call)

        def watched(*arguments: Any, **named: Any) -> Any:
            if self._slots is not None:
                given = signature.bind(*arguments, **named).arguments
                self._count(given["topk_ids"], int(given["self"].gate_up.weight.shape[0]))
            return call(*arguments, **named)

        Experts.__call__ = watched  # pyright: ignore[reportAttributeAccessIssue]

    @contextmanager
    def step(self, step: DecodeStep | None) -> Generator[None]:
        if step is None:
            yield
            return
        self._slots = np.array(step.slots)
        self._layers = self._experts = self._pairs = 0
        try:
            yield
        finally:
            slots, self._slots = self._slots, None
            values, counts = np.unique(slots, return_counts=True)
            rows_by_slot = dict(zip(values.tolist(), counts.tolist(), strict=True))
            routed = RoutedStep(
                self._layers, self._num_experts, self._top_k, rows_by_slot, self._experts, self._pairs
            )
            self._file.write(msgspec.json.encode(routed) + b"\n")

    def _count(self, topk_ids: Any, num_experts: int) -> None:
        assert self._slots is not None
        # Rows beyond the step's are padding. One copy a layer waits for the device; nobody is timing it here.
        ids = topk_ids[: len(self._slots)].cpu().numpy()  # [T, K]
        has_adapter = self._slots >= 0
        pairs = ids[has_adapter] + num_experts * self._slots[has_adapter, None]
        self._layers += 1
        self._num_experts, self._top_k = num_experts, ids.shape[1]
        self._experts += len(np.unique(ids))
        self._pairs += len(np.unique(pairs))
