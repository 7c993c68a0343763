"""Builders for the engine's pure rooms, with defaults small enough to read in a failing test."""

from collections.abc import Sequence
from typing import Any

from inference_service.domain.adapter import AdapterSource, AdapterStanding, DesiredAdapter, ResidencyTier
from inference_service.domain.request import EngineRequest, RequestOutput
from inference_service.domain.sampling import SamplingParams
from inference_service.domain.step import SchedulerOutput
from inference_service.engine.step_pipeline import StepPipeline
from inference_service.residency.config import ResidencyConfig
from inference_service.residency.residency import Residency
from inference_service.scheduler.config import SchedulerConfig
from inference_service.scheduler.scheduler import Scheduler
from tests.support.fake_device import FakeArena, FakeHostPool, FakeRunner, FakeSource, ManualExecutor


def make_request(
    request_id: str = "r",
    prompt: Sequence[int] = (1, 2, 3),
    *,
    tenant: str = "t",
    digest: str | None = None,
    deadline_s: float | None = None,
    max_tokens: int = 4,
    **sampling: Any,
) -> EngineRequest:
    """A request; further keywords are sampling parameters."""
    params = SamplingParams(max_tokens=max_tokens, **sampling)
    return EngineRequest(request_id, tenant, tuple(prompt), params, digest, deadline_s)


def make_scheduler_config(**changes: Any) -> SchedulerConfig:
    """Small sizes: blocks of 4 tokens."""
    values: dict[str, Any] = {
        "block_tokens": 4,
        "num_blocks": 64,
        "max_step_tokens": 32,
        "max_running_requests": 8,
        "max_waiting_requests": 100,
        "max_context_tokens": 200,
    }
    return SchedulerConfig(**(values | changes))


def desire(
    digest: str, tier: ResidencyTier = ResidencyTier.ABSENT, *, pinned: bool = False, num_bytes: int = 100
) -> DesiredAdapter:
    """A catalog entry."""
    return DesiredAdapter(AdapterSource(digest, f"revisions/{digest}", num_bytes), tier, pinned)


class OpenGate:
    """An adapter gate that has every adapter on the device, and counts leases."""

    def __init__(self) -> None:
        self.leases: set[tuple[str, str]] = set()

    def demand(self, digest: str, request_id: str, now_s: float) -> AdapterStanding:
        """Always there."""
        return AdapterStanding(ResidencyTier.ACTIVE, can_lease=True)

    def is_ready(self, digest: str) -> bool:
        """Always."""
        return True

    def withdraw(self, digest: str, request_id: str) -> None:
        """Nobody waits."""

    def acquire(self, digest: str, request_id: str, now_s: float) -> int:
        """Slot 0 for all."""
        assert (digest, request_id) not in self.leases
        self.leases.add((digest, request_id))
        return 0

    def release(self, digest: str, request_id: str, now_s: float) -> None:
        """Exactly once."""
        self.leases.remove((digest, request_id))


class Rig:
    """Scheduler, residency and fakes in the engine loop's order, on a clock that the test turns."""

    def __init__(
        self,
        *,
        num_slots: int = 2,
        host_bytes: int = 10_000,
        arena_bytes: int = 10_000,
        polls_per_copy: int = 1,
        residency: ResidencyConfig | None = None,
        overlaps: bool = False,
        **scheduler: Any,
    ) -> None:
        self.config = make_scheduler_config(**scheduler)
        self.pool = FakeHostPool(host_bytes)
        self.arena = FakeArena(self.pool, num_slots, arena_bytes, polls_per_copy)
        self.source = FakeSource()
        self.executor = ManualExecutor()
        self.residency = Residency(
            residency or ResidencyConfig(), self.pool, self.arena, self.source, self.executor, lambda: None
        )
        self.scheduler = Scheduler(self.config, self.residency)
        self.runner = FakeRunner(self.arena, self.config.block_tokens, self.config.max_running_requests)
        self.now_s = 100.0
        self.step_tokens = 0
        self.pipeline = StepPipeline(
            self.scheduler, self.runner, overlaps=overlaps, on_step=self._count, clock=lambda: self.now_s
        )
        self.outputs: dict[str, list[RequestOutput]] = {}

    def add(self, request: EngineRequest) -> None:
        """Take a request in."""
        self.scheduler.add(request, self.now_s)

    def abort(self, request_id: str) -> None:
        """Stop a request."""
        self.scheduler.abort(request_id, self.now_s)

    def turn(self, *, jobs: int | None = None, seconds: float = 0.001) -> int:
        """One turn of the loop; `jobs` worker jobs end before it (None: all). Returns the step's tokens."""
        self.now_s += seconds
        if jobs is None:
            self.executor.run_all()
        for _ in range(jobs or 0):
            self.executor.run_one()
        self.residency.poll(self.now_s)
        self.step_tokens = 0
        self.pipeline.turn()
        for output in self.scheduler.take_outputs():
            self.outputs.setdefault(output.request_id, []).append(output)
        return self.step_tokens

    def _count(self, step: SchedulerOutput) -> None:
        self.step_tokens = step.num_tokens

    def run(self, max_turns: int = 500) -> None:
        """Turn until no request is left."""
        for _ in range(max_turns):
            self.turn()
            stats = self.scheduler.stats()
            if not stats.running_requests and not stats.waiting_requests:
                return
        raise AssertionError(f"requests are left after {max_turns} turns: {self.scheduler.stats()}")

    def tokens(self, request_id: str) -> list[int]:
        """All tokens of a request so far."""
        return [t for output in self.outputs.get(request_id, ()) for t in output.token_ids]

    def finish(self, request_id: str) -> Any:
        """The end of a request, which must have come once and last."""
        outputs = self.outputs.get(request_id, [])
        ends = [output.finish for output in outputs if output.finish is not None]
        assert len(ends) == 1, (request_id, ends)
        assert outputs[-1].finish is ends[0]
        return ends[0]


def with_adapters(count: int, num_bytes: int = 100, **changes: Any) -> tuple[Rig, list[str]]:
    """A rig whose catalog names `count` adapters, none wanted by the manager."""
    rig = Rig(**changes)
    digests = [rig.source.add(f"a{index}", num_bytes) for index in range(count)]
    rig.residency.set_desired([desire(digest) for digest in digests])
    return rig, digests


def tier(rig: Rig, digest: str) -> ResidencyTier:
    """Where a revision is."""
    return rig.residency._table.describe(digest).tier


def load(
    rig: Rig, digest: str, wanted: ResidencyTier = ResidencyTier.ACTIVE, *, pinned: bool = False
) -> list[Any]:
    """Begin a load; the list gets its end."""
    ends: list[Any] = []
    rig.residency.load(desire(digest, wanted, pinned=pinned), rig.now_s, ends.append)
    return ends


def unload(rig: Rig, digest: str, *, keep_on_disk: bool = True) -> list[bool]:
    """Begin an unload; the list gets its end."""
    ends: list[bool] = []
    rig.residency.unload(digest, keep_on_disk=keep_on_disk, on_done=ends.append)
    return ends
