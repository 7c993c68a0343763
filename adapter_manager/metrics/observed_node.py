"""A NodeClient that counts the pushes of another."""

from collections.abc import AsyncIterator

from adapter_manager.domain.catalog import NodeCatalog
from adapter_manager.domain.node import NodeEvent, NodeModel, ResidencySnapshot, ResidentAdapter
from adapter_manager.domain.probe import ProbeFindings
from adapter_manager.metrics.push_metrics import Push, PushMetrics
from adapter_manager.ports import LoadOrder, NodeClient


class ObservedNode:
    """Implements `ports.NodeClient`."""

    def __init__(self, client: NodeClient, metrics: PushMetrics) -> None:
        self.address = client.address
        self._client = client
        self._metrics = metrics

    async def model(self) -> NodeModel:
        """See ports.NodeClient."""
        return await self._client.model()

    def watch(self) -> AsyncIterator[NodeEvent]:
        """See ports.NodeClient."""
        return self._client.watch()

    async def resident(self) -> ResidencySnapshot:
        """See ports.NodeClient."""
        return await self._client.resident()

    async def sync_catalog(self, catalog: NodeCatalog) -> int:
        """See ports.NodeClient."""
        with self._metrics.counted(self.address, Push.CATALOG):
            return await self._client.sync_catalog(catalog)

    async def load(
        self, order: LoadOrder, payload: AsyncIterator[bytes] | None, timeout_s: float
    ) -> ResidentAdapter:
        """See ports.NodeClient."""
        with self._metrics.counted(self.address, Push.LOAD if payload is None else Push.STREAM):
            return await self._client.load(order, payload, timeout_s)

    async def unload(self, digest: str, *, keep_on_disk: bool, timeout_s: float) -> bool:
        """See ports.NodeClient."""
        with self._metrics.counted(self.address, Push.UNLOAD):
            return await self._client.unload(digest, keep_on_disk=keep_on_disk, timeout_s=timeout_s)

    async def refuse_demand(self, digest: str, reason: str) -> bool:
        """See ports.NodeClient."""
        with self._metrics.counted(self.address, Push.REFUSE):
            return await self._client.refuse_demand(digest, reason)

    async def probe(self, digest: str, timeout_s: float) -> ProbeFindings:
        """See ports.NodeClient."""
        with self._metrics.counted(self.address, Push.PROBE):
            findings = await self._client.probe(digest, timeout_s)
        self._metrics.probed(findings.verdict)
        return findings

    async def close(self) -> None:
        """See ports.NodeClient."""
        await self._client.close()
