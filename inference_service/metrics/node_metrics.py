"""All series of one node. `requests` counts calls; everything else is looked up when somebody scrapes."""

import threading
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from inference_service.api.catalog import Catalog
from inference_service.metrics.adapter_names import AdapterNames
from inference_service.metrics.engine_collector import engine_families
from inference_service.metrics.engine_view import EngineView, EngineWatch
from inference_service.metrics.request_metrics import RequestMetrics
from inference_service.metrics.router_series import router_families
from inference_service.ports import Engine
from lorikeet_rpc.loop_snapshot import LoopSnapshot


class NodeMetrics(Collector):
    """Build inside the running event loop.

    A scrape runs on a thread of the HTTP endpoint. It asks the engine once, waits a second at most, and then
    shows what it knew before, with its age. Who does not scrape costs the engine nothing.

    Args:
        engine: asked for its report.
        catalog: adapters' names.
        show_names: whether routers are told adapters' names, or digests instead.
    """

    def __init__(self, engine: Engine, catalog: Catalog, *, show_names: bool = True) -> None:
        self.registry = CollectorRegistry()
        self.requests = RequestMetrics(self.registry)
        self._engine = engine
        self._catalog = catalog
        self._names = AdapterNames(catalog) if show_names else None
        self._view = LoopSnapshot(EngineWatch(engine).look, EngineView())
        self._collecting = threading.Lock()
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Every series that is looked up; see the class. Any thread but the loop's."""
        view, age_s = self._view.get()
        yield from self._families(view, age_s)

    def describe(self) -> Iterator[Metric]:
        """The names alone, without a look at the engine."""
        yield from self._families(EngineView(), 0.0)

    def _families(self, view: EngineView, age_s: float) -> Iterator[Metric]:
        info = self._engine.info
        yield from engine_families(view, info, age_s)
        with self._collecting:
            router = tuple(router_families(view, info, self._names))
        yield from router
        model = GaugeMetricFamily(
            "lorikeet_model_info", "1, with what is served.", labels=("model_name", "architecture", "dtype")
        )
        model.add_metric((info.model_name, info.architecture, info.dtype), 1)
        yield model
        yield GaugeMetricFamily(
            "lorikeet_catalog_generation",
            "Generation of the catalog that names are resolved by; 0 before the first.",
            value=self._catalog.generation,
        )
