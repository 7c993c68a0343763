"""A node as a process without a manager: the test itself pushes catalogs, payloads and wishes to it."""

import dataclasses
import hashlib
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np

from adapter_manager.application.ingest import IngestTarget, ingest_directory
from lorikeet.inference.v1 import model_pb2
from lorikeet.residency.v1 import residency_pb2 as pb
from lorikeet.residency.v1 import residency_service_pb2_grpc
from lorikeet_contract.manifest import Manifest, PayloadDtype, padded_rank
from lorikeet_rpc.schema_message import schema_from_message
from lorikeet_rpc.tokens import hash_token
from tests.support.stack import NODE_TOKEN, Stack

TENANT, TOKEN = "demo", "lone-tenant-token"
ACTIVE = pb.RESIDENCY_TIER_ACTIVE
_CHUNK_BYTES = 1 << 18


@dataclass(frozen=True)
class Revision:
    """A canonical revision in memory. `document` are the manifest's bytes, which need not be a manifest."""

    document: bytes
    payload: bytes

    @property
    def digest(self) -> str:
        """What names it."""
        return hashlib.sha256(self.document).hexdigest()

    @property
    def manifest(self) -> Manifest:
        """Parsed."""
        return Manifest.from_json(self.document)

    def changed(self, **fields: Any) -> "Revision":
        """With other fields of the manifest, consistent in itself."""
        return dataclasses.replace(self, document=dataclasses.replace(self.manifest, **fields).to_json())

    def with_payload(self, payload: bytes) -> "Revision":
        """With another payload, consistent in itself."""
        layers = tuple(
            dataclasses.replace(
                layer,
                sha256=hashlib.sha256(payload[layer.offset : layer.offset + layer.num_bytes]).hexdigest(),
            )
            for layer in self.manifest.layers
        )
        return dataclasses.replace(self.changed(layers=layers, payload_bytes=len(payload)), payload=payload)

    def numbered(self, number: int) -> "Revision":
        """Another revision that computes the same: only a padding row of A differs, and its B is zero."""
        manifest = self.manifest
        site = manifest.layers[0].sites[-1]
        assert manifest.dtype is PayloadDtype.FLOAT32
        assert site.rank < padded_rank(site.rank)
        *_, rows, columns = site.a.shape
        offset = site.a.offset + 4 * (rows * columns - 1)
        payload = bytearray(self.payload)
        payload[offset : offset + 4] = np.float32(number).tobytes()
        return self.with_payload(bytes(payload))


@dataclass
class LoneNode:
    """The running node and what its catalog names."""

    stack: Stack
    model: model_pb2.GetModelResponse
    store: Path
    residency: Any
    generation: int = 0
    names: dict[str, Revision] = field(default_factory=dict)
    pinned: set[str] = field(default_factory=set)

    def ingested(self, directory: Path) -> Revision:
        """A PEFT directory as the manager makes a revision of it."""
        target = IngestTarget(schema_from_message(self.model.lora_schema), self.model.base_digest)
        payload = directory / "payload"
        built = ingest_directory(directory, target, payload)
        return Revision(built.manifest.to_json(), built.payload_path.read_bytes())

    def put(self, revision: Revision) -> Path:
        """Into the store; returns the revision's directory."""
        directory = self.store / "revisions" / revision.digest
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "payload").write_bytes(revision.payload)
        (directory / "manifest.json").write_bytes(revision.document)
        return directory

    async def sync(self) -> None:
        """Push a catalog of `names`; those in `pinned` are wanted on the device."""
        self.generation += 1
        page = pb.SyncCatalogRequest(
            generation=self.generation, last_page=True, store_url=self.store.as_uri()
        )
        page.tenants.add(tenant=TENANT, weight=1, token_sha256=[hash_token(TOKEN)])
        for name, revision in self.names.items():
            digest = revision.digest
            page.adapters.add(tenant=TENANT, adapter=name, current_digest=digest, digests=[digest])
            page.revisions.add(
                digest=digest,
                store_path=f"revisions/{digest}",
                payload_bytes=len(revision.payload),
                desired=ACTIVE if name in self.pinned else pb.RESIDENCY_TIER_ABSENT,
                pinned=name in self.pinned,
            )
        await self.residency.SyncCatalog(iter([page]), metadata=self.auth, timeout=30)

    async def load(self, revision: Revision, *, is_streamed: bool = False) -> pb.ResidentAdapter:
        """Bring a revision to the device; raises grpc.aio.AioRpcError."""
        reply = await self.residency.LoadAdapter(
            iter(load_parts(revision, is_streamed=is_streamed)), metadata=self.auth, timeout=60
        )
        return reply.adapter

    async def unload(self, revision: Revision, *, keep_on_disk: bool = True) -> bool:
        """Take a revision off; False: it was not there."""
        request = pb.UnloadAdapterRequest(digest=revision.digest, keep_on_disk=keep_on_disk)
        return (await self.residency.UnloadAdapter(request, metadata=self.auth, timeout=60)).unloaded

    async def refuse(self, revision: Revision, reason: str) -> bool:
        """Say that a demanded revision cannot be brought."""
        request = pb.RefuseDemandRequest(digest=revision.digest, reason=reason)
        return (await self.residency.RefuseDemand(request, metadata=self.auth, timeout=30)).was_awaited

    async def resident(self) -> pb.ListResidentResponse:
        """What the node holds."""
        return await self.residency.ListResident(pb.ListResidentRequest(), metadata=self.auth, timeout=30)

    @property
    def auth(self) -> tuple[tuple[str, str], ...]:
        """The manager's call metadata."""
        return self.stack.auth(NODE_TOKEN)


def load_parts(revision: Revision, *, is_streamed: bool) -> Iterable[pb.LoadAdapterRequest]:
    """The messages of a load; `is_streamed`: with the payload, else from the store."""
    header = pb.LoadHeader(
        digest=revision.digest,
        manifest=revision.document,
        tier=ACTIVE,
        store_path="" if is_streamed else f"revisions/{revision.digest}",
    )
    yield pb.LoadAdapterRequest(header=header)
    for offset in range(0, len(revision.payload) if is_streamed else 0, _CHUNK_BYTES):
        data = revision.payload[offset : offset + _CHUNK_BYTES]
        yield pb.LoadAdapterRequest(chunk=pb.PayloadChunk(offset=offset, data=data))


@asynccontextmanager
async def lone_node(base: Path, root: Path, node_flags: Sequence[str] = ()) -> AsyncIterator[LoneNode]:
    """Start a node over a model directory; it has an empty catalog with one tenant."""
    stack = Stack(base, root / "stack", node_flags=node_flags)
    stack.token = TOKEN
    store = root / "store"
    (store / "revisions").mkdir(parents=True)
    stack.node.start()
    channel = grpc.aio.insecure_channel(stack.node_address)
    try:
        await stack._serving(stack.node, stack.node_address, 180)
        residency = residency_service_pb2_grpc.ResidencyServiceStub(channel)
        node = LoneNode(stack, model_pb2.GetModelResponse(), store, residency)
        await node.sync()
        node.model = await stack.model()
        yield node
    finally:
        await channel.close()
        await stack.__aexit__()
