"""A request on its way through the engine, and what comes back of it."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
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

    `num_samples` answers are wanted. The engine runs each as a request of its own, `samples()[i]`, and
    reports it under that one's id; `sampling` is sample 0's.
    """

    request_id: str
    tenant: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    digest: str | None = None
    deadline_s: float | None = None
    num_samples: int = 1

    def sample_id(self, index: int) -> str:
        """The id under which a sample runs; that of sample 0 is the request's."""
        return f"{self.request_id}/{index}" if index else self.request_id

    def samples(self) -> tuple["EngineRequest", ...]:
        """Each sample as a request of its own.

        Sample i draws with seed + i, as in vLLM: alone it is the request of that seed with one sample. The
        prompt's log-probabilities are the same for all, so sample 0 alone has them.
        """
        if self.num_samples == 1:
            return (self,)
        first = replace(self, num_samples=1, sampling=self._sampling_of(0))
        rest = (
            replace(first, request_id=self.sample_id(index), sampling=self._sampling_of(index))
            for index in range(1, self.num_samples)
        )
        return (first, *rest)

    def _sampling_of(self, index: int) -> SamplingParams:
        sampling = self.sampling
        if sampling.structured_output is not None:
            sampling = replace(sampling, structured_output=sampling.structured_output.of_sample(index))
        if index:
            sampling = replace(sampling, seed=(sampling.seed + index) % 2**64, prompt_logprobs=None)
        return sampling


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of one token and of the most likely ones at its position, most likely first.

    The latter are arrays of int32 and float32 in this machine's byte order: whole vocabularies for whole
    prompts cross processes, and as Python numbers they would take a dozen times the memory and stop the
    engine loop and the front end's event loop for seconds.
    """

    logprob: float
    packed_ids: bytes = b""
    packed_logprobs: bytes = b""

    @classmethod
    def of(cls, logprob: float, top_ids: Sequence[int], top_logprobs: Sequence[float]) -> "TokenLogprobs":
        """Pack the numbers; log-probabilities are rounded to float32."""
        assert len(top_ids) == len(top_logprobs)
        return cls(logprob, array("i", top_ids).tobytes(), array("f", top_logprobs).tobytes())

    @property
    def num_top(self) -> int:
        """How many of the most likely tokens there are."""
        return len(self.packed_ids) // 4

    @property
    def top_ids(self) -> tuple[int, ...]:
        """Unpacked anew by each call, as are `top_logprobs`."""
        return tuple(memoryview(self.packed_ids).cast("i"))

    @property
    def top_logprobs(self) -> tuple[float, ...]:
        """See `top_ids`."""
        return tuple(memoryview(self.packed_logprobs).cast("f"))


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

    `error_reason` (UPPER_SNAKE), `error_message` and `error_metadata` are set with FAILED only.
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
    error_metadata: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One step's news of one request.

    `logprobs` has one entry a token where asked for. `prompt_logprobs` comes once, whole, with the first
    output: entry i belongs to prompt token i, None for token 0. `index` is the sample's in its request: the
    front end fills it in, the engine knows a sample by its id.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    finish: RequestFinish | None = None
    index: int = 0
