"""What a step's result means for a request: its tokens up to a stop, its log-probabilities, its end."""

from dataclasses import dataclass

from inference_service.domain.request import FinishReason, RequestOutput, TokenLogprobs
from inference_service.domain.step import SampledRequest, ScheduledRequest
from inference_service.scheduler.request_state import RequestState


@dataclass(frozen=True, slots=True)
class Progress:
    """One step's news of a request; `reason` is set if the request ends with it."""

    output: RequestOutput
    reason: FinishReason | None = None
    stop_token_id: int | None = None


def apply_result(state: RequestState, scheduled: ScheduledRequest, result: SampledRequest) -> Progress | None:
    """Append a result's tokens to the request; None while its prompt is not all computed."""
    state.num_confirmed_tokens = scheduled.num_computed_tokens + scheduled.num_scheduled_tokens
    if state.wants_prompt_logprobs:
        _keep_prompt_logprobs(state, scheduled, result)
    if not result.token_ids:
        return None
    stop_token_ids = state.request.sampling.stop_token_ids
    taken: list[int] = []
    reason = FinishReason.LENGTH if state.max_output_tokens == 0 else None
    stop_token_id = None
    for token_id in result.token_ids:
        if reason is not None:
            break
        taken.append(token_id)
        state.token_ids.append(token_id)
        if token_id in stop_token_ids:
            reason, stop_token_id = FinishReason.STOP_TOKEN, token_id
        elif state.num_output_tokens >= state.max_output_tokens:
            reason = FinishReason.LENGTH
    state.num_pending_tokens = max(0, state.num_pending_tokens - len(result.token_ids))
    output = RequestOutput(
        request_id=state.request_id,
        token_ids=tuple(taken),
        logprobs=result.logprobs[: len(taken)],
        prompt_logprobs=_take_prompt_logprobs(state),
    )
    return Progress(output, reason, stop_token_id)


def _keep_prompt_logprobs(state: RequestState, scheduled: ScheduledRequest, result: SampledRequest) -> None:
    """File the positions that this step predicted; after preemption the same ones come again."""
    if not state.prompt_logprobs:
        empty: list[TokenLogprobs | None] = [None] * state.num_prompt_tokens
        state.prompt_logprobs = empty
    start = scheduled.num_computed_tokens + 1
    end = min(start + scheduled.num_scheduled_tokens, state.num_prompt_tokens)
    assert len(result.prompt_logprobs) == max(0, end - start), (len(result.prompt_logprobs), start, end)
    state.prompt_logprobs[start:end] = result.prompt_logprobs


def _take_prompt_logprobs(state: RequestState) -> tuple[TokenLogprobs | None, ...]:
    if not state.wants_prompt_logprobs:
        return ()
    whole = tuple(state.prompt_logprobs)
    state.prompt_logprobs = []
    state.has_sent_prompt_logprobs = True
    return whole
