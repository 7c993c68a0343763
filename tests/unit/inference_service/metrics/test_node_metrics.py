"""A node's series over an engine without a model."""

import asyncio
import dataclasses

from inference_service.api.catalog import Catalog, CatalogAdapter, CatalogSnapshot
from inference_service.domain.adapter import ResidencyTier
from inference_service.domain.durations import DURATION_BOUNDS_S, DurationCounts, Durations
from inference_service.domain.engine import EngineStatus
from inference_service.domain.engine_report import (
    AdapterUse,
    EngineReport,
    LoadStage,
    ResidencyCounts,
    StageCounts,
)
from inference_service.metrics import NodeMetrics
from inference_service.metrics.adapter_names import AdapterNames
from inference_service.metrics.engine_totals import LifetimeTotals
from lorikeet_contract.names import AdapterName
from tests.support.declared_series import declared
from tests.support.fake_engine import FakeEngine
from tests.support.metrics_table import documented


async def test_declared_labels_are_the_documented_ones() -> None:
    """Also of what has no samples yet."""
    metrics = NodeMetrics(FakeEngine(), Catalog())
    assert declared(metrics.registry) == {row.name: row.labels for row in documented("node").values()}


async def test_the_engine_is_asked_by_scrapes_alone() -> None:
    """Counting a request asks it nothing, one scrape asks it once at most."""

    class Counting(FakeEngine):
        num_reports = 0

        async def report(self) -> EngineReport:
            self.num_reports += 1
            return await super().report()

    engine = Counting()
    metrics = NodeMetrics(engine, Catalog())
    metrics.requests.first_token(0.1)
    metrics.requests.next_tokens(0.1, 3)
    await asyncio.sleep(0.05)
    assert engine.num_reports == 0
    for number in (1, 2):
        await asyncio.to_thread(lambda: list(metrics.collect()))
        assert engine.num_reports <= number
    await becomes(metrics, "lorikeet_engine_up", 1)
    assert engine.num_reports > 0


async def test_an_engine_that_does_not_answer() -> None:
    """What it said before is shown, with its age; as soon as it answers, the new word is."""
    engine = FakeEngine()
    metrics = NodeMetrics(engine, Catalog())
    engine.running.add("one")
    await becomes(metrics, "lorikeet_requests_running", 1)
    engine.report_held = asyncio.Event()
    engine.running.add("two")
    assert await shown(metrics, "lorikeet_requests_running") == 1
    assert await shown(metrics, "lorikeet_engine_report_age_seconds") > 1
    engine.report_held.set()
    await becomes(metrics, "lorikeet_requests_running", 2)


async def test_a_dead_engine() -> None:
    """Its gauges are 0, and what it says meanwhile does not count."""
    engine = FakeEngine()
    metrics = NodeMetrics(engine, Catalog())
    engine.running.add("one")
    await becomes(metrics, "lorikeet_requests_running", 1)
    engine.die()
    await becomes(metrics, "lorikeet_engine_up", 0)
    assert await shown(metrics, "lorikeet_requests_running") == 0
    engine.revive()
    await becomes(metrics, "lorikeet_engine_up", 1)
    assert await shown(metrics, "lorikeet_engine_restarts_total") == 1
    assert await shown(metrics, "lorikeet_requests_running") == 1


async def test_names_hidden() -> None:
    """Digests stand where names would."""

    class Holding(FakeEngine):
        async def report(self) -> EngineReport:
            residency = ResidencyCounts((("a" * 64, ResidencyTier.ACTIVE), ("b" * 64, ResidencyTier.HOST)))
            return EngineReport(use=AdapterUse(waiting=("a" * 64, "c" * 64)), residency=residency)

    catalog = make_catalog(make_adapter("t/secret", "a" * 64), make_adapter("t/other", "c" * 64))
    for show, running, waiting in ((True, "t/secret", "t/other"), (False, "a" * 12, "c" * 12)):
        metrics = NodeMetrics(Holding(), catalog, show_names=show)
        await becomes(metrics, "lorikeet_engine_up", 1)
        families = await asyncio.to_thread(lambda m=metrics: {f.name: f for f in m.collect()})
        for name in ("vllm:lora_requests_info", "vllm_lora_requests_info"):
            (sample,) = families[name].samples
            assert sample.labels == {
                "max_lora": "4",
                "running_lora_adapters": running,
                "waiting_lora_adapters": waiting,
            }


def make_adapter(short: str, current: str, *others: str, **aliases: str) -> CatalogAdapter:
    """A catalog entry."""
    tenant, name = short.split("/")
    digests = frozenset((current, *others, *aliases.values())) - {""}
    return CatalogAdapter(AdapterName(tenant, name), current, aliases, digests)


def make_catalog(*adapters: CatalogAdapter, generation: int = 1) -> Catalog:
    """A catalog that has arrived."""
    catalog = Catalog()
    catalog.replace(CatalogSnapshot(generation, {}, adapters={a.name: a for a in adapters}))
    return catalog


def test_names_are_those_that_clients_use() -> None:
    """Current name, aliases, and the resource name where nothing else reaches a revision."""
    catalog = make_catalog(
        make_adapter("t/one", "1", "3", prod="2", blue="1"),
        make_adapter("u/same", "1"),
        make_adapter("t/new", ""),
    )
    names = AdapterNames(catalog)
    assert names.of(["1"]) == ["t/one", "t/one@blue", "u/same"]
    assert names.of(["2", "3"]) == ["t/one@prod", "tenants/t/adapters/one/revisions/3"]
    assert names.of(["4", ""]) == []
    catalog.replace(CatalogSnapshot(2, {}))
    assert names.of(["1"]) == []


def test_names_are_bounded() -> None:
    """However many aliases there are."""
    aliases = {f"a{n}": "1" for n in range(1000)}
    assert len(AdapterNames(make_catalog(make_adapter("t/x", "1", **aliases))).of(["1"])) == 256


def test_durations() -> None:
    """Each bound belongs to the bucket below it; nothing is lost above the last."""
    durations = Durations()
    for seconds in (*DURATION_BOUNDS_S, 0.0, 1e9):
        durations.add(seconds)
    counts = durations.counts()
    assert counts.counts == (2, *(1 for _ in DURATION_BOUNDS_S))
    assert counts.num == len(DURATION_BOUNDS_S) + 2
    assert counts.sum_s == sum(DURATION_BOUNDS_S) + 1e9
    assert (counts + DurationCounts()) == counts
    assert (counts + counts).num == 2 * counts.num


def test_totals_outlive_an_engine() -> None:
    """The next process begins at nothing, the sums go on."""
    durations = Durations()
    durations.add(0.002)
    stage = StageCounts(LoadStage.READ, durations.counts(), (("ADAPTER_PAYLOAD", 2),))
    report = EngineReport(
        EngineStatus(steps=5, preemptions=1),
        durations.counts(),
        residency=ResidencyCounts(slot_evictions=3, stages=(stage,)),
        prefix_query_tokens=7,
    )
    totals = LifetimeTotals()
    totals.take("one", dataclasses.replace(report, prefix_query_tokens=6))
    first = totals.take("one", report)
    assert first == totals.sums()
    second = totals.take("two", report)
    assert second.numbers == {name: 2 * number for name, number in first.numbers.items()}
    assert second.numbers["lorikeet_prefix_cache_query_tokens"] == 14
    assert second.evictions == {"active": 6, "host": 0}
    assert second.load_failures == {("read", "ADAPTER_PAYLOAD"): 4}
    assert (second.steps.num, second.loads[LoadStage.READ].num, second.loads[LoadStage.COPY].num) == (2, 2, 0)


async def becomes(metrics: NodeMetrics, name: str, value: float) -> None:
    """Scrape until a sample has a value; a busy machine may serve an older one first."""
    async with asyncio.timeout(30):
        while await shown(metrics, name) != value:
            continue


async def shown(metrics: NodeMetrics, name: str) -> float:
    """A sample's value in a scrape."""
    value = await asyncio.to_thread(metrics.registry.get_sample_value, name)
    assert value is not None
    return value
