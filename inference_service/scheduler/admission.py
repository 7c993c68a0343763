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
        LimitExceededError: the prompt, or prompt and output, could never fit; there are more samples than the
            tenant may have running and waiting.
        QueueFullError: too many wait already, of this tenant or in all.
    """
    if any(request.sample_id(index) in table for index in range(request.num_samples)):
        raise DuplicateRequestError(f"request id {request.request_id!r} is in use by a running request")
    _check_size(request, config)
    _check_queue(request, table, config)


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


def _check_queue(request: EngineRequest, table: RequestTable, config: SchedulerConfig) -> None:
    """Requests that could run at once do not count as waiting, though they pass through the queue.

    Every sample counts: a request of many enters whole or not at all.
    """
    tenant, num_samples = request.tenant, request.num_samples
    share = table.counters.share(tenant)
    most_running = min(config.max_running_requests, share.max_running_requests or config.max_running_requests)
    most_waiting = min(config.max_waiting_requests, share.max_waiting_requests or config.max_waiting_requests)
    if num_samples > most_running + most_waiting:
        raise LimitExceededError(
            f"sampling.n is {num_samples}; tenant {tenant} may have {most_running} running and "
            f"{most_waiting} waiting (max_waiting_requests), each sample counted: ask for fewer",
            metadata={
                "field": "sampling.n",
                "limit": "max_waiting_requests",
                "value": str(num_samples),
                "maximum": str(most_running + most_waiting),
            },
        )
    places = max(0, config.max_running_requests - table.num_running)
    if table.num_waiting + num_samples > config.max_waiting_requests + places:
        raise QueueFullError(
            f"{table.num_waiting} requests wait already "
            f"(max_waiting_requests {config.max_waiting_requests}){_more(num_samples)}; try again later",
            metadata=_queue_metadata(table.num_waiting + num_samples, config.max_waiting_requests + places),
            retry_after_s=1.0,
        )
    if share.max_waiting_requests == 0:
        return
    if share.max_running_requests > 0:
        places = min(places, max(0, share.max_running_requests - table.num_running_of(tenant)))
    waiting = table.num_waiting_of(tenant)
    if waiting + num_samples > share.max_waiting_requests + places:
        raise QueueFullError(
            f"{waiting} requests of tenant {tenant} wait already "
            f"(its max_waiting_requests {share.max_waiting_requests}){_more(num_samples)}; try again later",
            metadata=_queue_metadata(waiting + num_samples, share.max_waiting_requests + places),
            retry_after_s=1.0,
        )


def _queue_metadata(value: int, maximum: int) -> dict[str, str]:
    """With this request so many would be there, of at most so many that may run next or wait."""
    return {
        "field": "request",
        "limit": "max_waiting_requests",
        "value": str(value),
        "maximum": str(maximum),
    }


def _more(num_samples: int) -> str:
    return f", and this one has {num_samples} samples" if num_samples > 1 else ""


def _limit(limit: str, value: int, maximum: int, advice: str) -> LimitExceededError:
    return LimitExceededError(
        f"{limit}: the request needs {value} tokens, at most {maximum} are possible here; {advice}",
        metadata={"field": "input", "limit": limit, "value": str(value), "maximum": str(maximum)},
    )
