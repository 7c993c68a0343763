"""A load that the manager asks for: from the shared store, or with the payload streamed along."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import structlog

from inference_service.domain.adapter import AdapterSource, DesiredAdapter, ResidencyTier, ResidentAdapter
from inference_service.domain.errors import (
    AdapterTooLargeError,
    AdapterUnavailableError,
    DiskCacheError,
    InvalidRequestError,
    PayloadMissingError,
)
from inference_service.engine.payload_cache import PayloadReceiver, parse_manifest
from inference_service.ports import Engine

log = structlog.get_logger()


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
            DiskCacheError: the disk was full; room was made, so that another attempt may succeed.
            AdapterUnavailableError: the disk is full, and no adapter's bytes could be given up for this one.
        """
        header = await anext(parts, None)
        if not isinstance(header, LoadHeader):
            raise InvalidRequestError("part: a load begins with its header", metadata={"field": "part"})
        num_bytes = parse_manifest(header.digest, header.manifest).payload_bytes
        source = AdapterSource(header.digest, header.store_path, num_bytes)
        wanted = DesiredAdapter(source, header.tier, header.pinned)
        if header.store_path:
            return await self._engine.load_adapter(wanted)
        if await self._is_here(header.digest):
            try:
                return await self._engine.load_adapter(wanted)
            except PayloadMissingError:
                # What was here was damaged and thrown away; the payload that follows takes its place.
                log.info("residency.replaced", adapter=header.digest)
        await self._receive(header, num_bytes, parts)
        return await self._engine.load_adapter(wanted)

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
        try:
            await self._write(PayloadReceiver(self._cache_dir, header.digest, header.manifest), parts)
        except DiskCacheError as error:
            if await self._engine.make_disk_room(payload_bytes):
                raise
            raise AdapterUnavailableError(
                f"{error.message}, and nothing there could make room for {payload_bytes} bytes"
            ) from error

    async def _write(
        self, receiver: PayloadReceiver, parts: AsyncIterator[LoadHeader | PayloadChunk]
    ) -> None:
        try:
            async for part in parts:
                if not isinstance(part, PayloadChunk):
                    raise InvalidRequestError("part: a second header came", metadata={"field": "part"})
                await asyncio.to_thread(receiver.write, part.offset, part.data)
            await asyncio.to_thread(receiver.commit)
        finally:
            receiver.discard()
