"""The series that inference gateways read from vLLM, so that they route to this node as to one of those.

Each stands under two names: `vllm:x`, as vLLM writes it, and `vllm_x`, as scrapers without colons write that.
A router reading either finds its values, whatever format it asks for.
"""

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily

from inference_service.domain.adapter import ResidencyTier
from inference_service.domain.engine import EngineInfo
from inference_service.metrics.adapter_names import AdapterNames, short_digest
from inference_service.metrics.engine_collector import kv_blocks_used
from inference_service.metrics.engine_view import EngineView

_PREFIXES = ("vllm:", "vllm_")
# vLLM numbers the engines of one server; a node has one.
_ENGINE = "0"


def router_families(view: EngineView, info: EngineInfo, names: AdapterNames | None) -> Iterator[Metric]:
    """All of them; `names` None shows digests where adapters' names would stand."""
    status, limits = view.report.status, info.limits
    usage = kv_blocks_used(view) / max(1, limits.num_blocks)
    running, waiting = _adapters(view, names)
    for prefix in _PREFIXES:
        model = {"engine": _ENGINE, "model_name": info.model_name}
        for name, words, value in (
            (
                "num_requests_running",
                "Requests in the batch.",
                status.running_requests,
            ),
            ("num_requests_waiting", "Requests in the queue.", status.waiting_requests),
            ("kv_cache_usage_perc", "Key-value cache in use, 0 to 1.", usage),
        ):
            yield _one(prefix + name, words, model, value)
        yield _one(
            prefix + "cache_config_info",
            "The key-value cache's sizes.",
            {
                "block_size": str(limits.block_tokens),
                "engine": _ENGINE,
                "num_gpu_blocks": str(limits.num_blocks),
            },
            1,
        )
        # Its value is when this was so: of several such series the newest counts.
        yield _one(
            prefix + "lora_requests_info",
            "Adapters on the device and adapters that requests wait for.",
            {
                "max_lora": str(limits.max_active_adapters),
                "running_lora_adapters": ",".join(running),
                "waiting_lora_adapters": ",".join(waiting),
            },
            view.seen_unix_s,
        )


def _adapters(view: EngineView, names: AdapterNames | None) -> tuple[list[str], list[str]]:
    active = [digest for digest, tier in view.report.residency.listed if tier is ResidencyTier.ACTIVE]
    waiting = [digest for digest in view.report.use.waiting if digest not in set(active)]
    if names is None:
        return [short_digest(d) for d in active], [short_digest(d) for d in waiting]
    return names.of(active), names.of(waiting)


def _one(name: str, words: str, labels: dict[str, str], value: float) -> Metric:
    family = GaugeMetricFamily(name, words, labels=tuple(labels))
    family.add_metric(tuple(labels.values()), value)
    return family
