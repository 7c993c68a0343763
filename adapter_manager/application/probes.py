"""Proof that adapters do something: nodes compare them with the base model, the registry keeps what comes.

By itself each revision is probed once, where it is on a device first; asked for, as often as somebody asks.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import structlog

from adapter_manager.application.adapters import AdapterDirectory
from adapter_manager.application.mirror import RegistryMirror
from adapter_manager.application.naming import ready_revision, reference
from adapter_manager.application.node_agent import NodeAgent
from adapter_manager.application.residency import Fleet
from adapter_manager.application.transactions import Transactions
from adapter_manager.domain.adapter import Revision
from adapter_manager.domain.caller import Caller
from adapter_manager.domain.catalog import RegistryView
from adapter_manager.domain.errors import (
    BaseMismatchError,
    ConcurrentChangeError,
    NodeCallError,
    NodeUnavailableError,
    RegistryUnavailableError,
)
from adapter_manager.domain.node import ResidencyTier
from adapter_manager.domain.probe import Probe, ProbeVerdict
from adapter_manager.domain.retries import Failure, failed_again
from adapter_manager.ports import Change, Clock, Registry, update
from lorikeet_contract.names import AdapterName
from lorikeet_contract.status import StatusCode

log = structlog.get_logger(__name__)

# How long a probe that nobody asked for may take.
_AUTOMATIC_TIMEOUT_S = 60.0
# Nodes of an earlier release know no probes; what a node refuses so, it refuses for good.
_FINAL = {StatusCode.UNIMPLEMENTED, StatusCode.FAILED_PRECONDITION, StatusCode.INVALID_ARGUMENT}


@dataclass(frozen=True, slots=True)
class ProbedRevision:
    """A revision with what was found just now."""

    name: AdapterName
    revision: Revision
    probe: Probe


class ProbeService:
    """Probes by order and by itself.

    Args:
        is_automatic: whether `run` probes what was never probed once it is on a device.
        look_s: how often `run` looks for such.
    """

    def __init__(
        self,
        registry: Registry,
        transactions: Transactions,
        mirror: RegistryMirror,
        directory: AdapterDirectory,
        fleet: Fleet,
        clock: Clock,
        *,
        is_automatic: bool,
        look_s: float = 1.0,
    ) -> None:
        self._registry = registry
        self._transactions = transactions
        self._mirror = mirror
        self._directory = directory
        self._fleet = fleet
        self._clock = clock
        self._is_automatic = is_automatic
        self._look_s = look_s
        self._failures: dict[tuple[str, str], Failure] = {}

    async def probe(self, caller: Caller, name: str, timeout_s: float) -> ProbedRevision:
        """Probe the revision that a name answers with, on the node that has it nearest its device.

        Raises:
            NodeUnavailableError, NodeCallError: no node of its base model is there, or it failed.
            BaseMismatchError: the nodes that are there serve other base models.
        """
        wanted = reference(caller, name)
        revision = ready_revision((await self._directory.stored(wanted.name)).value, wanted)
        agent = self._nearest(revision)
        try:
            async with asyncio.timeout(timeout_s):
                # The node must know the revision before a request for it may wait there.
                await agent.synced(self._mirror.view.generation)
                probe = await self._probe_on(agent, revision.digest, timeout_s)
        except TimeoutError:
            raise NodeUnavailableError(
                f"node {agent.address} did not probe the adapter within {timeout_s:g} s; try again",
                retry_after_s=5.0,
            ) from None
        return ProbedRevision(wanted.name, revision, probe)

    async def run(self) -> NoReturn:
        """Probe what is on a device and was never probed, for ever; one at a time on each node."""
        running: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                await asyncio.sleep(self._look_s)
                running = {address: task for address, task in running.items() if not task.done()}
                if not self._is_automatic or not self._mirror.view.epoch:
                    continue
                for agent in self._fleet.connected:
                    if agent.address not in running and (digest := self._next_unprobed(agent)):
                        running[agent.address] = asyncio.create_task(
                            self._probe_quietly(agent, digest), name=f"probe {agent.address}"
                        )
        finally:
            for task in running.values():
                task.cancel()
            await asyncio.gather(*running.values(), return_exceptions=True)

    def _next_unprobed(self, agent: NodeAgent) -> str | None:
        view, now_s = self._mirror.view, self._clock()
        instance = agent.model.instance_id if agent.model else ""
        for held in agent.work.held.values():
            if held.tier is not ResidencyTier.ACTIVE:
                continue
            use = view.uses.get(held.digest)
            if use is None or use.probe is not None or use.purge_owner or not use.holders:
                continue
            failure = self._failures.get((instance, held.digest))
            # Without an end of attempts: a node may be busy for hours, and then one a minute costs nothing.
            if failure is None or (not failure.is_final and failure.is_due(now_s)):
                return held.digest
        return None

    async def _probe_quietly(self, agent: NodeAgent, digest: str) -> None:
        key = (agent.model.instance_id if agent.model else "", digest)
        try:
            await self._probe_on(agent, digest, _AUTOMATIC_TIMEOUT_S)
        except (NodeCallError, RegistryUnavailableError, ConcurrentChangeError) as error:
            is_final = isinstance(error, NodeCallError) and error.node_code in _FINAL
            failure = failed_again(self._failures.get(key), error.message, self._clock(), is_final=is_final)
            self._failures[key] = failure
            self._forget_failures(self._mirror.view)
            log.warning(
                "adapter.probe_failed",
                node=agent.address,
                digest=digest,
                error=error.message,
                attempts=failure.attempts,
                final=is_final,
            )
        else:
            self._failures.pop(key, None)

    def _forget_failures(self, view: RegistryView) -> None:
        """Drop those of nodes that restarted and of content that is gone."""
        instances = {a.model.instance_id for a in self._fleet.agents if a.model}
        for instance, digest in tuple(self._failures):
            if instance not in instances or digest not in view.uses:
                del self._failures[instance, digest]

    async def _probe_on(self, agent: NodeAgent, digest: str, timeout_s: float) -> Probe:
        findings = await agent.probe(digest, timeout_s)
        probe = Probe(findings, agent.address, self._clock())

        async def attempt() -> tuple[Sequence[Change], None]:
            stored = await self._registry.use(digest)
            is_held = stored is not None and stored.value.holders
            return [update(stored, stored.value.with_probe(probe))] if stored and is_held else [], None

        await self._transactions.run(attempt)
        tell = log.info if findings.verdict is ProbeVerdict.CHANGES else log.warning
        tell(
            "adapter.probed",
            node=agent.address,
            digest=digest,
            verdict=findings.verdict.value,
            max_difference=findings.max_difference,
            noise=findings.noise,
            top1_changes=findings.top1_changes,
            positions=findings.positions,
        )
        return probe

    def _nearest(self, revision: Revision) -> NodeAgent:
        connected = self._fleet.connected
        if not connected:
            raise NodeUnavailableError(
                "no inference node is connected that could probe the adapter; try again", retry_after_s=5.0
            )
        bases = {a.model.model.base_digest for a in connected if a.model}
        fitting = [a for a in connected if a.model and a.model.model.base_digest == revision.base_digest]
        if not fitting:
            raise BaseMismatchError.of(revision.base_digest, bases)
        return max(fitting, key=lambda a: _rank(a, revision.digest))


def _rank(agent: NodeAgent, digest: str) -> int:
    held = agent.work.held.get(digest)
    return held.tier.rank if held else -1
