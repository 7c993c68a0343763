"""Looks at the routing of a load that was measured, in an engine of its own and outside of any timing.

The measured requests are repeated with the tokens they had been given, cut at the beginning, the middle and
near the end of their answers: a model that falls into a rut does so late.
"""

import asyncio
import os
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec

from inference_service.engine.engine_client import EngineClient
from lorikeet_bench.engine.launch import loaded_engine
from lorikeet_bench.engine.plan import EnginePlan
from lorikeet_bench.engine.target import EngineTarget
from lorikeet_bench.engine.watched_runner import TRACE_VARIABLE
from lorikeet_bench.load.lengths import LoadError
from lorikeet_bench.load.plan import LoadPlan, PlannedRequest
from lorikeet_bench.load.record import RequestRecord
from lorikeet_bench.load.routing import RoutedStep, RoutingSummary, summarize_routing
from lorikeet_bench.load.samples import Sample, SampleKeeper
from lorikeet_contract.schema import LoraSchema, SiteKind

_FACTORY = "lorikeet_bench.engine.routing_watch:load_watched_backend"
# Where in their answers the requests are looked at, as shares of what is left before the end.
_PLACES = (0.0, 0.5, 1.0)


class _GivenPrompts:
    """Prompts by request, for a target. Stands in for `TokenPrompts`."""

    def __init__(self, prompts: dict[int, tuple[int, ...]]) -> None:
        self._prompts = prompts

    def ids(self, request: PlannedRequest) -> tuple[int, ...]:
        return self._prompts[request.index]


async def probe_routing(
    plan: EnginePlan,
    points: Sequence[LoadPlan],
    keeper: SampleKeeper,
    num_steps: int,
    tokens: tuple[int, ...],
) -> list[RoutingSummary | None]:
    """Per point, the routing of about 3 * `num_steps` decode steps; None for a model without experts.

    Raises:
        LoadError: steps ran of which nothing was seen.
    """
    with _trace() as trace:
        async with loaded_engine(plan, tokens, _FACTORY) as engine:
            digests = [adapter.digest for adapter in engine.store.adapters]
            return [
                await _probe(engine.client, keeper.samples(point), digests, num_steps, trace)
                for point in points
            ]


@contextmanager
def _trace() -> Generator[Path]:
    with tempfile.TemporaryDirectory(prefix="lorikeet-routing-") as directory:
        path = Path(directory) / "steps.jsonl"
        path.touch()
        os.environ[TRACE_VARIABLE] = str(path)
        try:
            yield path
        finally:
            del os.environ[TRACE_VARIABLE]


async def _probe(
    client: EngineClient, samples: Sequence[Sample], digests: Sequence[str], num_steps: int, trace: Path
) -> RoutingSummary | None:
    if not samples:
        return None
    before = _size(trace)
    shortest = min(len(sample.answer) for sample in samples)
    # The first to be prefilled decodes while the others are: it must not end before all decode together.
    prefill_tokens = sum(len(sample.prompt) + len(sample.answer) for sample in samples)
    num_prefills = -(-prefill_tokens // client.info.limits.max_step_tokens) + len(samples) // 8
    length = min(shortest, num_prefills + num_steps)
    for place in sorted({round(share * (shortest - length)) for share in _PLACES}):
        prompts = {s.request.index: s.prompt + s.answer[:place] for s in samples}
        target = EngineTarget(client, _GivenPrompts(prompts), digests)
        records = [RequestRecord(replace(s.request, output_tokens=length)) for s in samples]
        await asyncio.gather(*(target.send(record) for record in records))
        if failed := [record for record in records if not record.is_ok]:
            raise LoadError(f"the routing probe failed: {failed[0].status} {failed[0].message}")
    steps = _steps(trace, before)
    sites = LoraSchema.from_json(client.info.lora_schema).sites
    if not any(site.kind is SiteKind.EXPERTS for site in sites):
        return None
    return _summary(steps, len(samples))


def _size(trace: Path) -> int:
    return trace.stat().st_size


def _steps(trace: Path, begin: int) -> list[RoutedStep]:
    """What was written since the trace had `begin` bytes."""
    with trace.open("rb") as file:
        file.seek(begin)
        return [msgspec.json.decode(line, type=RoutedStep) for line in file]


def _summary(steps: Sequence[RoutedStep], open_at_once: int) -> RoutingSummary | None:
    """Of the steps that hold all requests, or of all where none does."""
    seen = [step for step in steps if step.layers]
    if len(seen) < len(steps):
        raise LoadError(
            f"the routing of {len(steps) - len(seen)} of {len(steps)} decode steps could not be seen: no "
            "layer's code ran in them, so they were replayed from a graph"
        )
    return summarize_routing([step for step in seen if step.rows == open_at_once] or seen)
