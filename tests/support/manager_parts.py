"""The manager's application rooms wired over fakes, for tests of one process without network or files."""

import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from adapter_manager.application.adapters import AdapterDirectory
from adapter_manager.application.deletion import Deletion
from adapter_manager.application.mirror import RegistryMirror
from adapter_manager.application.models import ModelDirectory
from adapter_manager.application.node_agent import AgentOptions, NodeAgent
from adapter_manager.application.probes import ProbeService
from adapter_manager.application.registration import Registration, RegistrationLimits, UploadIdentity
from adapter_manager.application.residency import Fleet, ResidencyService
from adapter_manager.application.tenants import TenantDirectory
from adapter_manager.application.transactions import Transactions
from adapter_manager.domain.adapter import Revision
from adapter_manager.domain.caller import Caller
from adapter_manager.domain.tenant import TenantLimits
from adapter_manager.infra.node_client import GrpcNodeClient
from adapter_manager.ports import ArtifactStore, Registry
from lorikeet_contract.names import AdapterName
from lorikeet_rpc.tokens import new_token
from tests.support.built_revisions import make_built
from tests.support.fake_node import TOKEN, FakeNode

ADMIN = Caller("root", is_admin=True)
MANAGER_ID = "manager-1"


@dataclass
class Parts:
    """Everything, ready; nothing runs by itself until `agents`' tasks are started."""

    registry: Registry
    store: ArtifactStore
    directory: Path
    mirror: RegistryMirror
    transactions: Transactions
    tenants: TenantDirectory
    models: ModelDirectory
    agents: Sequence[NodeAgent]
    fleet: Fleet
    deletion: Deletion
    registration: Registration
    adapters: AdapterDirectory
    residency: ResidencyService
    probes: ProbeService

    async def push(
        self, name: str, seed: str = "one", *, aliases: Sequence[str] = (), request_id: str = ""
    ) -> tuple[Revision, bool]:
        """Register a small revision under t/a."""
        tenant, adapter = name.split("/")
        identity = UploadIdentity(AdapterName(tenant, adapter), tuple(aliases), request_id, "f", ())
        done = await self.registration.register(identity, make_built(self.directory, seed))
        return done.revision, done.is_created

    async def tenant(self, tenant_id: str, **limits: int) -> None:
        """Make a tenant."""
        await self.tenants.create(tenant_id, TenantLimits(**limits), "")


def make_parts(
    registry: Registry,
    store: ArtifactStore,
    directory: Path,
    *,
    clients: Sequence[GrpcNodeClient] = (),
    manager_id: str = MANAGER_ID,
    options: AgentOptions | None = None,
    limits: RegistrationLimits | None = None,
    probes_on_load: bool = False,
) -> Parts:
    """Wire the rooms; no task is started."""
    clock = _ticking()
    mirror = RegistryMirror(registry, poll_s=0.05)
    transactions = Transactions(registry, mirror)
    models = ModelDirectory(registry, mirror, transactions, clock)
    options = options or AgentOptions(debounce_s=0.02, resync_s=0.3, longest_reconnect_s=0.2)
    agents = [NodeAgent(c, registry, mirror, models, store, time.time, options) for c in clients]
    fleet = Fleet(agents, mirror)
    deletion = Deletion(registry, transactions, store, fleet, time.time, manager_id, unload_timeout_s=1.0)
    registration = Registration(
        registry, transactions, store, deletion, clock, manager_id, limits or RegistrationLimits()
    )
    adapters = AdapterDirectory(registry, mirror, transactions, clock)
    return Parts(
        registry, store, directory, mirror, transactions,
        TenantDirectory(registry, transactions, new_token, clock),
        models, agents, fleet, deletion, registration, adapters,
        ResidencyService(adapters, fleet, mirror),
        ProbeService(
            registry, transactions, mirror, adapters, fleet, time.time,
            is_automatic=probes_on_load, look_s=0.05,
        ),
    )  # fmt: skip


@asynccontextmanager
async def running_node(**options: object) -> AsyncIterator[tuple[FakeNode, GrpcNodeClient]]:
    """A fake node that serves, and the manager's real client of it."""
    node = FakeNode(**options)  # pyright: ignore[reportArgumentType]
    await node.start()
    client = GrpcNodeClient(node.address, TOKEN)
    try:
        yield node, client
    finally:
        await client.close()
        await node.stop()


def _ticking() -> Callable[[], float]:
    """Real time, but never the same twice, so that order is always told by it."""
    steps, origin_s = itertools.count(), time.time()
    return lambda: origin_s + next(steps) * 1e-6
