"""Requests that wait, in order of arrival within each tenant, taken in the tenants' fair order."""

import bisect
import heapq
from collections.abc import Iterator

from inference_service.scheduler.fairness import TokenCounters
from inference_service.scheduler.request_state import RequestState


class WaitingQueue:
    """All waiting requests. A preempted request returns to the place that its arrival gives it."""

    def __init__(self, counters: TokenCounters) -> None:
        self._counters = counters
        self._by_tenant: dict[str, list[RequestState]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[RequestState]:
        for states in self._by_tenant.values():
            yield from states

    def num_of(self, tenant: str) -> int:
        """Waiting requests of one tenant."""
        return len(self._by_tenant.get(tenant, ()))

    def add(self, state: RequestState) -> None:
        """Put a request in."""
        bisect.insort(self._by_tenant.setdefault(state.request.tenant, []), state, key=_arrival)
        self._size += 1

    def remove(self, state: RequestState) -> None:
        """Take a request out; it must be in."""
        states = self._by_tenant[state.request.tenant]
        index = bisect.bisect_left(states, state.sequence, key=_arrival)
        assert states[index] is state, state.request_id
        del states[index]
        if not states:
            del self._by_tenant[state.request.tenant]
        self._size -= 1

    def fair_order(self) -> Iterator[RequestState]:
        """Each waiting request once: always the next of the tenant whose counter is lowest at that moment.

        Between two steps of the iterator the caller may remove the request just given, and charge tenants.
        """
        queues = {tenant: tuple(states) for tenant, states in self._by_tenant.items()}
        heap = [(self._counters.counter(tenant), tenant, 0) for tenant in queues]
        heapq.heapify(heap)
        while heap:
            _, tenant, index = heapq.heappop(heap)
            yield queues[tenant][index]
            # A tenant whose last request just ended has no counter any more.
            if index + 1 < len(queues[tenant]):
                heapq.heappush(heap, (self._counters.counter(tenant), tenant, index + 1))


def _arrival(state: RequestState) -> int:
    return state.sequence
