"""All requests that have not ended, and every change of phase: the one place where resources change hands.

Whatever ends a request, it goes through `finish`: once, with its blocks, its lease and its wait given back.
"""

import bisect
import heapq
from collections import Counter

from inference_service.domain.adapter import BASE_SLOT
from inference_service.domain.request import FinishReason, RequestFinish, RequestOutput
from inference_service.ports import AdapterGate
from inference_service.scheduler.fairness import TokenCounters
from inference_service.scheduler.kv_cache import KvCache
from inference_service.scheduler.request_state import RequestPhase, RequestState
from inference_service.scheduler.results import Progress
from inference_service.scheduler.waiting_queue import WaitingQueue


class RequestTable:
    """Owner of the request states. `running` is in order of arrival."""

    def __init__(self, kv_cache: KvCache, gate: AdapterGate, counters: TokenCounters) -> None:
        self.running: list[RequestState] = []
        self.counters = counters
        self.waiting = WaitingQueue(counters)
        self.outputs: list[RequestOutput] = []
        self.left_runner: list[str] = []
        self.preemptions = 0
        self._states: dict[str, RequestState] = {}
        self._kv_cache = kv_cache
        self._gate = gate
        self._running_of: Counter[str] = Counter()
        self._deadlines: list[tuple[float, int, str]] = []

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._states

    @property
    def num_running(self) -> int:
        """Requests in the running set."""
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        """Requests in the waiting queue."""
        return len(self.waiting)

    def num_running_of(self, tenant: str) -> int:
        """Running requests of one tenant."""
        return self._running_of[tenant]

    def num_waiting_of(self, tenant: str) -> int:
        """Waiting requests of one tenant."""
        return self.waiting.num_of(tenant)

    def get(self, request_id: str) -> RequestState | None:
        """The request, unless it ended."""
        return self._states.get(request_id)

    def enter(self, state: RequestState) -> None:
        """A new request begins to wait."""
        self._states[state.request_id] = state
        self.counters.arrive(state.request.tenant)
        self.waiting.add(state)
        if state.request.deadline_s is not None:
            heapq.heappush(self._deadlines, (state.request.deadline_s, state.sequence, state.request_id))

    def start(self, state: RequestState, step: int, now_s: float) -> None:
        """A waiting request whose blocks are allocated begins to run; its adapter must be leasable."""
        if state.request.digest is not None:
            state.slot = self._gate.acquire(state.request.digest, state.request_id, now_s)
            state.has_lease = True
        self.waiting.remove(state)
        state.phase = RequestPhase.RUNNING
        state.first_step = step
        if state.admitted_s is None:
            state.admitted_s = now_s
            state.num_cached_tokens = min(state.num_computed_tokens, state.num_prompt_tokens)
        bisect.insort(self.running, state, key=_arrival)
        self._running_of[state.request.tenant] += 1

    def preempt(self, state: RequestState, now_s: float) -> None:
        """A running request gives everything back and waits again; what it computed is computed anew."""
        self._stop_running(state, now_s)
        self.preemptions += 1
        state.phase = RequestPhase.WAITING
        self.waiting.add(state)

    def finish(
        self,
        state: RequestState,
        reason: FinishReason,
        now_s: float,
        *,
        progress: Progress | None = None,
        error: tuple[str, str] = ("", ""),
        field: str = "",
    ) -> None:
        """End a request; its last output is that of `progress`, or an empty one. `field` is at fault."""
        del self._states[state.request_id]
        if state.phase is RequestPhase.RUNNING:
            self._stop_running(state, now_s)
        else:
            self.waiting.remove(state)
            if state.request.digest is not None:
                self._gate.withdraw(state.request.digest, state.request_id)
        state.phase = RequestPhase.ENDED
        tenant = state.request.tenant
        if not self._running_of[tenant] and not self.waiting.num_of(tenant):
            del self._running_of[tenant]
            self.counters.leave(tenant)
        end = RequestFinish(
            reason=reason,
            stop_token_id=progress.stop_token_id if progress else None,
            prompt_tokens=state.num_prompt_tokens,
            cached_tokens=state.num_cached_tokens,
            output_tokens=state.num_output_tokens,
            timings=state.timings(now_s),
            tier_hit=state.tier_hit,
            error_reason=error[0],
            error_message=error[1],
            error_metadata=(("field", field),) if field else (),
        )
        news = progress.output if progress else RequestOutput(state.request_id)
        self.outputs.append(
            RequestOutput(state.request_id, news.token_ids, news.logprobs, news.prompt_logprobs, end)
        )

    def expire(self, now_s: float) -> None:
        """End every request whose deadline has passed."""
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, sequence, request_id = heapq.heappop(self._deadlines)
            state = self._states.get(request_id)
            if state is not None and state.sequence == sequence:
                self.finish(state, FinishReason.DEADLINE, now_s)

    def next_deadline_s(self) -> float | None:
        """When `expire` may next have work; deadlines of ended requests are dropped on the way."""
        while self._deadlines:
            deadline_s, sequence, request_id = self._deadlines[0]
            state = self._states.get(request_id)
            if state is not None and state.sequence == sequence:
                return deadline_s
            heapq.heappop(self._deadlines)
        return None

    def _stop_running(self, state: RequestState, now_s: float) -> None:
        index = bisect.bisect_left(self.running, state.sequence, key=_arrival)
        assert self.running[index] is state, state.request_id
        del self.running[index]
        self._running_of[state.request.tenant] -= 1
        self._kv_cache.free(state)
        self.left_runner.append(state.request_id)
        if state.has_lease:
            assert state.request.digest is not None
            self._gate.release(state.request.digest, state.request_id, now_s)
            state.has_lease = False
            state.slot = BASE_SLOT


def _arrival(state: RequestState) -> int:
    return state.sequence
