"""The registry's store as the manager's connection finds it."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_COMMAND_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_COMMANDS = ("read", "write")


class StoreMetrics:
    """Implements `ports.StoreObserver`. One event loop."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._up = Gauge(
            "lorikeet_redis_up",
            "1 while the registry's store answers, 0 before it first did and while it is away.",
            registry=registry,
        )
        self._seconds = Histogram(
            "lorikeet_redis_command_duration_seconds",
            "Commands that were answered; a write's until it is on disk, where that can be known.",
            ("command",),
            buckets=_COMMAND_BUCKETS_S,
            registry=registry,
        )
        for command in _COMMANDS:
            self._seconds.labels(command)
        self._errors = Counter(
            "lorikeet_redis_errors",
            "Commands that failed, by the kind of error; those not tried while it is away left out.",
            ("error",),
            registry=registry,
        )
        self._reconnects = Counter(
            "lorikeet_redis_reconnects", "Times that the store answered again.", registry=registry
        )
        self._has_failed = False

    def answered(self, command: str, seconds: float) -> None:
        """See ports.StoreObserver."""
        self._seconds.labels(command).observe(seconds)
        self._up.set(1)
        if self._has_failed:
            self._has_failed = False
            self._reconnects.inc()

    def failed(self, error: str) -> None:
        """See ports.StoreObserver."""
        self._errors.labels(error).inc()
        self._up.set(0)
        self._has_failed = True
