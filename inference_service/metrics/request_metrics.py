"""Generations, each counted once: either it finished, for a reason, or it was rejected, for another.

Fed by the RPC interceptor with what the call's `request.finished` line says, and by streams with each token.
"""

from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram

from inference_service.domain.request import FinishReason
from lorikeet_rpc.metrics import CallEnd, RpcMetrics

_METHODS = frozenset(
    f"/lorikeet.inference.v1.InferenceService/{method}" for method in ("Generate", "Complete")
)
_CANCELLED = "cancelled"
_REASONS = (*(reason.value for reason in FinishReason), _CANCELLED)

# Multiples in steps near to 1-2.5-5, from a decode step of a small model to a long answer of a large one.
_TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
_REQUEST_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300)
_PARTS = ("queue", "adapter_wait", "prefill", "decode")


class RequestMetrics:
    """Implements `lorikeet_rpc.metrics.CallObserver` and `ports.TokenObserver`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._rpc = RpcMetrics(registry)
        self._finished = Counter(
            "lorikeet_requests_finished",
            "Generations that ran, by how they ended.",
            ("reason",),
            registry=registry,
        )
        for reason in _REASONS:
            self._finished.labels(reason)
        self._rejected = Counter(
            "lorikeet_requests_rejected",
            "Generations that ended in an error before their first token, by the reason in its ErrorInfo.",
            ("reason",),
            registry=registry,
        )
        self._prompt = Counter(
            "lorikeet_prompt_tokens", "Prompt tokens of generations that ran.", registry=registry
        )
        self._cached = Counter(
            "lorikeet_cached_tokens", "Those of them that the prefix cache held.", registry=registry
        )
        self._samples = Counter(
            "lorikeet_samples", "Samples of generations that ran: n each, one without n.", registry=registry
        )
        self._output = Counter("lorikeet_output_tokens", "Tokens that clients were sent.", registry=registry)
        self._first_token = Histogram(
            "lorikeet_time_to_first_token_seconds",
            "From a generation's arrival to its first token.",
            buckets=_REQUEST_BUCKETS_S,
            registry=registry,
        )
        self._next_token = Histogram(
            "lorikeet_inter_token_latency_seconds",
            "From one token of a generation to the next.",
            buckets=_TOKEN_BUCKETS_S,
            registry=registry,
        )
        self._duration = Histogram(
            "lorikeet_request_duration_seconds",
            "From a generation's arrival to its end.",
            buckets=_REQUEST_BUCKETS_S,
            registry=registry,
        )
        self._parts = {part: _part(part, registry) for part in _PARTS}

    def first_token(self, seconds: float) -> None:
        """See ports.TokenObserver."""
        self._first_token.observe(seconds)

    def next_tokens(self, gap_s: float, count: int) -> None:
        """See ports.TokenObserver."""
        for _ in range(count):
            self._next_token.observe(gap_s)

    def finished(self, end: CallEnd) -> None:
        """See lorikeet_rpc.metrics.CallObserver."""
        self._rpc.finished(end)
        if end.method not in _METHODS:
            return
        facts = end.facts
        reason = _finish_reason(end)
        self._output.inc(facts.get("output_tokens") or 0)
        if reason is None:
            self._rejected.labels(end.reason or end.code).inc()
            return
        self._finished.labels(reason).inc()
        self._samples.inc(facts.get("samples") or 1)
        self._prompt.inc(facts.get("prompt_tokens") or 0)
        self._cached.inc(facts.get("cached_tokens") or 0)
        self._duration.observe(end.seconds)
        for part, histogram in self._parts.items():
            if (spent_ms := facts.get(f"{part}_ms")) is not None:
                histogram.observe(spent_ms / 1e3)


def _finish_reason(end: CallEnd) -> str | None:
    """How a generation that ran ended; None where an error came before the first token."""
    facts: Mapping[str, Any] = end.facts
    if facts.get("finish_reason"):
        return facts["finish_reason"]
    if end.code == "CANCELLED":
        return _CANCELLED
    if end.code == "DEADLINE_EXCEEDED" and not end.reason:
        # The transport saw it before the engine did.
        return FinishReason.DEADLINE.value
    return FinishReason.FAILED.value if facts.get("output_tokens") else None


def _part(part: str, registry: CollectorRegistry) -> Histogram:
    what = {
        "queue": "Time in the queue, the wait for an adapter left out",
        "adapter_wait": "Time that a generation waited for its adapter",
        "prefill": "From admission to the first token",
        "decode": "From the first token to the last",
    }[part]
    return Histogram(
        f"lorikeet_request_{part}_seconds",
        f"{what}; of generations that the engine ended.",
        buckets=_REQUEST_BUCKETS_S,
        registry=registry,
    )
