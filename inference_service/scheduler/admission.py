"""Whether a request may enter at all: limits that no waiting would cure, and room in the queue."""

from inference_service.domain.errors import (
    DuplicateRequestError,
    InvalidRequestError,
    LimitExceededError,
    QueueFullError,
)
from inference_service.domain.request import EngineRequest
from inference_service.scheduler.config import SchedulerConfig
from inference_service.scheduler.request_table import RequestTable


def check_admission(request: EngineRequest, table: RequestTable, config: SchedulerConfig) -> None:
    """Pass, or raise what the request ends with.

    Raises:
        DuplicateRequestError: the id is in use.
        InvalidRequestError: an empty prompt.
        LimitExceededError: the prompt, or prompt and output, could never fit.
        QueueFullError: too many wait already, of this tenant or in all.
    """
    if request.request_id in table:
        raise DuplicateRequestError(f"request id {request.request_id!r} is in use by a running request")
    _check_size(request, config)
    _check_queue(request.tenant, table, config)


def _check_size(request: EngineRequest, config: SchedulerConfig) -> None:
    num_prompt_tokens = len(request.prompt_token_ids)
    if num_prompt_tokens == 0:
        raise InvalidRequestError("the prompt has no tokens; send at least one")
    longest_prompt = config.max_context_tokens - min(1, request.sampling.max_tokens)
    if num_prompt_tokens > longest_prompt:
        raise _limit("max_context_tokens", num_prompt_tokens, longest_prompt, "shorten the prompt")
    # The last token's keys and values are never needed.
    most = min(num_prompt_tokens + max(1, request.sampling.max_tokens), config.max_context_tokens) - 1
    capacity = config.num_blocks * config.block_tokens
    if max(most, num_prompt_tokens) > capacity:
        raise _limit("kv_cache_tokens", most, capacity, "shorten the prompt or lower max_tokens")


def _check_queue(tenant: str, table: RequestTable, config: SchedulerConfig) -> None:
    """Requests that could run at once do not count as waiting, though they pass through the queue."""
    share = table.counters.share(tenant)
    places = max(0, config.max_running_requests - table.num_running)
    if table.num_waiting >= config.max_waiting_requests + places:
        raise QueueFullError(
            f"{table.num_waiting} requests wait already "
            f"(max_waiting_requests {config.max_waiting_requests}); try again later",
            retry_after_s=1.0,
        )
    if share.max_waiting_requests == 0:
        return
    if share.max_running_requests > 0:
        places = min(places, max(0, share.max_running_requests - table.num_running_of(tenant)))
    waiting = table.num_waiting_of(tenant)
    if waiting >= share.max_waiting_requests + places:
        raise QueueFullError(
            f"{waiting} requests of tenant {tenant} wait already "
            f"(its max_waiting_requests {share.max_waiting_requests}); try again later",
            retry_after_s=1.0,
        )


def _limit(limit: str, value: int, maximum: int, advice: str) -> LimitExceededError:
    return LimitExceededError(
        f"{limit}: the request needs {value} tokens, at most {maximum} are possible here; {advice}",
        metadata={"limit": limit, "value": str(value), "maximum": str(maximum)},
    )
