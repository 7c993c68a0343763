"""A request on its way through the engine, and what comes back of it."""

from dataclasses import dataclass
from enum import StrEnum

from inference_service.domain.adapter import ResidencyTier
from inference_service.domain.sampling import SamplingParams


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP_TOKEN = "stop_token"  # noqa: S105 (not a password)
    STOP_STRING = "stop_string"
    LENGTH = "length"
    DEADLINE = "deadline"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """What the front end sends into the engine: tokenized, its adapter resolved to a digest.

    `request_id` is unique within the engine. `digest` None is the base model. `deadline_s` is on the clock of
    `time.monotonic` (shared by the processes of one machine); None means no deadline.
    """

    request_id: str
    tenant: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    digest: str | None = None
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of one token and of the most likely ones at its position, most likely first."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """Where a request's time went, milliseconds."""

    queue_ms: float = 0.0
    adapter_wait_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class RequestFinish:
    """The end of a request as the engine sees it; stop strings are found by the front end.

    `error_reason` (UPPER_SNAKE) and `error_message` are set with FAILED only.
    """

    reason: FinishReason
    stop_token_id: int | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    timings: RequestTimings = RequestTimings()
    tier_hit: ResidencyTier | None = None
    error_reason: str = ""
    error_message: str = ""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One step's news of one request.

    `logprobs` has one entry a token where asked for. `prompt_logprobs` comes once, whole, with the first
    output: entry i belongs to prompt token i, None for token 0.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    finish: RequestFinish | None = None
