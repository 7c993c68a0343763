"""What every RPC server tells of its calls, and the Prometheus metrics of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram

_LATENCY_BUCKETS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


@dataclass(frozen=True, slots=True)
class CallEnd:
    """How one call ended. `reason` is ErrorInfo's, empty where the call failed with none of ours.

    `facts` are those of its `request.finished` log line.
    """

    method: str
    code: str
    reason: str
    seconds: float
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])


class CallObserver(Protocol):
    """Hears of each call once, when it ended. Never blocks, never raises."""

    def finished(self, end: CallEnd) -> None:
        """Count one call."""
        ...


class RpcMetrics:
    """Calls by method, code and reason, and how long they took.

    Labels are bounded: methods are the server's own, reasons those of its error tree.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._calls = Counter(
            "lorikeet_rpc_server_calls",
            "Finished calls, by gRPC code.",
            ("method", "code"),
            registry=registry,
        )
        self._errors = Counter(
            "lorikeet_rpc_server_errors",
            "Calls that this server refused or failed, by the reason in their ErrorInfo.",
            ("method", "reason"),
            registry=registry,
        )
        self._seconds = Histogram(
            "lorikeet_rpc_server_duration_seconds",
            "Time from a call's start to its end, streams whole.",
            ("method",),
            buckets=_LATENCY_BUCKETS_S,
            registry=registry,
        )

    def finished(self, end: CallEnd) -> None:
        """See CallObserver."""
        self._calls.labels(end.method, end.code).inc()
        self._seconds.labels(end.method).observe(end.seconds)
        if end.reason:
            self._errors.labels(end.method, end.reason).inc()
