"""Continuous batching: which requests compute how many tokens in the next step.

`schedule` gives a step to the runner, `update` takes its result. `schedule` may be called again before the
result of the step before is there: it counts tokens still being sampled without knowing them.
"""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

from inference_service.domain.engine_report import AdapterUse
from inference_service.domain.errors import GrammarFailedError, NotFiniteError
from inference_service.domain.request import EngineRequest, FinishReason, RequestFinish, RequestOutput
from inference_service.domain.step import ModelRunnerOutput, NewRequest, ScheduledRequest, SchedulerOutput
from inference_service.domain.tenant import TenantShare
from inference_service.ports import AdapterGate
from inference_service.scheduler.admission import check_admission
from inference_service.scheduler.config import SchedulerConfig
from inference_service.scheduler.fairness import TokenCounters
from inference_service.scheduler.kv_cache import KvCache
from inference_service.scheduler.prefix_cache import BlockKeys
from inference_service.scheduler.request_state import RequestPhase, RequestState, SharedPrompt
from inference_service.scheduler.request_table import RequestTable
from inference_service.scheduler.results import apply_result
from inference_service.scheduler.step_builder import StepBuilder
from lorikeet_contract.status import ServiceError

_NOT_FINITE = (
    "the model's output is not finite here: weights overflow the compute dtype; serve the model in bfloat16 "
    "or float32, or train the adapter with a smaller scale"
)


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Counters of the scheduler; blocks that only keep a prefix count as available."""

    running_requests: int
    waiting_requests: int
    blocks_available: int
    steps: int
    preemptions: int
    prefix_hit_tokens: int
    prefix_query_tokens: int


class Scheduler:
    """Owner of requests, blocks and the fair order. One caller: the engine loop."""

    def __init__(self, config: SchedulerConfig, gate: AdapterGate) -> None:
        self._config = config
        self._gate = gate
        self._kv_cache = KvCache(config.num_blocks, config.block_tokens, prefix_cache=config.prefix_cache)
        self._counters = TokenCounters()
        self._table = RequestTable(self._kv_cache, gate, self._counters)
        self._in_flight: deque[SchedulerOutput] = deque()
        self._next_sequence = 0
        self._step = 0

    def set_tenants(self, shares: Iterable[TenantShare]) -> None:
        """Replace the tenants' weights and limits."""
        self._counters.set_shares(shares)

    def add(self, request: EngineRequest, now_s: float) -> None:
        """Take a request in, all its samples. One that is refused ends at once: its only output says why."""
        try:
            check_admission(request, self._table, self._config)
        except ServiceError as error:
            self.refuse(request, error)
            return
        size = self._config.block_tokens
        num_shared = (len(request.prompt_token_ids) - 1) // size * size
        shared_prompt = SharedPrompt(num_shared) if request.num_samples > 1 else None
        is_private = shared_prompt is not None and not self._config.prefix_cache
        keys = BlockKeys(request.digest, size, self._next_sequence if is_private else None)
        if shared_prompt is not None:
            # Hashed once for all samples: tens of them times a long prompt would hold a step up.
            keys.upto(request.prompt_token_ids, num_shared // size)
        states = [self._state(sample, now_s, keys.fork(), shared_prompt) for sample in request.samples()]
        for state in states:
            self._table.enter(state)
        if request.deadline_s is not None and request.deadline_s <= now_s:
            self._table.expire(now_s)
        elif request.digest is not None:
            # The load begins now, whatever the request's place in the queue.
            for state in states:
                self._is_adapter_ready(state, now_s)

    def _state(
        self, sample: EngineRequest, now_s: float, keys: BlockKeys, shared_prompt: SharedPrompt | None
    ) -> RequestState:
        room = self._config.max_context_tokens - len(sample.prompt_token_ids)
        state = RequestState(
            request=sample,
            sequence=self._next_sequence,
            arrived_s=now_s,
            keys=keys,
            token_ids=list(sample.prompt_token_ids),
            max_output_tokens=min(sample.sampling.max_tokens, room),
            shared_prompt=shared_prompt,
        )
        self._next_sequence += 1
        return state

    def abort(self, request_id: str, now_s: float) -> None:
        """End one sample of a request, by its id; unknown ids are fine."""
        if state := self._table.get(request_id):
            self._table.finish(state, FinishReason.ABORTED, now_s)

    def schedule(self, now_s: float) -> SchedulerOutput:
        """The next step; with nothing `scheduled` there is nothing to run, and no result is expected."""
        self._table.expire(now_s)
        builder = StepBuilder(self._config.max_step_tokens)
        self._continue_decodes(builder, now_s)
        self._continue_prefills(builder)
        if not builder.has_preempted:
            self._admit(builder, now_s)
        if not builder.scheduled:
            return SchedulerOutput(self._step, ())
        finished, self._table.left_runner = tuple(self._table.left_runner), []
        step = SchedulerOutput(self._step, tuple(builder.scheduled), tuple(builder.new), finished)
        self._step += 1
        self._in_flight.append(step)
        return step

    def update(self, output: ModelRunnerOutput, now_s: float) -> None:
        """Take the result of the oldest step in flight."""
        step = self._in_flight.popleft()
        assert output.step == step.step, (output.step, step.step)
        for scheduled, result in zip(step.scheduled, output.results, strict=True):
            assert scheduled.request_id == result.request_id, (scheduled, result)
            state = self._table.get(scheduled.request_id)
            # Ended or preempted since it was scheduled: the result belongs to nobody.
            if state is None or state.phase is not RequestPhase.RUNNING or state.first_step > step.step:
                continue
            if result.failure:
                error = (GrammarFailedError.reason, result.failure)
                field = GrammarFailedError.field
                self._table.finish(state, FinishReason.FAILED, now_s, error=error, field=field)
                continue
            if any(token_id < 0 for token_id in result.token_ids):
                error = (NotFiniteError.reason, _NOT_FINITE)
                self._table.finish(state, FinishReason.FAILED, now_s, error=error)
                continue
            progress = apply_result(state, scheduled, result)
            self._kv_cache.publish(state)
            if progress is None:
                continue
            if state.first_token_s is None:
                state.first_token_s = now_s
            if progress.reason is None:
                self._table.outputs.append(progress.output)
            else:
                self._table.finish(state, progress.reason, now_s, progress=progress)

    def adapters_of(self, step: SchedulerOutput) -> set[str]:
        """Digests that the step's requests run with, the base model left out; ask before `update`."""
        states = (self._table.get(scheduled.request_id) for scheduled in step.scheduled)
        return {state.request.digest for state in states if state is not None and state.request.digest}

    def take_outputs(self) -> list[RequestOutput]:
        """Everything that requests have to tell since the last call."""
        outputs, self._table.outputs = self._table.outputs, []
        return outputs

    def next_deadline_s(self) -> float | None:
        """When a request will next expire."""
        return self._table.next_deadline_s()

    def stats(self) -> SchedulerStats:
        """Counters as of now."""
        return SchedulerStats(
            running_requests=self._table.num_running,
            waiting_requests=self._table.num_waiting,
            blocks_available=self._kv_cache.pool.num_available,
            steps=self._step,
            preemptions=self._table.preemptions,
            prefix_hit_tokens=self._kv_cache.hit_tokens,
            prefix_query_tokens=self._kv_cache.query_tokens,
        )

    def adapter_use(self) -> AdapterUse:
        """Which adapters requests run with and wait for, as of now."""
        running = {s.request.digest: None for s in self._table.running if s.request.digest is not None}
        waiting = Counter(s.request.digest for s in self._table.waiting if s.request.digest is not None)
        return AdapterUse(
            running=tuple(running),
            waiting=tuple(waiting),
            num_waiting_for_adapter=sum(n for d, n in waiting.items() if not self._gate.is_ready(d)),
        )

    def _continue_decodes(self, builder: StepBuilder, now_s: float) -> None:
        """One token for each decoding request, the oldest first; room is made by preempting the newest.

        The oldest request thus always moves on, and whatever is preempted comes back: no livelock.
        """
        for state in tuple(self._table.running):
            # An earlier one of this loop may have preempted this one.
            if state.phase is not RequestPhase.RUNNING or not state.is_decoding or state.has_all_tokens:
                continue
            if builder.budget == 0:
                return
            blocks = self._kv_cache.grow(state, state.num_tokens)
            while blocks is None:
                victim = next(s for s in reversed(self._table.running) if s.request_id not in builder)
                builder.has_preempted = True
                self._table.preempt(victim, now_s)
                if victim is state:
                    break
                blocks = self._kv_cache.grow(state, state.num_tokens)
            if blocks is not None:
                self._schedule(builder, state, 1, blocks)

    def _continue_prefills(self, builder: StepBuilder) -> None:
        """The next chunk of prompts begun earlier; their blocks are theirs since admission."""
        for state in self._table.running:
            count = min(state.num_uncomputed_tokens, builder.budget)
            if count > 0 and not state.is_decoding:
                self._schedule(builder, state, count, ())

    def _admit(self, builder: StepBuilder, now_s: float) -> None:
        """Start waiting requests in the fair order while there is room.

        A request whose adapter is not on the device is passed over, and a sample whose prompt another one
        computes; one that lacks blocks holds the queue, so that small requests cannot starve a large one.
        """
        for state in self._table.waiting.fair_order():
            if builder.budget == 0 or self._table.num_running >= self._config.max_running_requests:
                return
            share = self._counters.share(state.request.tenant)
            if 0 < share.max_running_requests <= self._table.num_running_of(state.request.tenant):
                continue
            if not self._is_adapter_ready(state, now_s):
                continue
            if state.shared_prompt is not None and state.shared_prompt.is_awaited():
                continue
            # Each running request may need one block more before it ends or this one does.
            if not self._kv_cache.admit(state, reserve=self._table.num_running):
                return
            cached = state.num_computed_tokens // self._config.block_tokens
            self._table.start(state, self._step, now_s)
            if state.shared_prompt is not None:
                state.shared_prompt.latest = state
            builder.new.append(
                NewRequest(
                    request_id=state.request_id,
                    token_ids=tuple(state.token_ids),
                    num_prompt_tokens=state.num_prompt_tokens,
                    sampling=state.request.sampling,
                    block_ids=tuple(state.block_ids[:cached]),
                    num_computed_tokens=state.num_computed_tokens,
                    slot=state.slot,
                )
            )
            count = min(state.num_uncomputed_tokens, builder.budget)
            self._schedule(builder, state, count, tuple(state.block_ids[cached:]))

    def _schedule(
        self, builder: StepBuilder, state: RequestState, count: int, blocks: tuple[int, ...]
    ) -> None:
        builder.add(ScheduledRequest(state.request_id, state.num_computed_tokens, count, blocks))
        state.num_computed_tokens += count
        self._charge(state)
        if state.num_uncomputed_tokens == 0:
            state.num_pending_tokens += 1

    def _charge(self, state: RequestState) -> None:
        """Count what is computed for the first time; recomputing is our doing, not the tenant's."""
        before = max(state.num_charged_tokens, state.num_cached_tokens)
        after = max(before, state.num_computed_tokens)
        state.num_charged_tokens = after
        prompt = min(after, state.num_prompt_tokens) - min(before, state.num_prompt_tokens)
        self._counters.charge(state.request.tenant, prompt, after - before - prompt)

    def _is_adapter_ready(self, state: RequestState, now_s: float) -> bool:
        """Ask for the request's adapter; a request whose adapter cannot come ends here."""
        digest = state.request.digest
        if digest is None:
            return True
        standing = self._gate.demand(digest, state.request_id, now_s)
        if state.tier_hit is None:
            state.tier_hit = standing.tier
        if standing.error_reason:
            error = (standing.error_reason, standing.error_message)
            self._table.finish(state, FinishReason.FAILED, now_s, error=error)
            return False
        if standing.can_lease:
            if state.adapter_wait_since_s is not None:
                # It may have been there for long while the batch was full: that is the queue's time.
                ready_s = min(max(standing.ready_since_s, state.adapter_wait_since_s), now_s)
                state.adapter_wait_s += ready_s - state.adapter_wait_since_s
                state.adapter_wait_since_s = None
        elif state.adapter_wait_since_s is None:
            state.adapter_wait_since_s = now_s
        return standing.can_lease

    def refuse(self, request: EngineRequest, error: ServiceError) -> None:
        """End a request that was never taken in; its only output says why."""
        finish = RequestFinish(
            reason=FinishReason.FAILED,
            prompt_tokens=len(request.prompt_token_ids),
            error_reason=error.reason,
            error_message=error.message,
            error_metadata=tuple(error.metadata.items()),
        )
        self._table.outputs.append(RequestOutput(request.request_id, finish=finish))
