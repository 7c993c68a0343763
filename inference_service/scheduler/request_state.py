"""What the scheduler knows of one request between its arrival and its end."""

from dataclasses import dataclass, field
from enum import StrEnum

from inference_service.domain.adapter import BASE_SLOT, ResidencyTier
from inference_service.domain.request import EngineRequest, RequestTimings, TokenLogprobs
from inference_service.scheduler.prefix_cache import BlockKeys


class RequestPhase(StrEnum):
    """WAITING and ENDED requests hold nothing; RUNNING ones hold blocks and perhaps a lease."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class SharedPrompt:
    """What the samples of one request have in common: one computes it, the others wait and take its blocks.

    Only a reason to wait a little, never a claim: where the blocks are gone meanwhile, or their maker, the
    next one computes them again. `num_tokens` are those of the prompt's blocks that others can take; the last
    token is everyone's own, since its logits are what the first output token is drawn from.
    """

    num_tokens: int
    latest: "RequestState | None" = None

    def is_awaited(self) -> bool:
        """Whether the sample that was started last is still computing it."""
        maker = self.latest
        return (
            maker is not None
            and maker.phase is RequestPhase.RUNNING
            and maker.num_confirmed_tokens < self.num_tokens
        )


@dataclass(slots=True, eq=False)
class RequestState:
    """Owned and changed by the scheduler alone.

    `num_computed_tokens` counts what was handed to the runner; `num_confirmed_tokens` what came back from it.
    `num_pending_tokens` are tokens that the runner samples in a step not yet reported: they are part of the
    sequence, though their ids are not known here. `first_step` is the step of the latest admission: results
    of earlier steps belong to a life that preemption ended.
    """

    request: EngineRequest
    sequence: int
    arrived_s: float
    keys: BlockKeys
    token_ids: list[int]
    max_output_tokens: int
    shared_prompt: "SharedPrompt | None" = None
    phase: RequestPhase = RequestPhase.WAITING
    block_ids: list[int] = field(default_factory=list[int])
    num_published_blocks: int = 0
    num_computed_tokens: int = 0
    num_confirmed_tokens: int = 0
    num_pending_tokens: int = 0
    num_charged_tokens: int = 0
    num_cached_tokens: int = 0
    first_step: int = -1
    slot: int = BASE_SLOT
    has_lease: bool = False
    tier_hit: ResidencyTier | None = None
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list[TokenLogprobs | None])
    has_sent_prompt_logprobs: bool = False
    adapter_wait_since_s: float | None = None
    adapter_wait_s: float = 0.0
    admitted_s: float | None = None
    first_token_s: float | None = None

    @property
    def request_id(self) -> str:
        """The engine-wide id."""
        return self.request.request_id

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens whose ids are known."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        """Length of the sequence, pending tokens included."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens not yet handed to the runner; 1 while decoding."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether all but the last token are computed, and that one is an output token."""
        # Asked of every request at every step: spelled out, it takes a third of the time.
        num_tokens = len(self.token_ids) + self.num_pending_tokens
        is_last = num_tokens - self.num_computed_tokens == 1
        return is_last and num_tokens > len(self.request.prompt_token_ids)

    @property
    def has_all_tokens(self) -> bool:
        """Whether the output, pending tokens included, is as long as it may become."""
        num_tokens = len(self.token_ids) + self.num_pending_tokens
        return num_tokens - len(self.request.prompt_token_ids) >= self.max_output_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt positions must be computed for their log-probabilities."""
        return self.request.sampling.prompt_logprobs is not None and not self.has_sent_prompt_logprobs

    def timings(self, now_s: float) -> RequestTimings:
        """Where the time went until now."""
        admitted_s = now_s if self.admitted_s is None else self.admitted_s
        first_token_s = now_s if self.first_token_s is None else self.first_token_s
        waited_s = self.adapter_wait_s
        if self.adapter_wait_since_s is not None:
            waited_s += now_s - self.adapter_wait_since_s
        return RequestTimings(
            queue_ms=max(0.0, admitted_s - self.arrived_s - waited_s) * 1e3,
            adapter_wait_ms=waited_s * 1e3,
            prefill_ms=max(0.0, first_token_s - admitted_s) * 1e3,
            decode_ms=max(0.0, now_s - first_token_s) * 1e3,
        )
