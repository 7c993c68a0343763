"""Timing of launches on a GPU: CUDA graphs over several input sets, taking turns, medians."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch


def call_each(calls: Iterable[Callable[[], object]]) -> None:
    """Make each call once, for `compile_ahead`."""
    for call in calls:
        call()


def capture(
    calls: Sequence[Callable[[], None]], stream: torch.cuda.Stream | None = None
) -> torch.cuda.CUDAGraph:
    """One graph of all `calls`, each made once before: nothing compiles while capturing.

    Its nodes remember the priority of the `stream` that they were captured on.
    """
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    return graph


def time_interleaved(
    ways: Mapping[str, Sequence[Callable[[], None]]],
    *,
    rounds: int = 9,
    sample_s: float = 4e-4,
    stream: torch.cuda.Stream | None = None,
) -> dict[str, float]:
    """Median microseconds of one call of each way; all graphs take turns, so that a drift hits all alike."""
    graphs = {name: (capture(calls, stream), len(calls)) for name, calls in ways.items()}
    once = {name: _seconds(graph, 1) for name, (graph, _) in graphs.items()}
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, (graph, count) in graphs.items():
            replays = max(1, min(50, int(sample_s / once[name])))
            samples[name].append(_seconds(graph, replays) / (replays * count))
    return {name: statistics.median(values) * 1e6 for name, values in samples.items()}


def _seconds(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return max(start.elapsed_time(end) * 1e-3, 1e-7)
