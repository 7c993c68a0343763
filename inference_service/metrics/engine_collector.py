"""The engine's own series: gauges and counters of one look at it."""

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from inference_service.domain.adapter import ResidencyTier
from inference_service.domain.durations import DURATION_BOUNDS_S, DurationCounts
from inference_service.domain.engine import EngineInfo
from inference_service.metrics.adapter_names import short_digest
from inference_service.metrics.engine_totals import EngineTotals
from inference_service.metrics.engine_view import EngineView

_TIERS = (ResidencyTier.HOST, ResidencyTier.COPYING, ResidencyTier.ACTIVE)
_COUNTERS = {
    "lorikeet_engine_steps": "Steps of the engine.",
    "lorikeet_preemptions": "Requests that lost their place for want of key-value blocks and began anew.",
    "lorikeet_prefix_cache_query_tokens": "Tokens that were looked up in the prefix cache.",
    "lorikeet_prefix_cache_hit_tokens": "Those of them that it held.",
    "lorikeet_compilations": "Kernels compiled after the engine was ready; serving well, none.",
}


def engine_families(view: EngineView, info: EngineInfo, age_s: float) -> Iterator[Metric]:
    """All of them, whether the engine is up or not."""
    yield _gauge(
        "lorikeet_engine_up", "1 while the engine process is up, 0 while it is restarted.", view.is_up
    )
    yield _gauge("lorikeet_engine_report_age_seconds", "How old the engine's word below is.", age_s)
    restarts = CounterMetricFamily("lorikeet_engine_restarts", "Engine processes that replaced a dead one.")
    restarts.add_metric((), view.num_restarts)
    yield restarts
    yield from _requests(view)
    yield from _memory(view, info)
    yield from _adapters(view)
    yield from _totals(view.totals)


def _requests(view: EngineView) -> Iterator[Metric]:
    status, use = view.report.status, view.report.use
    yield _gauge("lorikeet_requests_running", "Requests in the batch.", status.running_requests)
    yield _gauge("lorikeet_requests_waiting", "Requests in the queue.", status.waiting_requests)
    yield _gauge(
        "lorikeet_requests_waiting_for_adapter",
        "Those of them whose adapter is not on the device yet.",
        use.num_waiting_for_adapter,
    )
    yield _gauge("lorikeet_adapter_leases", "Requests that hold an adapter's slot.", status.adapter_leases)


def kv_blocks_used(view: EngineView) -> int:
    """Blocks that requests hold; those that only keep a prefix count as free."""
    return view.report.status.kv_blocks_total - view.report.status.kv_blocks_available


def _memory(view: EngineView, info: EngineInfo) -> Iterator[Metric]:
    status, limits, used = view.report.status, info.limits, kv_blocks_used(view)
    yield _gauge("lorikeet_kv_blocks_used", "Key-value blocks that requests hold.", used)
    yield _gauge("lorikeet_kv_blocks_capacity", "Key-value blocks there are.", limits.num_blocks)
    yield _gauge("lorikeet_kv_usage_ratio", "Used by capacity, 0 to 1.", used / max(1, limits.num_blocks))
    yield _gauge(
        "lorikeet_adapter_arena_used_bytes", "Adapters' weights on the device.", status.arena_used_bytes
    )
    yield _gauge(
        "lorikeet_adapter_arena_capacity_bytes",
        "Device memory for adapters' weights.",
        limits.adapter_arena_bytes,
    )
    yield _gauge("lorikeet_host_pool_used_bytes", "Adapters' weights in host memory.", status.host_used_bytes)
    yield _gauge(
        "lorikeet_host_pool_capacity_bytes", "Host memory for adapters' weights.", limits.host_pool_bytes
    )


def _adapters(view: EngineView) -> Iterator[Metric]:
    residency = view.report.residency
    numbers = GaugeMetricFamily(
        "lorikeet_adapters_resident", "Revisions by how far up they are on this node.", labels=("tier",)
    )
    found = dict(residency.num_by_tier)
    for tier in _TIERS:
        numbers.add_metric((tier.value,), found.get(tier, 0))
    yield numbers
    places = GaugeMetricFamily(
        "lorikeet_adapter_residency",
        "1 for each revision in host memory or above: those on the device, and of the rest the last used.",
        labels=("digest", "tier"),
    )
    for digest, tier in residency.listed:
        places.add_metric((short_digest(digest), tier.value), 1)
    yield places


def _totals(totals: EngineTotals) -> Iterator[Metric]:
    for name, words in _COUNTERS.items():
        counter = CounterMetricFamily(name, words)
        counter.add_metric((), totals.numbers.get(name, 0))
        yield counter
    evictions = CounterMetricFamily(
        "lorikeet_adapter_evictions",
        "Revisions that made room for others, by tier left.",
        labels=("tier",),
    )
    for tier, count in totals.evictions.items():
        evictions.add_metric((tier,), count)
    yield evictions
    steps = HistogramMetricFamily(
        "lorikeet_engine_step_duration_seconds", "From a step's schedule to its tokens."
    )
    _add_durations(steps, (), totals.steps)
    yield steps
    loads = HistogramMetricFamily(
        "lorikeet_adapter_load_duration_seconds",
        "Parts of loads that succeeded: fetch (store to disk), read (disk to host memory, every layer's "
        "sha256 checked), copy (host memory to device).",
        labels=("stage",),
    )
    for stage, durations in totals.loads.items():
        _add_durations(loads, (stage.value,), durations)
    yield loads
    failures = CounterMetricFamily(
        "lorikeet_adapter_load_failures",
        "Loads that failed, by the part in which and the error's reason.",
        labels=("stage", "reason"),
    )
    for (stage, reason), count in totals.load_failures.items():
        failures.add_metric((stage, reason), count)
    yield failures


def _gauge(name: str, words: str, value: float) -> Metric:
    return GaugeMetricFamily(name, words, value=value)


def _add_durations(family: HistogramMetricFamily, labels: tuple[str, ...], durations: DurationCounts) -> None:
    bounds = (*(str(bound) for bound in DURATION_BOUNDS_S), "+Inf")
    below, buckets = 0, list[tuple[str, float]]()
    for bound, count in zip(bounds, durations.counts, strict=True):
        below += count
        buckets.append((bound, below))
    family.add_metric(labels, buckets, durations.sum_s)
