"""Keeps one node in agreement with the registry: watches it, pushes catalogs, loads and unloads.

Agreement is reached by comparing what is wanted with what is there, on each change and at least every
`resync_s`; events only make it faster. One revision's failure never holds up another.
"""

import asyncio
import contextlib
import random
from dataclasses import dataclass
from typing import NoReturn

import structlog

from adapter_manager.application.mirror import RegistryMirror
from adapter_manager.application.models import ModelDirectory
from adapter_manager.application.node_work import NodeWork
from adapter_manager.application.payloads import PayloadPusher
from adapter_manager.domain.adapter import RevisionState
from adapter_manager.domain.catalog import NodeCatalog, RegistryView, WantedRevision
from adapter_manager.domain.errors import (
    NodeCallError,
    RegistryUnavailableError,
)
from adapter_manager.domain.node import (
    Demanded,
    NodeEvent,
    NodeModel,
    ResidencyChanged,
    ResidencySnapshot,
    ResidencyTier,
    Used,
)
from adapter_manager.domain.placement import LoadStep, node_catalog, plan
from adapter_manager.domain.probe import ProbeFindings
from adapter_manager.ports import ArtifactStore, Clock, NodeClient, Registry
from lorikeet_contract.status import StatusCode

log = structlog.get_logger(__name__)

# A caller waits for this: a node that is slower is shown as it was last seen.
_REFRESH_S = 2.0


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """How patient and how busy an agent is."""

    debounce_s: float = 0.05
    resync_s: float = 3.0
    longest_reconnect_s: float = 5.0
    load_timeout_s: float = 300.0
    concurrent_loads: int = 4


class NodeAgent:
    """One node's agent: the only one who calls it, and the owner of what is known of it."""

    def __init__(
        self,
        client: NodeClient,
        registry: Registry,
        mirror: RegistryMirror,
        models: ModelDirectory,
        store: ArtifactStore,
        clock: Clock,
        options: AgentOptions,
    ) -> None:
        self.address = client.address
        self.model: NodeModel | None = None
        self.is_connected = False
        self._client = client
        self._registry = registry
        self._mirror = mirror
        self._models = models
        self._store = store
        self._pusher = PayloadPusher(client, store)
        self._clock = clock
        self._options = options
        self._catalog_generation = -1
        self._is_behind = False
        self._synced = asyncio.Event()
        self._wake = asyncio.Event()
        self._catalog: tuple[RegistryView, NodeModel, NodeCatalog] | None = None
        self.work = NodeWork(
            client,
            self._pusher,
            clock,
            self._wake.set,
            load_timeout_s=options.load_timeout_s,
            concurrent_loads=options.concurrent_loads,
        )

    async def run(self) -> NoReturn:
        """Connect and follow the node, for ever."""
        pause_s = 0.1
        while True:
            started_s = self._clock()
            try:
                await self._follow()
            except NodeCallError as error:
                if self.is_connected or pause_s <= 0.1:
                    log.warning("node.lost", node=self.address, error=error.message)
            finally:
                await self._disconnected()
            if self._clock() - started_s > self._options.longest_reconnect_s:
                pause_s = 0.1
            await asyncio.sleep(pause_s * random.uniform(0.5, 1))  # noqa: S311 (spreads managers out)
            pause_s = min(pause_s * 2, self._options.longest_reconnect_s)

    async def ensure(self, wish: WantedRevision, generation: int, timeout_s: float) -> None:
        """Load now, whatever failed before; returns when it is there or its failure is recorded.

        `generation` is the catalog's that has the wish: the node must know it, and the store's URL, first.
        """
        self.work.failures.pop(wish.digest, None)
        try:
            async with asyncio.timeout(timeout_s):
                await self.synced(generation)
        except TimeoutError:
            message = f"node {self.address} did not take the catalog in time"
            self.work.failed(wish.digest, message, is_final=False)
        except NodeCallError as error:
            self.work.failed(wish.digest, error.message, is_final=False)
        else:
            await self.work.load(LoadStep(wish.digest, wish.tier, wish.is_pinned), timeout_s)

    async def retry(self, digest: str) -> None:
        """Load a revision at once if the node or this agent failed to; returns when that has ended."""
        await self.refresh()
        held = self.work.held.get(digest)
        if digest not in self.work.failures and not (held and held.failure):
            return
        catalog = self.wanted(self._mirror.view)
        if wish := catalog.wish(digest) if catalog else None:
            # It was asked for there: it comes as far as host memory even where nothing wants it for long.
            tier = ResidencyTier.HOST if wish.tier is ResidencyTier.ABSENT else wish.tier
            await self.work.retry(LoadStep(digest, tier, wish.is_pinned), self._options.load_timeout_s)

    @property
    def catalog_generation(self) -> int:
        """The catalog that the node works by, as far as is known; -1 while it is not connected."""
        return self._catalog_generation

    async def synced(self, generation: int) -> None:
        """Wait until the node works by a catalog of at least this generation.

        Raises:
            NodeCallError: the node is away, or goes away meanwhile.
        """
        while self._catalog_generation < generation:
            if not self.is_connected:
                raise NodeCallError(self.address, StatusCode.UNAVAILABLE, "AWAY", "it is not connected")
            self._synced.clear()
            self._wake.set()
            await self._synced.wait()

    async def probe(self, digest: str, timeout_s: float) -> ProbeFindings:
        """Have the node compare a revision with its base model. Raises NodeCallError."""
        return await self._client.probe(digest, timeout_s)

    def wanted(self, view: RegistryView) -> NodeCatalog | None:
        """What this node should have; None while nobody knows what it serves."""
        if self.model is None:
            return None
        if self._catalog is None or self._catalog[0] is not view or self._catalog[1] is not self.model:
            self._catalog = (view, self.model, node_catalog(view, self.model, self._store.url))
        return self._catalog[2]

    async def _follow(self) -> None:
        model = await self._client.model()
        if self.model is None or model.instance_id != self.model.instance_id:
            self._pusher.restarted()
            self.work.failures.clear()
        self.model = model
        tasks = [
            asyncio.create_task(work, name=f"{self.address} follow")
            for work in (
                self._watch(model.instance_id),
                self._converge_always(model),
                self._wake_on_changes(),
            )
        ]
        try:
            # A node that went away ends its watch; any other task only ends with an error.
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, instance_id: str) -> None:
        async for event in self._client.watch():
            if isinstance(event, ResidencySnapshot) and event.instance_id != instance_id:
                return  # it restarted between two calls: begin again
            self._apply(event)

    def _apply(self, event: NodeEvent) -> None:
        match event:
            case ResidencySnapshot():
                self._take(event)
                if not self.is_connected:
                    self.is_connected = True
                    log.info("node.connected", node=self.address, instance_id=event.instance_id)
                self._wake.set()
            case ResidencyChanged():
                self.work.held[event.adapter.digest] = event.adapter
                self._wake.set()
            case Demanded():
                self._answer_demand(event)
            case Used():
                log.debug("adapter.used", node=self.address, digest=event.digest, requests=event.requests)

    def _take(self, snapshot: ResidencySnapshot) -> None:
        self.work.held = {a.digest: a for a in snapshot.adapters}
        self._catalog_generation = snapshot.catalog_generation

    async def _wake_on_changes(self) -> NoReturn:
        view = self._mirror.view
        while True:
            view = await self._mirror.changed(view)
            self._wake.set()

    async def _converge_always(self, model: NodeModel) -> NoReturn:
        synced_view = RegistryView()
        while True:
            # Not wait_for: before 3.12 it loses a cancellation that comes together with the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._options.resync_s):
                    await self._wake.wait()
            if self._wake.is_set():
                await asyncio.sleep(self._options.debounce_s)  # one push for a burst of changes
            is_periodic = not self._wake.is_set()
            self._wake.clear()
            if not self.is_connected:
                continue
            await self._models.seen(model.model)
            view = self._mirror.view
            if not view.epoch:
                continue  # never read: an empty catalog would take everything from the node
            if is_periodic:
                await self._recheck(model)
            if view is not synced_view or self._catalog_generation != view.generation:
                await self._sync(view)
                synced_view = view
            self._begin_steps(view)

    async def refresh(self) -> None:
        """Take the node's own list now; a node that does not answer soon keeps what was known of it."""
        with contextlib.suppress(NodeCallError, TimeoutError):
            async with asyncio.timeout(_REFRESH_S):
                snapshot = await self._client.resident()
            if self.model is not None and snapshot.instance_id == self.model.instance_id:
                self._take(snapshot)

    async def _recheck(self, model: NodeModel) -> None:
        snapshot = await self._client.resident()
        if snapshot.instance_id != model.instance_id:
            raise NodeCallError(self.address, StatusCode.UNAVAILABLE, "RESTARTED", "the node restarted")
        self._take(snapshot)

    async def _sync(self, view: RegistryView) -> None:
        if self._catalog_generation > view.generation:
            with contextlib.suppress(RegistryUnavailableError):
                view = await self._mirror.refresh()
                if self._catalog_generation > view.generation:
                    # The registry came back older than what the node has: go past it, once for all nodes.
                    await self._registry.raise_generation(self._catalog_generation)
                    view = await self._mirror.refresh()
        if self._catalog_generation > view.generation:
            return
        catalog = self.wanted(view)
        assert catalog is not None, "the node's model is known while it is connected"
        self._catalog_generation = await self._client.sync_catalog(catalog)
        self._synced.set()
        log.info(
            "residency.pushed",
            node=self.address,
            generation=view.generation,
            adapters=len(catalog.adapters),
            wanted=sum(w.tier is not ResidencyTier.ABSENT for w in catalog.revisions),
        )

    def _begin_steps(self, view: RegistryView) -> None:
        registered = {
            r.digest
            for a in view.adapters.values()
            for r in a.revisions
            if r.state is not RevisionState.DELETING
        }
        catalog = self.wanted(view)
        assert catalog is not None, "the node's model is known while it is connected"
        self.work.forget_failures(_ready(view))
        loads, unloads = plan(catalog, self.work.held.values(), registered)
        self.work.begin((*loads, *unloads))
        was_behind, self._is_behind = self._is_behind, bool(loads or unloads)
        if was_behind and not self._is_behind:
            log.info("residency.reconciled", node=self.address, generation=view.generation)

    def _answer_demand(self, demand: Demanded) -> None:
        catalog = self.wanted(self._mirror.view)
        # Not READY, or made for another base model: no byte of it goes there.
        if catalog is None or catalog.wish(demand.digest) is None:
            log.warning("residency.demand_refused", node=self.address, digest=demand.digest)
            return
        log.info(
            "residency.demanded",
            node=self.address,
            digest=demand.digest,
            waiting_requests=demand.waiting_requests,
        )
        self.work.stream(demand.digest)

    async def _disconnected(self) -> None:
        self.is_connected = False
        self._catalog_generation = -1
        self._synced.set()  # who waits for a catalog is to hear that there is no node
        await self.work.disconnect()


def _ready(view: RegistryView) -> set[str]:
    return {r.digest for a in view.adapters.values() for r in a.ready}
