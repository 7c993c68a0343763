"""Random histories of the scheduler and residency together, checked against what must hold at every turn."""

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from inference_service.domain.adapter import ResidencyTier
from inference_service.domain.request import FinishReason
from inference_service.domain.tenant import TenantShare
from inference_service.residency.config import ResidencyConfig
from tests.support.engine_builders import Rig, desire, make_request
from tests.support.fake_device import expected_tokens

NUM_BLOCKS = 24
NUM_ADAPTERS = 5
TIERS = st.sampled_from([ResidencyTier.ABSENT, ResidencyTier.HOST, ResidencyTier.ACTIVE])


class EngineModel(RuleBasedStateMachine):
    """Adds, aborts, deadlines, loads, unloads, catalog changes and failures, in any order."""

    requests = Bundle("requests")
    overlaps = False

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(
            num_blocks=NUM_BLOCKS,
            max_running_requests=5,
            max_waiting_requests=12,
            max_step_tokens=16,
            num_slots=2,
            host_bytes=350,
            arena_bytes=250,
            polls_per_copy=2,
            overlaps=self.overlaps,
            residency=ResidencyConfig(max_wait_s=20, slot_patience_s=0.05, load_retry_s=0.5),
        )
        self.digests = [self.rig.source.add(f"a{i}", 60 + 20 * i) for i in range(NUM_ADAPTERS)]
        self.rig.source.remove = lambda digest: None  # type: ignore[method-assign]
        self.catalog(tiers=[ResidencyTier.ABSENT] * NUM_ADAPTERS, pinned=None)
        self.rig.scheduler.set_tenants([TenantShare("t0", 2.0), TenantShare("t1", 1.0, 2, 6)])
        self.added: dict[str, tuple[str | None, tuple[int, ...], int]] = {}
        self.further: dict[str, list[str]] = {}
        self.unloads: list[list[bool]] = []
        self.loads: list[list[object]] = []

    @rule(
        target=requests,
        tenant=st.sampled_from(["t0", "t1", "t2"]),
        adapter=st.sampled_from([None, *range(NUM_ADAPTERS)]),
        family=st.integers(0, 2),
        length=st.integers(1, 40),
        max_tokens=st.integers(0, 30),
        deadline_s=st.sampled_from([None, None, None, 0.0, 0.05, 0.5]),
        prompt_logprobs=st.sampled_from([None, None, 0]),
        num_samples=st.sampled_from([1, 1, 2, 3, 8]),
    )
    def add(
        self,
        tenant: str,
        adapter: int | None,
        family: int,
        length: int,
        max_tokens: int,
        deadline_s: float | None,
        prompt_logprobs: int | None,
        num_samples: int,
    ) -> str:
        """A new request of one or more samples; prompts of one family share their beginning."""
        request_id = f"r{len(self.further)}"
        digest = None if adapter is None else self.digests[adapter]
        prompt = tuple(family * 100 + i for i in range(length))
        request = replace(
            make_request(
                request_id,
                prompt,
                tenant=tenant,
                digest=digest,
                max_tokens=max_tokens,
                deadline_s=None if deadline_s is None else self.rig.now_s + deadline_s,
                prompt_logprobs=prompt_logprobs,
            ),
            num_samples=num_samples,
        )
        self.further[request_id] = [request.sample_id(index) for index in range(1, num_samples)]
        for sample_id in (request_id, *self.further[request_id]):
            self.added[sample_id] = (digest, prompt, max_tokens)
        self.rig.add(request)
        return request_id

    @rule(request_id=requests, index=st.integers(0, 7))
    def abort(self, request_id: str, index: int) -> None:
        """A sample, whatever state it is in, also ended."""
        samples = [request_id, *self.further[request_id]]
        self.rig.abort(samples[index % len(samples)])

    @rule(jobs=st.sampled_from([None, 0, 1]), seconds=st.sampled_from([0.001, 0.03]), count=st.integers(1, 8))
    def turn(self, jobs: int | None, seconds: float, count: int) -> None:
        """The loop turns; worker threads may or may not get on."""
        for _ in range(count):
            self.rig.turn(jobs=jobs, seconds=seconds)

    @rule(adapter=st.integers(0, NUM_ADAPTERS - 1), keep=st.booleans())
    def unload(self, adapter: int, keep: bool) -> None:
        """At any moment."""
        ends: list[bool] = []
        self.unloads.append(ends)
        self.rig.residency.unload(self.digests[adapter], keep_on_disk=keep, on_done=ends.append)

    @rule(adapter=st.integers(0, NUM_ADAPTERS - 1), tier=TIERS, pinned=st.booleans())
    def load(self, adapter: int, tier: ResidencyTier, pinned: bool) -> None:
        """By the manager."""
        if tier is not ResidencyTier.ABSENT:
            ends: list[object] = []
            self.loads.append(ends)
            wanted = desire(self.digests[adapter], tier, pinned=pinned)
            self.rig.residency.load(wanted, self.rig.now_s, ends.append)

    @rule(tiers=st.lists(TIERS, min_size=NUM_ADAPTERS, max_size=NUM_ADAPTERS), pinned=st.integers(0, 4))
    def catalog(self, tiers: list[ResidencyTier], pinned: int | None) -> None:
        """A new desired set; at most one revision is pinned, so that every adapter can have its turn."""
        self.rig.residency.set_desired(
            desire(digest, tier, pinned=index == pinned)
            for index, (digest, tier) in enumerate(zip(self.digests, tiers, strict=True))
        )

    @rule(adapter=st.integers(0, NUM_ADAPTERS - 1), is_bad=st.booleans())
    def damage(self, adapter: int, is_bad: bool) -> None:
        """A payload that fails its checksum, or no longer."""
        (self.rig.pool.bad.add if is_bad else self.rig.pool.bad.discard)(self.digests[adapter])

    @invariant()
    def blocks_are_conserved(self) -> None:
        """Every block is in use, cached or free; the references are those of the running requests."""
        pool = self.rig.scheduler._kv_cache.pool
        table = self.rig.scheduler._table
        counts = [0] * NUM_BLOCKS
        for state in table.running:
            for block in state.block_ids:
                counts[block] += 1
        assert counts == pool._references
        assert pool.num_available == counts.count(0)
        assert not set(pool._free) & set(pool._cached)

    @invariant()
    def leases_are_conserved(self) -> None:
        """Running requests of adapters hold one lease each, and nobody else does."""
        table = self.rig.scheduler._table
        wanted = {(s.request.digest, s.request_id) for s in table.running if s.request.digest}
        entries = self.rig.residency._table.entries.values()
        assert {(e.digest, request_id) for e in entries for request_id in e.leases} == wanted
        assert all(s.slot == -1 for s in table.waiting)
        waiting = {s.request_id for s in table.waiting}
        assert all(set(entry.waiters) <= waiting for entry in entries)

    @invariant()
    def slots_and_bytes_are_conserved(self) -> None:
        """Slots are free or someone's; pool and arena hold what the entries say."""
        slots, entries = self.rig.residency._slots, self.rig.residency._table.entries.values()
        held = {e.slot: e.digest for e in entries if e.slot is not None}
        assert held == self.rig.arena.digest_of
        assert sorted([*held, *slots._free]) == [0, 1]
        # A read that ended on its thread is known to the loop at its next turn only.
        assert {e.digest for e in entries if e.has_host} <= set(self.rig.pool.held)

    @invariant()
    def outputs_are_the_models_and_end_once(self) -> None:
        """Tokens are a prefix of the right ones; nothing follows an end."""
        for request_id, outputs in self.rig.outputs.items():
            digest, prompt, max_tokens = self.added[request_id]
            got = self.rig.tokens(request_id)
            assert got == expected_tokens(digest, prompt, len(got))
            ends = [output.finish for output in outputs if output.finish]
            assert len(ends) <= 1
            assert not ends or outputs[-1].finish is ends[0]
            if ends and ends[0].reason is FinishReason.LENGTH:
                assert len(got) == max_tokens

    def teardown(self) -> None:
        """Given time, every request, load and unload ends, and all is given back."""
        self.catalog(tiers=[ResidencyTier.ABSENT] * NUM_ADAPTERS, pinned=None)
        for _ in range(900):
            self.rig.turn(seconds=0.03)
        refused = {"QUEUE_FULL", "LIMIT_EXCEEDED"}
        never = {
            sample_id
            for request_id, further in self.further.items()
            if self.rig.finish(request_id).error_reason in refused
            for sample_id in further
        }
        assert {r for r, o in self.rig.outputs.items() if o[-1].finish} == set(self.added) - never
        assert all(len(ends) == 1 for ends in (*self.unloads, *self.loads))
        stats = self.rig.scheduler.stats()
        assert (stats.running_requests, stats.waiting_requests) == (0, 0)
        assert stats.blocks_available == NUM_BLOCKS
        assert self.rig.residency.stats().leases == 0
        self.leases_are_conserved()
        self.outputs_are_the_models_and_end_once()


class OverlappingEngineModel(EngineModel):
    """The same with a step ahead of its results."""

    overlaps = True


@pytest.mark.parametrize("model", [EngineModel, OverlappingEngineModel])
@pytest.mark.parametrize("examples", [15, pytest.param(150, marks=pytest.mark.long)])
def test_engine_model(model: type[EngineModel], examples: int) -> None:
    """Rules in any order keep every invariant, and everything ends."""
    options = settings(max_examples=examples, stateful_step_count=60, deadline=None)
    run_state_machine_as_test(model, settings=options)
