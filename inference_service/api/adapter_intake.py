"""A load that the manager asks for: from the shared store, or with the payload streamed along."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from inference_service.domain.adapter import AdapterSource, DesiredAdapter, ResidencyTier, ResidentAdapter
from inference_service.domain.errors import AdapterTooLargeError, InvalidRequestError
from inference_service.engine.payload_cache import PayloadReceiver, parse_manifest
from inference_service.ports import Engine


@dataclass(frozen=True, slots=True)
class LoadHeader:
    """What to load and where to; `store_path` empty means that the payload follows in chunks."""

    digest: str
    manifest: bytes
    tier: ResidencyTier
    pinned: bool = False
    store_path: str = ""


@dataclass(frozen=True, slots=True)
class PayloadChunk:
    """A part of the payload, in order."""

    offset: int
    data: bytes


class AdapterIntake:
    """Takes payloads into the node's disk cache and has the engine load them.

    Args:
        engine: loads what is there.
        cache_dir: the disk cache; a payload appears in it whole or not at all.
        max_payload_bytes: the cache's size; nothing larger is begun.
    """

    def __init__(self, engine: Engine, cache_dir: str, max_payload_bytes: int) -> None:
        self._engine = engine
        self._cache_dir = cache_dir
        self._max_payload_bytes = max_payload_bytes

    async def load(self, parts: AsyncIterator[LoadHeader | PayloadChunk]) -> ResidentAdapter:
        """Receive and load; returns when the revision is at the tier that the header wants.

        Raises:
            InvalidRequestError: no header came first.
            PayloadError: manifest or payload are not what the digest says; nothing is kept.
            AdapterTooLargeError: it cannot fit this node.
        """
        header = await anext(parts, None)
        if not isinstance(header, LoadHeader):
            raise InvalidRequestError("part: a load begins with its header", metadata={"field": "part"})
        manifest = parse_manifest(header.digest, header.manifest)
        if not header.store_path and not await self._is_here(header.digest):
            await self._receive(header, manifest.payload_bytes, parts)
        source = AdapterSource(header.digest, header.store_path, manifest.payload_bytes)
        return await self._engine.load_adapter(DesiredAdapter(source, header.tier, header.pinned))

    async def _is_here(self, digest: str) -> bool:
        held = {a.digest for a in await self._engine.resident() if a.tier is not ResidencyTier.ABSENT}
        return digest in held

    async def _receive(
        self, header: LoadHeader, payload_bytes: int, parts: AsyncIterator[LoadHeader | PayloadChunk]
    ) -> None:
        if payload_bytes > self._max_payload_bytes:
            raise AdapterTooLargeError(
                f"the payload has {payload_bytes} bytes, this node's disk cache {self._max_payload_bytes}",
                metadata={"limit": "disk_cache_bytes", "maximum": str(self._max_payload_bytes)},
            )
        receiver = PayloadReceiver(self._cache_dir, header.digest, header.manifest)
        try:
            async for part in parts:
                if not isinstance(part, PayloadChunk):
                    raise InvalidRequestError("part: a second header came", metadata={"field": "part"})
                await asyncio.to_thread(receiver.write, part.offset, part.data)
            await asyncio.to_thread(receiver.commit)
        finally:
            receiver.discard()
