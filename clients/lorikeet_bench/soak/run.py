"""A whole soak: set up, load, take everything away again, and compare."""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from lorikeet_bench.machine import describe_machine
from lorikeet_bench.process_memory import MemorySampler, trend, with_children
from lorikeet_bench.soak.churn import Churner
from lorikeet_bench.soak.contents import ContentPool, write_contents
from lorikeet_bench.soak.cut_short import CutShortError, until_cut_short
from lorikeet_bench.soak.exchange import Fault, FaultKind
from lorikeet_bench.soak.journal import Journal
from lorikeet_bench.soak.judge import Judge
from lorikeet_bench.soak.leftovers import delete_leftovers
from lorikeet_bench.soak.levels import growth, levels
from lorikeet_bench.soak.operations import Operations
from lorikeet_bench.soak.outage import Outage
from lorikeet_bench.soak.plan import SoakPlan, SoakTarget
from lorikeet_bench.soak.request_mix import RequestMix
from lorikeet_bench.soak.result import SoakResult
from lorikeet_bench.soak.roster import Member, Roster, revision_reference
from lorikeet_bench.soak.stream import SoakStream
from lorikeet_bench.soak.tally import Tally
from lorikeet_bench.soak.target_check import check_target, known_tenant
from lorikeet_client import (
    AsyncLorikeet,
    CallError,
    Model,
    UnavailableError,
)

_PROGRESS_S = 1.0
# Adapters that are pushed or deleted at once before and after the load.
_CONCURRENT = 4


@dataclass(frozen=True, slots=True)
class SoakProgress:
    """How far a soak is."""

    stage: str
    elapsed_s: float
    open_streams: int
    ended: int
    tokens: int
    operations: int
    standing_adapters: int
    wrong: int
    lost: int
    memory: Mapping[str, int]


async def run_soak(
    target: SoakTarget,
    plan: SoakPlan,
    directory: Path,
    on_progress: Callable[[SoakProgress], None] = lambda _: None,
    on_fault: Callable[[Fault], None] = lambda _: None,
    ended_early: Callable[[], str] = lambda: "",
    *,
    clean: bool = False,
) -> SoakResult:
    """Soak a stack that nobody else uses and that holds no adapter.

    A service that goes away, or `ended_early`, cuts it short: the result says so and holds what was seen.

    Args:
        target: the services, and what of them to weigh.
        plan: how much and how long.
        directory: for the adapters' files; kept.
        on_progress: called every second.
        on_fault: called for each broken promise, as it is found.
        ended_early: asked several times a second; why to end at once, or nothing.
        clean: delete adapters that are named as a soak's before it begins.

    Raises:
        WrongTargetError: the model is not the soak's base, or the tenant has adapters already.
        CutShortError: `ended_early` said so before any adapter was made.
        CallError: a service refused, or did not answer, before any adapter was made.
    """
    async with target.client() as client:

        async def prepare() -> tuple[Model, ContentPool]:
            before = await check_target(client, target, clean=clean)
            with known_tenant():
                return before, await write_contents(client, directory, f"{target.tenant}/soak-check")

        before, pool = await until_cut_short(prepare(), ended_early)
        return await _Soak(target, plan, client, pool, on_progress, on_fault).run(before, ended_early)


class _Soak:
    def __init__(
        self,
        target: SoakTarget,
        plan: SoakPlan,
        client: AsyncLorikeet,
        pool: ContentPool,
        on_progress: Callable[[SoakProgress], None],
        on_fault: Callable[[Fault], None],
    ) -> None:
        self._target = target
        self._plan = plan
        self._client = client
        self._on_progress = on_progress
        self._tally = Tally(on_fault)
        self._journal = Journal()
        self._judge = Judge(self._journal, pool, revision_reference)
        self._roster = Roster(target.tenant, plan.adapters, pool)
        self._node_outage = Outage("the inference service", target.inference)
        self._manager_outage = Outage("the adapter manager", target.manager)
        self._operations = Operations(client, self._journal, self._tally, self._manager_outage)
        self._sampler = MemorySampler(with_children(target.processes))
        self._start_s = time.monotonic()
        self._stage = "setting up"

    async def run(self, before: Model, ended_early: Callable[[], str]) -> SoakResult:
        levels_before = levels(before.status, self._target.disk)
        after, cut_short, left_over = None, "", ""

        def reason() -> str:
            return ended_early() or self._node_outage.reason or self._manager_outage.reason

        async with self._watched():
            try:
                after = await until_cut_short(self._work(levels_before), reason)
            except CutShortError as error:
                cut_short = str(error)
            except CallError as error:
                went_away = isinstance(error, UnavailableError)
                cut_short = f"{'the service went away' if went_away else 'a call failed'}: {error}"
            if cut_short:
                self._stage = "cleaning up"
                left_over = await delete_leftovers(self._client, self._target.tenant)
        return self._result(before, after, levels_before, cut_short, left_over)

    async def _work(self, levels_before: Mapping[str, int]) -> Model:
        await self._on_all_members(lambda member: self._operations.push(member, member.palette[0]))
        await self._load()
        self._stage = "taking all away"
        await self._check_standing()
        await self._on_all_members(self._remove)
        return await self._settled(levels_before)

    async def _load(self) -> None:
        """Streams and churn for the planned time."""
        plan = self._plan
        self._stage, self._start_s = "soaking", time.monotonic()
        until_s = self._start_s + plan.duration_s
        sampling = asyncio.create_task(self._sampler.run())
        streams = [
            SoakStream(
                self._target,
                self._client,
                RequestMix(plan.seed, number, self._roster),
                self._judge,
                self._tally,
                self._node_outage,
            )
            for number in range(plan.streams)
        ]
        churners = [
            Churner(plan.seed, number, self._roster, self._operations, plan.churn_pause_s)
            for number in range(plan.churners)
        ]
        try:
            async with asyncio.TaskGroup() as group:
                for worker in (*streams, *churners):
                    group.create_task(worker.run(until_s))
        finally:
            sampling.cancel()
            # What ends after the planned time ends under a falling load.
            self._sampler.forget_after(plan.duration_s)

    async def _on_all_members(self, act: Callable[[Member], Awaitable[None]]) -> None:
        limit = asyncio.Semaphore(_CONCURRENT)

        async def one(member: Member) -> None:
            async with limit, member.lock:
                await act(member)

        await asyncio.gather(*(one(member) for member in self._roster.members))

    async def _remove(self, member: Member) -> None:
        if member.is_pinned:
            await self._operations.pin(member, pinned=False)
        if member.digests:
            await self._operations.delete(member)

    async def _check_standing(self) -> None:
        """Everything acknowledged is there, and nothing else."""
        listed = {adapter.name: adapter async for adapter in self._client.list_adapters(self._target.tenant)}
        standing = {str(member.name) for member in self._roster.members if member.digests}
        if set(listed) != standing:
            message = f"listed but not acknowledged or the other way round: {sorted(set(listed) ^ standing)}"
            self._tally.fault(Fault(FaultKind.LOST_WRITE, message, time.monotonic(), {}))
        await self._on_all_members(self._look)

    async def _look(self, member: Member) -> None:
        if member.digests:
            await self._operations.look(member)

    async def _settled(self, wanted: Mapping[str, int]) -> Model:
        """The model once its counters are back, or as it is when time is up."""
        end_s = time.monotonic() + self._plan.return_s
        while True:
            model = await self._client.get_model()
            if levels(model.status, self._target.disk) == wanted or time.monotonic() > end_s:
                return model
            await asyncio.sleep(0.2)

    @asynccontextmanager
    async def _watched(self) -> AsyncGenerator[None]:
        async def tell() -> None:
            while True:
                self._on_progress(self._progress())
                await asyncio.sleep(_PROGRESS_S)

        telling = asyncio.create_task(tell())
        try:
            yield
        finally:
            telling.cancel()

    def _progress(self) -> SoakProgress:
        return SoakProgress(
            stage=self._stage,
            elapsed_s=time.monotonic() - self._start_s,
            open_streams=self._tally.open,
            ended=self._tally.streams.total(),
            tokens=self._tally.tokens,
            operations=self._tally.churn.total(),
            standing_adapters=self._roster.standing(),
            wrong=self._tally.wrong,
            lost=self._tally.lost,
            memory=self._sampler.latest(),
        )

    def _result(
        self,
        before: Model,
        after: Model | None,
        levels_before: Mapping[str, int],
        cut_short: str,
        left_over: str,
    ) -> SoakResult:
        tally, plan = self._tally, self._plan
        churn: dict[str, dict[str, int]] = defaultdict(dict)
        for (kind, outcome), count in sorted(tally.churn.items()):
            churn[kind][outcome] = count
        restarts = sorted(self._sampler.ended)
        if after and after.instance_id != before.instance_id:
            restarts.append("the engine")
        return SoakResult(
            machine=describe_machine("grpcio", "torch"),
            duration_s=plan.duration_s,
            seed=plan.seed,
            streams_wanted=plan.streams,
            streams_open_at_most=tally.open_at_most,
            adapters=plan.adapters,
            streams=dict(tally.streams.most_common()),
            tokens=tally.tokens,
            wrong=tally.wrong,
            lost=tally.lost,
            faults=tuple(tally.faults),
            churn=churn,
            memory=[
                trend(name, samples, plan.warm_up_s)
                for name, samples in self._sampler.samples.items()
                if samples
            ],
            levels_before=levels_before,
            levels_after=levels(after.status, self._target.disk) if after else {},
            growth=growth(before.status, after.status) if after else {},
            restarts=restarts,
            cut_short=cut_short,
            left_over=left_over,
        )
