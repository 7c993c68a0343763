"""Each generation is counted once, whatever way it went."""

from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from inference_service.metrics.request_metrics import RequestMetrics
from lorikeet_rpc.metrics import CallEnd

LATE, DEAD = "DEADLINE_EXCEEDED", "ENGINE_RESTARTING"
GENERATE = "/lorikeet.inference.v1.InferenceService/Generate"


def counted(registry: CollectorRegistry, name: str) -> dict[str, float]:
    """Samples that are not 0, by reason."""
    return {
        sample.labels["reason"]: sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == name and sample.value
    }


@pytest.mark.parametrize("method", ["Generate", "Complete"])
@pytest.mark.parametrize(
    ("code", "reason", "facts", "finished", "rejected"),
    [
        ("OK", "", {"finish_reason": "length", "output_tokens": 3}, "length", ""),
        ("OK", "", {"finish_reason": "aborted", "output_tokens": 0}, "aborted", ""),
        (LATE, LATE, {"finish_reason": "deadline", "output_tokens": 0}, "deadline", ""),
        (LATE, LATE, {}, "", LATE),
        (LATE, "", {"output_tokens": 1, "finish_reason": None}, "deadline", ""),
        ("CANCELLED", "", {"output_tokens": 2, "finish_reason": None}, "cancelled", ""),
        ("CANCELLED", "", {}, "cancelled", ""),
        ("UNAVAILABLE", DEAD, {"output_tokens": 2, "finish_reason": None}, "failed", ""),
        ("UNAVAILABLE", DEAD, {"output_tokens": 0, "finish_reason": None}, "", DEAD),
        ("UNAUTHENTICATED", "UNAUTHENTICATED", {}, "", "UNAUTHENTICATED"),
        ("INTERNAL", "INTERNAL", {}, "", "INTERNAL"),
        # Reached its end, but its client did not hear of it any more.
        ("CANCELLED", "", {"finish_reason": "length", "output_tokens": 3}, "length", ""),
    ],
)  # fmt: skip
def test_one_end(
    method: str, code: str, reason: str, facts: dict[str, Any], finished: str, rejected: str
) -> None:
    """Finished or rejected, never both, never neither."""
    registry = CollectorRegistry()
    metrics = RequestMetrics(registry)
    facts = {"prompt_tokens": 5, **facts}
    metrics.finished(CallEnd(GENERATE.replace("Generate", method), code, reason, 1.0, facts))
    assert counted(registry, "lorikeet_requests_finished_total") == ({finished: 1} if finished else {})
    assert counted(registry, "lorikeet_requests_rejected_total") == ({rejected: 1} if rejected else {})
    value = registry.get_sample_value
    assert value("lorikeet_prompt_tokens_total") == (5 if finished else 0)
    assert value("lorikeet_output_tokens_total") == (facts.get("output_tokens") or 0)
    assert value("lorikeet_request_duration_seconds_count") == (1 if finished else 0)


def test_samples_are_counted_beside_requests() -> None:
    """A request of several is one request; one that was rejected has no samples."""
    registry = CollectorRegistry()
    metrics = RequestMetrics(registry)
    ended = {"finish_reason": "length", "prompt_tokens": 5, "output_tokens": 12}
    metrics.finished(CallEnd(GENERATE, "OK", "", 1.0, {**ended, "samples": 4}))
    metrics.finished(CallEnd(GENERATE, "OK", "", 1.0, ended))
    metrics.finished(CallEnd(GENERATE, "RESOURCE_EXHAUSTED", "QUEUE_FULL", 1.0, {"samples": 3}))
    value = registry.get_sample_value
    assert value("lorikeet_samples_total") == 5
    assert counted(registry, "lorikeet_requests_finished_total") == {"length": 2}
    assert (value("lorikeet_prompt_tokens_total"), value("lorikeet_output_tokens_total")) == (10, 24)


def test_other_calls_are_no_generations() -> None:
    """They count as calls alone."""
    registry = CollectorRegistry()
    metrics = RequestMetrics(registry)
    for method in ("GetModel", "Abort", "Tokenize"):
        metrics.finished(CallEnd(GENERATE.replace("Generate", method), "OK", "", 1.0))
    assert not counted(registry, "lorikeet_requests_finished_total")
    labels = {"method": GENERATE.replace("Generate", "Abort"), "code": "OK"}
    assert registry.get_sample_value("lorikeet_rpc_server_calls_total", labels) == 1


def test_times_are_seconds() -> None:
    """The log line's milliseconds become base units."""
    registry = CollectorRegistry()
    metrics = RequestMetrics(registry)
    parts = {"queue_ms": 1500.0, "adapter_wait_ms": 0.0, "prefill_ms": 20.0, "decode_ms": 3000.0}
    metrics.finished(CallEnd(GENERATE, "OK", "", 4.5, {"finish_reason": "length", **parts}))
    metrics.first_token(0.25)
    metrics.next_tokens(0.5, 2)
    value = registry.get_sample_value
    for part, milliseconds in parts.items():
        assert value(f"lorikeet_request_{part[:-3]}_seconds_sum") == milliseconds / 1000
        assert value(f"lorikeet_request_{part[:-3]}_seconds_count") == 1
    assert value("lorikeet_request_duration_seconds_sum") == 4.5
    assert value("lorikeet_time_to_first_token_seconds_sum") == 0.25
    assert value("lorikeet_inter_token_latency_seconds_sum") == 1.0
    assert value("lorikeet_inter_token_latency_seconds_count") == 2
