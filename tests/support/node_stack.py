"""A manager's rooms with running agents, over nodes' real gRPC services."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from adapter_manager.domain.caller import Caller
from adapter_manager.infra.node_client import GrpcNodeClient
from lorikeet.residency.v1 import residency_pb2 as pb
from tests.support.built_revisions import MemoryArtifacts
from tests.support.fake_node import FakeNode
from tests.support.manager_parts import Parts, make_parts, running_node
from tests.support.memory_registry import MemoryRegistry
from tests.support.waiting import eventually

DEMO, OTHER = Caller("demo", is_admin=False), Caller("other", is_admin=False)
ACTIVE, HOST, DISK = pb.RESIDENCY_TIER_ACTIVE, pb.RESIDENCY_TIER_HOST, pb.RESIDENCY_TIER_DISK


class SharedArtifacts(MemoryArtifacts):
    """Artifacts that a node on this machine can also read as files."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory
        self.url = directory.as_uri()

    async def put(self, built: object) -> bool:
        """As files too."""
        is_new = await super().put(built)  # pyright: ignore[reportArgumentType]
        for digest, (_, payload) in self.stored.items():
            folder = self._directory / "revisions" / digest
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "payload").write_bytes(payload)
        return is_new


@asynccontextmanager
async def running(parts: Parts) -> AsyncIterator[Parts]:
    """The background tasks of a manager."""
    tasks = [asyncio.create_task(parts.mirror.run()), *(asyncio.create_task(a.run()) for a in parts.agents)]
    try:
        yield parts
        for task in tasks:
            assert not task.done(), task
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def stack(
    tmp_path: Path,
    *,
    num_nodes: int = 1,
    registry: MemoryRegistry | None = None,
    base_digests: Sequence[str] = (),
    probes_on_load: bool = False,
    **options: object,
) -> AsyncIterator[tuple[Parts, list[FakeNode]]]:
    """A manager and its nodes, connected, with two tenants. `base_digests`: a node for each."""
    bases = [{"base_digest": base} for base in base_digests] or [{}] * num_nodes
    async with AsyncExitStack() as exits:
        nodes: list[FakeNode] = []
        clients: list[GrpcNodeClient] = []
        for base in bases:
            node, client = await exits.enter_async_context(running_node(**options, **base))
            nodes.append(node)
            clients.append(client)
        store = SharedArtifacts(tmp_path)
        parts = make_parts(
            registry or MemoryRegistry(), store, tmp_path, clients=clients, probes_on_load=probes_on_load
        )
        await exits.enter_async_context(running(parts))
        for tenant in ("demo", "other"):
            if await parts.registry.tenant(tenant) is None:
                await parts.tenant(tenant)
        await eventually(lambda: len(parts.fleet.connected) == len(nodes))
        yield parts, nodes


def tokens(node: FakeNode) -> set[str]:
    """Hashes of all the tokens that the node lets in."""
    return {t for tenant in node.tenants for t in tenant.token_sha256}


def tier(node: FakeNode, digest: str) -> int:
    """Where the node has it; ABSENT where nowhere."""
    return node.held[digest].tier if digest in node.held else pb.RESIDENCY_TIER_ABSENT
