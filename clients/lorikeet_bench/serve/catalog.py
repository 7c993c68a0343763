"""A node without a manager: the bench itself tells it what there is, and where the adapters lie."""

import asyncio
import time
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from lorikeet.residency.v1 import residency_pb2 as pb
from lorikeet.residency.v1 import residency_service_pb2_grpc
from lorikeet_bench.load.generated_adapters import AdapterStore, StoredAdapter
from lorikeet_rpc.channel import open_channel
from lorikeet_rpc.tokens import hash_token

TENANT = "bench"
_CALL_S = 60.0
_LOAD_S = 600.0


async def push_catalog(inference: str, node_token: str, tenant_token: str, store: AdapterStore) -> float:
    """Name the store's adapters on a node, for tenant "bench", and load and pin all of them on the device.

    Args:
        inference: the node; it must share this machine's files.
        node_token: what its manager would call with.
        tenant_token: what the bench's requests come with.
        store: may be empty: then only the tenant is named.

    Returns:
        Seconds that the loads took.

    Raises:
        AioRpcError: the node refused.
    """
    # Each catalog of one bench replaces the one before it, on the same node.
    page = pb.SyncCatalogRequest(generation=time.time_ns(), last_page=True, store_url=store.url)
    page.tenants.add(tenant=TENANT, weight=1, token_sha256=[hash_token(tenant_token)])
    for adapter in store.adapters:
        page.adapters.add(
            tenant=TENANT, adapter=adapter.name, current_digest=adapter.digest, digests=[adapter.digest]
        )
        page.revisions.add(
            digest=adapter.digest,
            store_path=adapter.store_path,
            payload_bytes=adapter.payload_bytes,
            desired=pb.RESIDENCY_TIER_ACTIVE,
            pinned=True,
        )
    async with open_channel(inference, token=node_token, aio=True) as channel:
        stub: Any = residency_service_pb2_grpc.ResidencyServiceStub(channel)  # its types know no asyncio
        await stub.SyncCatalog(iter([page]), timeout=_CALL_S)
        begun_s = time.perf_counter()
        await asyncio.gather(
            *(stub.LoadAdapter(iter([_load(store, one)]), timeout=_LOAD_S) for one in store.adapters)
        )
        return time.perf_counter() - begun_s


def _load(store: AdapterStore, adapter: StoredAdapter) -> pb.LoadAdapterRequest:
    root = Path(unquote(urlparse(store.url).path))
    header = pb.LoadHeader(
        digest=adapter.digest,
        manifest=(root / adapter.store_path / "manifest.json").read_bytes(),
        tier=pb.RESIDENCY_TIER_ACTIVE,
        pinned=True,
        store_path=adapter.store_path,
    )
    return pb.LoadAdapterRequest(header=header)
