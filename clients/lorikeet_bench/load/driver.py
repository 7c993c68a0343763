"""Sends a planned load to a target and keeps what came, closed or open loop."""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass

from lorikeet_bench.load.arrivals import ClosedLoop
from lorikeet_bench.load.generator_cost import CostMeter
from lorikeet_bench.load.plan import LoadPlan, PlannedRequest
from lorikeet_bench.load.record import RequestRecord, Target


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    """All measured requests, in the order of sending; the load began at `begun_s`.

    `until_s` is the end of a load of planned duration, None for one of planned requests. `warm_up` was sent
    before and is not measured; whether its answers are right is judged all the same.
    """

    plan: LoadPlan
    records: tuple[RequestRecord, ...]
    warm_up: tuple[RequestRecord, ...]
    begun_s: float
    until_s: float | None
    meter: CostMeter


async def run_load(target: Target, plan: LoadPlan) -> LoadOutcome:
    """Warm up, send the load, wait for every answer."""
    warm_up: list[RequestRecord] = []
    await asyncio.gather(*(_one(target, RequestRecord(request), warm_up) for request in plan.warm_up()))
    records: list[RequestRecord] = []
    meter = CostMeter()
    async with meter:
        begun_s = time.perf_counter()
        until_s = None if plan.duration_s is None else begun_s + plan.duration_s
        requests = plan.requests()
        if isinstance(plan.arrivals, ClosedLoop):
            workers = (_worker(target, requests, until_s, records) for _ in range(plan.arrivals.concurrency))
            await asyncio.gather(*workers)
        else:
            await _open_loop(target, requests, begun_s, until_s, records)
    for record in (*warm_up, *records):
        target.settle(record)
    records.sort(key=lambda record: record.request.index)
    return LoadOutcome(plan, tuple(records), tuple(warm_up), begun_s, until_s, meter)


async def _worker(
    target: Target, requests: Iterator[PlannedRequest], until_s: float | None, records: list[RequestRecord]
) -> None:
    for request in requests:
        if until_s is not None and time.perf_counter() >= until_s:
            return
        await _one(target, RequestRecord(request), records)


async def _open_loop(
    target: Target,
    requests: Iterator[PlannedRequest],
    begun_s: float,
    until_s: float | None,
    records: list[RequestRecord],
) -> None:
    async with asyncio.TaskGroup() as group:
        for request in requests:
            assert request.arrival_s is not None
            due_s = begun_s + request.arrival_s
            if until_s is not None and due_s >= until_s:
                return
            if (wait_s := due_s - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            group.create_task(_one(target, RequestRecord(request), records))


async def _one(target: Target, record: RequestRecord, records: list[RequestRecord]) -> None:
    records.append(record)
    record.sent_s = time.perf_counter()
    await target.send(record)
    record.end_s = time.perf_counter()
