"""All series of one manager: some counted as things happen, the others looked up at a scrape."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from adapter_manager.application.mirror import RegistryMirror
from adapter_manager.application.residency import Fleet
from adapter_manager.domain.catalog import RegistryView
from adapter_manager.metrics.node_series import NodeView, node_families
from adapter_manager.metrics.push_metrics import PushMetrics
from adapter_manager.metrics.registry_series import RegistryCounts, registry_families
from adapter_manager.metrics.store_metrics import StoreMetrics
from adapter_manager.metrics.upload_metrics import UploadMetrics
from lorikeet_rpc.loop_snapshot import LoopSnapshot


@dataclass(frozen=True, slots=True)
class _FleetView:
    view: RegistryView = field(default_factory=RegistryView)
    nodes: tuple[NodeView, ...] = ()


class ManagerMetrics(Collector):
    """`uploads`, `store` and `pushes` are the observers that other rooms take. See `follow`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.uploads = UploadMetrics(self.registry)
        self.store = StoreMetrics(self.registry)
        self.pushes = PushMetrics(self.registry)
        self._snapshot: LoopSnapshot[_FleetView] | None = None
        self._counted: tuple[RegistryView, RegistryCounts] | None = None
        self._counting = threading.Lock()

    def follow(self, mirror: RegistryMirror, fleet: Fleet) -> None:
        """From now on show the registry and the nodes as well. Once, inside the running event loop."""

        async def look() -> _FleetView:
            # References to what is never changed, and small copies: the loop goes on at once.
            view = mirror.view
            nodes = tuple(
                NodeView(
                    agent.address,
                    agent.is_connected,
                    agent.catalog_generation,
                    agent.wanted(view) if agent.is_connected else None,
                    tuple(agent.work.held.values()),
                )
                for agent in fleet.agents
            )
            return _FleetView(view, nodes)

        self._snapshot = LoopSnapshot(look, _FleetView())
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """The series that are looked up. Any thread but the loop's."""
        assert self._snapshot is not None
        fleet, age_s = self._snapshot.get()
        yield from self._families(fleet, age_s)

    def describe(self) -> Iterator[Metric]:
        """The names alone."""
        yield from self._families(_FleetView(), 0.0)

    def _families(self, fleet: _FleetView, age_s: float) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "lorikeet_manager_report_age_seconds",
            "How old the word on the registry and the nodes is.",
            value=age_s,
        )
        yield from registry_families(fleet.view, self._counts(fleet.view))
        yield from node_families(fleet.view, fleet.nodes)

    def _counts(self, view: RegistryView) -> RegistryCounts:
        """Counted once for each view: a large registry takes a while, and often nothing changed."""
        with self._counting:
            if self._counted is None or self._counted[0] is not view:
                self._counted = (view, RegistryCounts.of(view))
            return self._counted[1]
