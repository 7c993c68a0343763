"""Pushes to nodes."""

from collections.abc import Generator
from contextlib import contextmanager
from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter

from adapter_manager.domain.errors import NodeCallError
from adapter_manager.domain.probe import ProbeVerdict


class Push(StrEnum):
    """What a node is told to do."""

    CATALOG = "catalog"
    LOAD = "load"
    STREAM = "stream"
    UNLOAD = "unload"
    REFUSE = "refuse"
    PROBE = "probe"


class PushMetrics:
    """Counts pushes by node, and those that failed by the reason that the node gave."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._pushes = Counter(
            "lorikeet_node_pushes",
            "Calls that told a node to do something: catalog, load (it reads the store), stream (the payload "
            "is sent along), unload, refuse (what requests wait for will not come), probe. Failed ones "
            "included.",
            ("node", "push"),
            registry=registry,
        )
        self._failures = Counter(
            "lorikeet_node_push_failures",
            "Those that failed, by the node's reason, or the code where the transport failed.",
            ("node", "push", "reason"),
            registry=registry,
        )
        self._probes = Counter(
            "lorikeet_adapter_probes",
            "Comparisons of an adapter with the base model, by what came of them.",
            ("verdict",),
            registry=registry,
        )
        for verdict in ProbeVerdict:
            self._probes.labels(verdict.value)

    def probed(self, verdict: ProbeVerdict) -> None:
        """A node compared an adapter with the base model."""
        self._probes.labels(verdict.value).inc()

    @contextmanager
    def counted(self, node: str, push: Push) -> Generator[None]:
        """Around one push."""
        self._pushes.labels(node, push.value).inc()
        try:
            yield
        except NodeCallError as error:
            self._failures.labels(node, push.value, error.node_reason).inc()
            raise
