"""What the scheduler asks of the model runner each step, and what it gets back.

The runner keeps per-request state (tokens, block table, slot, random stream) from NEW to FINISHED, so that a
step of running requests carries only what changed. Order of `scheduled` is the batch's order.
"""

from dataclasses import dataclass

from inference_service.domain.request import TokenLogprobs
from inference_service.domain.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request's first appearance at the runner, or its return after preemption.

    `token_ids` are prompt and, after preemption, output tokens so far; `num_prompt_tokens` says where the
    latter begin. Key-value entries of the first `num_computed_tokens` are in `block_ids` already, by the
    prefix cache.
    """

    request_id: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    block_ids: tuple[int, ...]
    num_computed_tokens: int
    slot: int


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's share of a step: tokens [num_computed_tokens, + num_scheduled_tokens) of its sequence.

    `new_block_ids` extend the block table (for a new request: beyond NewRequest.block_ids). The runner
    samples a token where the share reaches the end of the request's known tokens.
    """

    request_id: str
    num_computed_tokens: int
    num_scheduled_tokens: int
    new_block_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step. `finished` are requests whose runner state may go; preempted ones are among them."""

    step: int
    scheduled: tuple[ScheduledRequest, ...]
    new: tuple[NewRequest, ...] = ()
    finished: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole batch."""
        return sum(s.num_scheduled_tokens for s in self.scheduled)


@dataclass(frozen=True, slots=True)
class SampledRequest:
    """What a step made of one request.

    `token_ids` is empty while the prompt is not all computed; a negative id says that the logits were not
    finite and there is no token. `prompt_logprobs` covers the prompt positions that this step predicted:
    position num_computed_tokens + 1 onwards. `failure` says why the request cannot go on (structured output);
    what else is here then counts for nothing.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    failure: str = ""


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """The results of a step, in the batch's order."""

    step: int
    results: tuple[SampledRequest, ...]
