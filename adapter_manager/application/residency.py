"""All nodes together: load, unload and placement as callers ask for them."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from adapter_manager.application.adapters import AdapterDirectory
from adapter_manager.application.mirror import RegistryMirror
from adapter_manager.application.naming import not_found, ready_revision, reference
from adapter_manager.application.node_agent import NodeAgent
from adapter_manager.domain.adapter import Adapter, Revision, WantedTier
from adapter_manager.domain.caller import Caller
from adapter_manager.domain.catalog import NodeCatalog, RegistryView
from adapter_manager.domain.errors import NodeCallError, RevisionInUseError
from adapter_manager.domain.node import ResidencyTier, ResidentAdapter
from lorikeet_contract.names import AdapterName

# A write is acknowledged after this even if a connected node has not taken it: it will, with the next sync.
_CATCH_UP_S = 2.0
# A node that is asked what it failed may take that long, and once more for the load that follows.
_RETRY_S = 5.0


@dataclass(frozen=True, slots=True)
class Placement:
    """One revision on one node: what is and what should be."""

    node: str
    instance_id: str
    name: AdapterName
    resident: ResidentAdapter
    desired: ResidencyTier
    is_pinned: bool
    failure: str


class Fleet:
    """The agents of all nodes."""

    def __init__(self, agents: Sequence[NodeAgent], mirror: RegistryMirror) -> None:
        self.agents = tuple(agents)
        self._mirror = mirror

    @property
    def connected(self) -> Sequence[NodeAgent]:
        """Agents whose nodes answer."""
        return [a for a in self.agents if a.is_connected]

    async def catch_up(self) -> None:
        """Wait until the connected nodes work by what was just committed: its author can use it at once.

        Bounded: a slow node must not hold up a write that is durable already.
        """
        generation = self._mirror.view.generation
        await self._on_each(lambda agent: agent.synced(generation), _CATCH_UP_S)

    async def forget(self, digests: Sequence[str], timeout_s: float) -> None:
        """Take what was just deleted off the connected nodes; what fails here is reconciled later."""
        view = self._mirror.view
        kept = {r.digest for a in view.adapters.values() for r in a.ready}

        async def off(agent: NodeAgent) -> None:
            await agent.synced(view.generation)
            for digest in digests:
                if digest not in kept and digest in agent.work.held:
                    await agent.work.unload(digest, keep_on_disk=False, timeout_s=timeout_s)

        await self._on_each(off, timeout_s)

    async def retry(self, digest: str) -> None:
        """Have the connected nodes that could not load a revision try at once: its files are whole now.

        Bounded: a load goes on by itself, and requests on its node wait for it instead of failing.
        """
        await self._on_each(lambda agent: agent.retry(digest), _RETRY_S)

    async def _on_each(self, act: Callable[[NodeAgent], Coroutine[Any, Any, None]], timeout_s: float) -> None:
        """Do one thing on all connected nodes at once; what is late is given up, failures are not raised."""
        work = [asyncio.create_task(act(agent)) for agent in self.connected]
        if work:
            _, late = await asyncio.wait(work, timeout=timeout_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)


class ResidencyService:
    """Load, unload and placement for tenants and admins."""

    def __init__(self, directory: AdapterDirectory, fleet: Fleet, mirror: RegistryMirror) -> None:
        self._directory = directory
        self._fleet = fleet
        self._mirror = mirror

    async def load(
        self, caller: Caller, name: str, tier: WantedTier, timeout_s: float
    ) -> Sequence[Placement]:
        """Ask for a revision on every node of its base model, and keep asking after restarts.

        Returns when each connected node has it or has said why not; a placement's `failure` says which.
        """
        wanted = reference(caller, name)
        revision = ready_revision((await self._directory.stored(wanted.name)).value, wanted)

        def change(adapter: Adapter) -> Adapter:
            again = ready_revision(adapter, wanted)
            return adapter.with_wanted(again.digest, tier, adapter.update_time_s)

        await self._directory.change(wanted.name, "", change)
        view = self._mirror.view
        work = [
            asyncio.create_task(self._load_on(agent, view, revision, timeout_s))
            for agent in self._fleet.connected
        ]
        if work:
            await asyncio.wait(work)
            for task in work:
                task.result()
        return self._placements(view, wanted.name, {revision.digest}, shows_all_nodes=True)

    async def unload(self, caller: Caller, name: str, timeout_s: float) -> Sequence[Placement]:
        """Take a revision off the nodes once no request holds it; a request may bring it back."""
        wanted = reference(caller, name)
        stored = await self._directory.stored(wanted.name)
        revision = ready_revision(stored.value, wanted)
        named = {stored.value.current_digest, *(d for _, d in stored.value.aliases)}
        if stored.value.is_pinned and revision.digest in named:
            raise RevisionInUseError(
                f"adapter {wanted.name.short!r} is pinned; unpin it first",
                metadata={"adapter": wanted.name.short},
            )
        if revision.wanted:
            await self._directory.change(
                wanted.name, "", lambda a: a.with_wanted(revision.digest, None, a.update_time_s)
            )
        failures: dict[str, str] = {}

        async def off(agent: NodeAgent) -> None:
            try:
                await agent.work.unload(revision.digest, keep_on_disk=True, timeout_s=timeout_s)
            except NodeCallError as error:
                failures[agent.address] = error.message

        await asyncio.gather(*(off(agent) for agent in self._fleet.connected))
        placements = self._placements(self._mirror.view, wanted.name, {revision.digest}, shows_all_nodes=True)
        return [replace(p, failure=failures.get(p.node, p.failure)) for p in placements]

    async def fresh_placement(self, caller: Caller, name: str) -> Sequence[Placement]:
        """`placement` after asking the nodes: leases change too often to be told of each."""
        await asyncio.gather(*(agent.refresh() for agent in self._fleet.connected))
        return self.placement(caller, name)

    def placement(self, caller: Caller, name: str) -> Sequence[Placement]:
        """Where an adapter is, or all that the caller may see. From memory: works without the registry."""
        view = self._mirror.view
        if name:
            wanted = reference(caller, name)
            adapter = view.adapters.get(wanted.name.short)
            if adapter is None:
                raise not_found(wanted.name)
            is_one = wanted.alias is not None or wanted.digest is not None
            digests = (
                {ready_revision(adapter, wanted).digest} if is_one else {r.digest for r in adapter.ready}
            )
            return self._placements(view, wanted.name, digests, shows_all_nodes=False)
        visible = [a for a in view.adapters.values() if caller.may_see(a.tenant)]
        return [
            placement
            for adapter in visible
            for placement in self._placements(
                view, adapter.name, {r.digest for r in adapter.ready}, shows_all_nodes=False
            )
        ]

    async def _load_on(
        self, agent: NodeAgent, view: RegistryView, revision: Revision, timeout_s: float
    ) -> None:
        catalog = agent.wanted(view)
        wish = catalog.wish(revision.digest) if catalog else None
        # Not of this node's base model, or no room: the placement will say so.
        if wish is None or wish.tier is ResidencyTier.ABSENT:
            return
        await agent.ensure(wish, view.generation, timeout_s)

    def _placements(
        self, view: RegistryView, name: AdapterName, digests: Iterable[str], *, shows_all_nodes: bool
    ) -> list[Placement]:
        result: list[Placement] = []
        for agent in self._fleet.agents:
            catalog = agent.wanted(view)
            for digest in sorted(digests):
                placement = _placement(agent, catalog, view, name, digest)
                is_somewhere = (
                    placement.resident.tier is not ResidencyTier.ABSENT
                    or placement.desired is not ResidencyTier.ABSENT
                    or placement.failure
                )
                if is_somewhere or shows_all_nodes:
                    result.append(placement)
        return result


def _placement(
    agent: NodeAgent, catalog: NodeCatalog | None, view: RegistryView, name: AdapterName, digest: str
) -> Placement:
    wish = catalog.wish(digest) if catalog else None
    held = agent.work.held.get(digest, ResidentAdapter(digest, ResidencyTier.ABSENT))
    failure = held.failure
    if digest in agent.work.failures:
        failure = agent.work.failures[digest].message
    elif not agent.is_connected:
        failure = f"node {agent.address} is not connected"
    elif catalog and wish is None:
        failure = _other_base(agent, view, name, digest)
    elif wish and wish.refusal:
        failure = wish.refusal
    return Placement(
        node=agent.address,
        instance_id=agent.model.instance_id if agent.model else "",
        name=name,
        resident=held,
        desired=wish.tier if wish else ResidencyTier.ABSENT,
        is_pinned=held.is_pinned,
        failure=failure,
    )


def _other_base(agent: NodeAgent, view: RegistryView, name: AdapterName, digest: str) -> str:
    adapter = view.adapters.get(name.short)
    revision = adapter.revision(digest) if adapter else None
    theirs = agent.model.model.base_digest if agent.model else "unknown"
    ours = revision.base_digest if revision else "unknown"
    return f"node {agent.address} serves another base model: {theirs}; the adapter is for {ours}"
