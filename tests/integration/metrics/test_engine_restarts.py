"""The node's series while its engine is dead, and while it is too busy to answer."""

import asyncio
import signal
from collections.abc import AsyncIterator

import grpc
import psutil
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lorikeet_bench import rigs
from tests.support.metered_stack import MeteredStack
from tests.support.request_journal import Journal
from tests.support.scrapes import Scrape, scrape

pytestmark = pytest.mark.asyncio(loop_scope="module")

COUNTERS = (
    "lorikeet_engine_steps_total",
    "lorikeet_engine_step_duration_seconds_count",
    "lorikeet_adapter_load_duration_seconds_count",
    "lorikeet_prefix_cache_query_tokens_total",
    "lorikeet_requests_finished_total",
    "lorikeet_output_tokens_total",
)
LIVE = (
    "lorikeet_requests_running", "lorikeet_requests_waiting", "lorikeet_adapter_leases",
    "lorikeet_kv_blocks_used", "lorikeet_adapter_arena_used_bytes", "lorikeet_host_pool_used_bytes",
    "lorikeet_adapters_resident",
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
)  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MeteredStack]:
    """One adapter."""
    root = tmp_path_factory.mktemp("restarts")
    base = rigs.write_copy_base(root / "base")
    async with MeteredStack(base, root / "stack") as running:
        await running.upload(rigs.write_moe_watermark(root / "a", 10), "demo/a")
        yield running


def engine_of(stack: MeteredStack) -> psutil.Process:
    """The engine process of the node."""
    assert stack.node.popen is not None
    (engine,) = (
        child
        for child in psutil.Process(stack.node.popen.pid).children()
        if "inference_service.engine.engine_process" in child.cmdline()
    )
    return engine


async def scraped(stack: MeteredStack) -> Scrape:
    """One answer, however old its word is."""
    return await asyncio.to_thread(scrape, stack.node_metrics)


def total(found: Scrape, name: str) -> float:
    """All samples of a name together."""
    return sum(found.samples(name).values())


async def test_a_dead_engine_and_its_return(stack: MeteredStack) -> None:
    """Gauges fall to 0, counters stay and then go on; what ran is counted as failed."""
    journal = Journal(stack)
    assert await journal.stream([1] * 9, adapter="demo/a", max_tokens=3) == "length"
    pieces: list[object] = []
    broken = asyncio.create_task(journal.stream([2], read=pieces, adapter="demo/a", max_tokens=4000))
    running = await stack.node_shows(lambda s: s.value("lorikeet_requests_running") == 1 and pieces)
    assert running.value("lorikeet_engine_up") == 1
    engine_of(stack).kill()
    assert await broken == "ENGINE_RESTARTING"
    dead = await stack.node_shows(lambda s: s.value("lorikeet_engine_up") == 0)
    assert {name: total(dead, name) for name in LIVE} == dict.fromkeys(LIVE, 0)
    assert not dead.samples("lorikeet_adapter_residency")
    assert dead.labels("vllm:lora_requests_info")["running_lora_adapters"] == ""
    assert dead.value("lorikeet_kv_blocks_capacity") == running.value("lorikeet_kv_blocks_capacity")
    assert await journal.stream([3], max_tokens=1) == "ENGINE_RESTARTING"
    back = await stack.node_shows(lambda s: s.value("lorikeet_engine_up") == 1)
    assert back.value("lorikeet_engine_restarts_total") == 1
    await until_served(journal)
    served = await stack.node_scrape()
    for earlier, later in ((running, dead), (dead, back), (back, served)):
        for name in COUNTERS:
            assert total(later, name) >= total(earlier, name), name
    assert total(served, COUNTERS[0]) > total(running, COUNTERS[0])
    assert served.by("lorikeet_adapter_load_duration_seconds_count", "stage")["read"] == 2
    assert {k: v for k, v in served.by("lorikeet_requests_finished_total", "reason").items() if v} == {
        "failed": 1,
        "length": 2,
    }
    assert served.by("lorikeet_requests_rejected_total", "reason") == journal.rejected


async def until_served(journal: Journal) -> None:
    """Ask until the new engine answers; it gets the catalog again by itself."""
    async with asyncio.timeout(60):
        while await journal.stream([4], adapter="demo/a", max_tokens=1) != "length":  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def test_a_busy_engine_holds_up_nobody(stack: MeteredStack) -> None:
    """It is asked once, the last known values are served with their age, and calls go on meanwhile."""
    before = await stack.node_shows(lambda s: s.value("lorikeet_engine_report_age_seconds") < 0.5)
    engine = engine_of(stack)
    engine.send_signal(signal.SIGSTOP)
    try:
        # Several scrapers at once, while a call that needs no engine is answered again and again.
        scrapes = [asyncio.create_task(scraped(stack)) for _ in range(4)]
        async with grpc.aio.insecure_channel(stack.node_address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            num_answers = 0
            while not all(task.done() for task in scrapes):
                await health.Check(health_pb2.HealthCheckRequest(), timeout=10)
                num_answers += 1
        assert num_answers > 10
        for found in await asyncio.gather(*scrapes):
            assert found.value("lorikeet_engine_up") == 1
            assert total(found, COUNTERS[0]) == total(before, COUNTERS[0])
        later = await scraped(stack)
        age_s = later.value("lorikeet_engine_report_age_seconds")
        assert age_s >= 1
    finally:
        engine.send_signal(signal.SIGCONT)
    fresh = await stack.node_shows(lambda s: s.value("lorikeet_engine_report_age_seconds") < age_s)
    assert fresh.value("lorikeet_engine_up") == 1
