"""Loads one revision onto one node: from the shared store where the node can read it, else streamed to it."""

import structlog

from adapter_manager.domain.errors import NodeCallError
from adapter_manager.domain.node import ResidencyTier, ResidentAdapter
from adapter_manager.ports import ArtifactStore, LoadOrder, NodeClient

log = structlog.get_logger(__name__)

# What a node answers where it cannot read the store, or not this revision (inference_service's PayloadError).
_PAYLOAD_REASONS = frozenset({"ADAPTER_PAYLOAD", "ADAPTER_PAYLOAD_MISSING"})
# What it answers where its disk was full, and where it has made room since.
_ROOM_MADE = "DISK_CACHE"


class PayloadPusher:
    """One node's pusher: remembers whether that node shares the store, until it restarts."""

    def __init__(self, client: NodeClient, store: ArtifactStore) -> None:
        self._client = client
        self._store = store
        self._shares_store = True

    def restarted(self) -> None:
        """The node is a new process, maybe with other mounts: ask it again to read the store."""
        self._shares_store = True

    async def load(
        self, digest: str, tier: ResidencyTier, *, is_pinned: bool, timeout_s: float
    ) -> ResidentAdapter:
        """Bring a revision to a tier.

        Raises:
            NodeCallError: the node refused, or is away.
            ArtifactStoreError: the manager itself cannot read the revision.
        """
        manifest = await self._store.manifest(digest)
        if self._shares_store:
            order = LoadOrder(digest, manifest, tier, is_pinned, f"revisions/{digest}")
            try:
                return await self._client.load(order, None, timeout_s)
            except NodeCallError as error:
                if error.node_reason not in _PAYLOAD_REASONS:
                    raise
                log.info(
                    "residency.streamed", node=self._client.address, digest=digest, because=error.message
                )
        loaded = await self.stream(digest, tier, is_pinned=is_pinned, timeout_s=timeout_s, manifest=manifest)
        # It was the way and not the content: spare the next load the attempt.
        self._shares_store = False
        return loaded

    async def stream(
        self,
        digest: str,
        tier: ResidencyTier,
        *,
        is_pinned: bool,
        timeout_s: float,
        manifest: bytes | None = None,
    ) -> ResidentAdapter:
        """The same with the payload sent in chunks, whatever the node can read."""
        if manifest is None:
            manifest = await self._store.manifest(digest)
        order = LoadOrder(digest, manifest, tier, is_pinned, "")
        try:
            return await self._client.load(order, self._store.payload(digest), timeout_s)
        except NodeCallError as error:
            if error.node_reason != _ROOM_MADE:
                raise
            log.info("residency.sent_again", node=self._client.address, digest=digest, because=error.message)
        return await self._client.load(order, self._store.payload(digest), timeout_s)
