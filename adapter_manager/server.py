"""Builds the adapter manager out of its settings and runs it until a signal. Nothing else builds anything."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager

import structlog

from adapter_manager.api.adapter_servicer import AdapterServicer
from adapter_manager.api.authentication import TokenAuthenticator
from adapter_manager.api.tenant_servicer import TenantServicer
from adapter_manager.application.adapters import AdapterDirectory
from adapter_manager.application.deletion import Deletion
from adapter_manager.application.ingest import IngestLimits, UploadStaging
from adapter_manager.application.janitor import Janitor
from adapter_manager.application.mirror import RegistryMirror
from adapter_manager.application.models import ModelDirectory
from adapter_manager.application.node_agent import AgentOptions, NodeAgent
from adapter_manager.application.probes import ProbeService
from adapter_manager.application.registration import Registration, RegistrationLimits
from adapter_manager.application.residency import Fleet, ResidencyService
from adapter_manager.application.tenants import TenantDirectory
from adapter_manager.application.transactions import Transactions
from adapter_manager.application.uploads import UploadService
from adapter_manager.domain.errors import ConcurrentChangeError, RegistryUnavailableError
from adapter_manager.infra.artifact_store import open_artifact_store
from adapter_manager.infra.data_directory import DataDirectory
from adapter_manager.infra.node_client import GrpcNodeClient
from adapter_manager.infra.redis.connection import RedisConnection, RedisOptions
from adapter_manager.infra.redis.embedded import EmbeddedValkey
from adapter_manager.infra.redis.identity import RegistryIdentity
from adapter_manager.infra.redis.registry import RedisRegistry
from adapter_manager.metrics import ManagerMetrics, ObservedArtifacts, ObservedNode
from adapter_manager.settings import Settings
from lorikeet.adapters.v1 import (
    adapter_service_pb2,
    adapter_service_pb2_grpc,
    tenant_service_pb2,
    tenant_service_pb2_grpc,
)
from lorikeet_rpc.channel import ClientTls
from lorikeet_rpc.ending import end_tasks
from lorikeet_rpc.interceptors import RequestInterceptor
from lorikeet_rpc.metrics_endpoint import MetricsEndpoint
from lorikeet_rpc.server import RpcServer
from lorikeet_rpc.tokens import new_token

log = structlog.get_logger(__name__)

# From the descriptors: reflection shows a service only if its file is loaded, and stubs load messages alone.
_SERVICES = tuple(
    service.full_name
    for file in (adapter_service_pb2.DESCRIPTOR, tenant_service_pb2.DESCRIPTOR)
    for service in file.services_by_name.values()
)
# How long a start waits for an external registry before it serves what it can without one.
_PATIENCE_S = 10.0


class Manager:
    """Everything that runs in this process, wired together. `server.start` comes after `prepare`."""

    def __init__(
        self,
        settings: Settings,
        directory: DataDirectory,
        registry: RedisRegistry,
        metrics: ManagerMetrics,
    ) -> None:
        manager_id = directory.manager_id()
        files = open_artifact_store(settings.store_url or directory.artifacts.resolve().as_uri())
        store = ObservedArtifacts(files, metrics.registry)
        self.mirror = RegistryMirror(registry)
        transactions = Transactions(registry, self.mirror)
        self.tenants = TenantDirectory(registry, transactions, new_token, time.time)
        self.models = ModelDirectory(registry, self.mirror, transactions, time.time)
        tls = ClientTls(settings.nodes_tls_ca) if settings.nodes_tls or settings.nodes_tls_ca else None
        self.clients = [
            GrpcNodeClient(address, settings.node_token.get_secret_value(), tls) for address in settings.nodes
        ]
        options = AgentOptions(load_timeout_s=settings.load_timeout_s)
        self.agents = [
            NodeAgent(
                ObservedNode(client, metrics.pushes),
                registry,
                self.mirror,
                self.models,
                store,
                time.time,
                options,
            )
            for client in self.clients
        ]
        fleet = Fleet(self.agents, self.mirror)
        metrics.follow(self.mirror, fleet)
        deletion = Deletion(registry, transactions, store, fleet, time.time, manager_id)
        limits = RegistrationLimits(settings.max_adapters, settings.max_revisions)
        registration = Registration(registry, transactions, store, deletion, time.time, manager_id, limits)
        staging = UploadStaging(directory.staging, IngestLimits(max_upload_bytes=settings.max_upload_bytes))
        uploads = UploadService(
            registry, registration, store, self.models, staging, time.time, metrics.uploads
        )
        self.janitor = Janitor(self.mirror, registration, deletion, staging, time.time, manager_id)
        adapters = AdapterDirectory(registry, self.mirror, transactions, time.time)
        residency = ResidencyService(adapters, fleet, self.mirror)
        self.probes = ProbeService(
            registry,
            transactions,
            self.mirror,
            adapters,
            fleet,
            time.time,
            is_automatic=settings.probe_on_load,
        )

        self.interceptor = RequestInterceptor(
            TokenAuthenticator(self.mirror), "adapter_manager", metrics=metrics.uploads
        )
        self.server = RpcServer(
            settings.listen,
            tls=settings.tls,
            interceptors=[self.interceptor],
            service_names=_SERVICES,
            insecure_listen=settings.insecure_listen,
        )
        adapter_service_pb2_grpc.add_AdapterServiceServicer_to_server(
            AdapterServicer(
                adapters, uploads, deletion, residency, fleet, self.probes, settings.load_timeout_s
            ),
            self.server.server,
        )
        tenant_service_pb2_grpc.add_TenantServiceServicer_to_server(
            TenantServicer(self.tenants, fleet), self.server.server
        )

    async def prepare(self, directory: DataDirectory, bootstrap_tenant: str | None) -> None:
        """Read the registry, make the bootstrap tenant, finish what a former process left."""
        while True:
            try:
                await self.mirror.refresh()
                if bootstrap_tenant:
                    if not await self.tenants.bootstrap(bootstrap_tenant, directory.bootstrap_token()):
                        fresh = directory.fresh_bootstrap_token()
                        await self.tenants.add_token(bootstrap_tenant, fresh, is_admin=True)
                    log.info("tenant.bootstrapped", tenant=bootstrap_tenant)
                await self.janitor.sweep(is_first=True)
            except (RegistryUnavailableError, ConcurrentChangeError):
                await asyncio.sleep(0.5)
            else:
                return


async def serve(settings: Settings) -> None:
    """Run until SIGTERM or SIGINT, then drain and stop in order.

    Raises:
        DataDirectoryInUseError, ListenError: another process is in the way.
    """
    directory = DataDirectory(settings.data_dir)
    metrics = ManagerMetrics()
    async with AsyncExitStack() as stack:
        stack.enter_context(directory.lock())
        registry = await stack.enter_async_context(_registry(settings, directory, metrics))
        manager = Manager(settings, directory, registry, metrics)
        for client in manager.clients:
            stack.push_async_callback(client.close)
        if settings.metrics_listen:
            stack.callback(MetricsEndpoint(settings.metrics_listen, metrics.registry).close)
        preparing = asyncio.create_task(manager.prepare(directory, settings.bootstrap_tenant), name="prepare")
        await asyncio.wait((preparing,), timeout=_PATIENCE_S)
        if preparing.done():
            preparing.result()
        port = await manager.server.start()
        log.info("server.started", service="adapter_manager", listen=settings.listen, port=port)
        work = [
            preparing,
            asyncio.create_task(manager.mirror.run(), name="mirror"),
            asyncio.create_task(manager.janitor.run(), name="janitor"),
            asyncio.create_task(manager.probes.run(), name="probes"),
            *(asyncio.create_task(agent.run(), name=f"agent {agent.address}") for agent in manager.agents),
        ]
        await _until_signal(manager, work, settings.drain_grace_s)


async def _until_signal(manager: Manager, work: list[asyncio.Task[None]], grace_s: float) -> None:
    """Serve; a background task that ends with an error is a bug, and ends the process too."""
    serving = asyncio.create_task(manager.server.serve_until_signal(manager.interceptor.idle, grace_s))
    try:
        waiting: set[asyncio.Task[None]] = {serving, *work}
        while not serving.done():
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        await end_tasks((serving, *work))


@asynccontextmanager
async def _registry(
    settings: Settings, directory: DataDirectory, metrics: ManagerMetrics
) -> AsyncGenerator[RedisRegistry]:
    async with AsyncExitStack() as stack:
        if settings.redis_url:
            url = settings.redis_url.get_secret_value()
        else:
            embedded = EmbeddedValkey(directory.valkey)
            # Also where the start fails half-way: nothing may be left running.
            stack.push_async_callback(embedded.stop)
            await embedded.start()
            url = embedded.url
        identity = RegistryIdentity(directory.registry_epoch, is_adopting=settings.adopt_registry)
        registry = RedisRegistry(RedisConnection(RedisOptions(url), metrics.store), identity)
        stack.push_async_callback(registry.close)
        yield registry
