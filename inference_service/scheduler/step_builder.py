"""One step in the making."""

from inference_service.domain.step import NewRequest, ScheduledRequest


class StepBuilder:
    """Collects a step's requests within the token budget."""

    def __init__(self, max_step_tokens: int) -> None:
        self.budget = max_step_tokens
        self.scheduled: list[ScheduledRequest] = []
        self.new: list[NewRequest] = []
        self.has_preempted = False
        self._ids: set[str] = set()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ids

    def add(self, share: ScheduledRequest) -> None:
        """Put a request's share in; it must be within the budget."""
        assert share.num_scheduled_tokens <= self.budget
        self.budget -= share.num_scheduled_tokens
        self.scheduled.append(share)
        self._ids.add(share.request_id)
