"""Prometheus metrics that every RPC server has, and the HTTP endpoint that shows them."""

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server

_LATENCY_BUCKETS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class RpcMetrics:
    """Calls by method and code, and how long they took. Labels are bounded: methods are the server's own."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._calls = Counter(
            "rpc_server_calls",
            "Finished calls by method and gRPC code.",
            ("method", "code"),
            registry=registry,
        )
        self._seconds = Histogram(
            "rpc_server_duration_seconds",
            "Time from a call's start to its end, streams whole.",
            ("method",),
            buckets=_LATENCY_BUCKETS_S,
            registry=registry,
        )

    def finished(self, method: str, code: str, seconds: float) -> None:
        """Count one call."""
        self._calls.labels(method, code).inc()
        self._seconds.labels(method).observe(seconds)


class MetricsEndpoint:
    """The text endpoint, on a thread of its own: `http://host:port/metrics`."""

    def __init__(self, address: str, registry: CollectorRegistry) -> None:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"metrics address {address!r} is not host:port, e.g. 127.0.0.1:9400")
        self._server, self._thread = start_http_server(int(port), host.strip("[]"), registry)
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stop serving; returns when the thread ended."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
