"""What the manager asks of this node, in the domain's words. Knows neither grpc nor protobuf."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

import structlog

from inference_service.api.catalog import Catalog, CatalogSnapshot
from inference_service.api.node_events import AdapterUsage, EngineStarted, NodeEvents
from inference_service.domain.adapter import AdapterDemand, ResidentAdapter
from inference_service.ports import Engine

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ResidencyReport:
    """Everything that this node holds."""

    instance_id: str
    catalog_generation: int
    adapters: tuple[ResidentAdapter, ...]
    arena_total_bytes: int
    arena_used_bytes: int
    host_total_bytes: int
    host_used_bytes: int


class ResidencyService:
    """Catalog, residency and drain of one node.

    Args:
        engine: moves adapters.
        catalog: what requests are resolved by.
        events: what watchers hear.
        stop_accepting: turns the node's health to NOT_SERVING, before a drain.
    """

    def __init__(
        self,
        engine: Engine,
        catalog: Catalog,
        events: NodeEvents,
        stop_accepting: Callable[[], Awaitable[object]],
    ) -> None:
        self._engine = engine
        self._catalog = catalog
        self._events = events
        self._stop_accepting = stop_accepting

    @property
    def instance_id(self) -> str:
        """Changes when the engine or this service restarts."""
        return self._engine.instance_id

    @property
    def catalog_generation(self) -> int:
        """The catalog that requests are resolved by; 0 before the first."""
        return self._catalog.generation

    async def sync_catalog(self, snapshot: CatalogSnapshot) -> None:
        """Take a catalog over: first the engine, then names and tokens, so that no name comes too early.

        Raises:
            StaleGenerationError: this node has a newer one.
        """
        self._catalog.check_generation(snapshot.generation)
        await self._engine.set_tenants(snapshot.tenants)
        await self._engine.set_desired(snapshot.desired, snapshot.store_url)
        self._catalog.replace(snapshot)
        log.info(
            "catalog.synced",
            generation=snapshot.generation,
            tenants=len(snapshot.tenants),
            adapters=len(snapshot.adapters),
        )

    async def unload(self, digest: str, *, keep_on_disk: bool) -> bool:
        """Take a revision off the device and the host once it is idle. False: it was not there."""
        return await self._engine.unload_adapter(digest, keep_on_disk=keep_on_disk)

    async def refuse_demand(self, digest: str, reason: str) -> bool:
        """End the requests that wait for what the manager cannot bring. False: there were none."""
        return await self._engine.refuse_demand(digest, reason)

    async def report(self) -> ResidencyReport:
        """All that is here now."""
        limits, status = self._engine.info.limits, await self._engine.status()
        return ResidencyReport(
            instance_id=self._engine.instance_id,
            catalog_generation=self._catalog.generation,
            adapters=tuple(await self._engine.resident()),
            arena_total_bytes=limits.adapter_arena_bytes,
            arena_used_bytes=status.arena_used_bytes,
            host_total_bytes=limits.host_pool_bytes,
            host_used_bytes=status.host_used_bytes,
        )

    async def watch(
        self,
    ) -> AsyncGenerator[ResidencyReport | ResidentAdapter | AdapterDemand | AdapterUsage]:
        """A report first and after each restart of the engine, then one event after the other."""
        async with aclosing(self._events.watch()) as events:
            async for event in events:
                yield await self.report() if isinstance(event, EngineStarted) else event

    async def drain(self, grace_s: float) -> int:
        """Take no new requests, let running ones end, abort the rest; returns how many were aborted."""
        await self._stop_accepting()
        return await self._engine.drain(grace_s)
