"""Values of text generation: what a caller asks, what streams back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypedDict

from lorikeet_client.structured_output import StructuredOutput


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. None leaves a field to the model's own default, which the server documents.

    Meanings are vLLM's, and most names; docs/inference.md has the differences. `logit_bias` maps token ids
    to what is added to their logits. Log-probabilities are the model's own, before anything here changes
    them. `n` samples of one prompt are read from `Completion.samples`, or by `Delta.index`.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    max_tokens: int | None = None
    ignore_eos: bool = False
    stop_strings: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_string: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_p: float | None = None
    logit_bias: Mapping[int, float] | None = None
    min_tokens: int | None = None
    bad_words: Sequence[str] = ()
    n: int | None = None
    structured_output: StructuredOutput | None = None


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation.

    `fields` is what else the model's template reads of a turn, such as "tool_calls", "thinking" or "name":
    values of JSON, whose order is kept.
    """

    role: str
    content: str
    fields: Mapping[str, Any] | None = None


# A message as a mapping is of OpenAI's form: "role", "content", and further fields beside them.
Chat = Sequence[ChatMessage | Mapping[str, Any]]


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of `generate` and `complete`.

    chat, token_ids: the input, in place of a prompt. Messages are ChatMessages or mappings of OpenAI's form.
    add_generation_prompt: append the template's opening of the assistant's turn. Default true.
    template_arguments: further template variables, such as "tools" or "reasoning_effort"; values of JSON
    adapter: "name", "name@alias", "tenant/name[@alias]" or a resource name; absent means the base model.
    sampling: how tokens are chosen.
    request_id: names the request in logs and for `abort`; the server makes one if absent.
    """

    chat: Chat
    token_ids: Sequence[int]
    add_generation_prompt: bool
    template_arguments: Mapping[str, Any]
    adapter: str
    sampling: SamplingParams
    request_id: str


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """An alternative at one position."""

    id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Token:
    """One token. A character may be spread over several tokens' bytes."""

    id: int
    text_bytes: bytes
    logprob: float | None
    top_logprobs: tuple[TokenLogprob, ...]


class FinishReason(StrEnum):
    """Why a generation ended."""

    UNSPECIFIED = "unspecified"
    STOP_TOKEN = "stop_token"  # noqa: S105 (no secret: a token of text)
    STOP_STRING = "stop_string"
    LENGTH = "length"
    DEADLINE = "deadline"
    ABORTED = "aborted"


class AdapterTier(StrEnum):
    """Where an adapter's weights were when the request asked for them."""

    UNSPECIFIED = "unspecified"
    ABSENT = "absent"
    DISK = "disk"
    HOST = "host"
    ACTIVE = "active"


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts; `cached_tokens` of the prompt came from the prefix cache.

    The prompt is counted with sample 0 alone: the samples' usages add up to the request's.
    """

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the request's time went, as the server measured it."""

    queue_ms: float
    adapter_wait_ms: float
    prefill_ms: float
    decode_ms: float


@dataclass(frozen=True, slots=True)
class AdapterUsed:
    """The revision that answered."""

    revision: str
    digest: str
    tier_hit: AdapterTier


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a generation. `adapter` is None where the base model answered."""

    reason: FinishReason
    stop_string: str | None
    stop_token_id: int | None
    usage: Usage
    timings: Timings
    adapter: AdapterUsed | None


@dataclass(frozen=True, slots=True)
class Delta:
    """One piece of a stream, of the sample `index`.

    The `text` of all its pieces, joined, is a sample's whole text; `finish` is on its last one.
    """

    request_id: str
    sequence: int
    text: str
    tokens: tuple[Token, ...]
    prompt_tokens: tuple[Token, ...]
    finish: Finish | None
    index: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """One of a request's n answers, whole."""

    index: int
    text: str
    tokens: tuple[Token, ...]
    finish: Finish


@dataclass(frozen=True, slots=True)
class PartialSample:
    """As much of a sample as a stream has brought so far; `finish` is None until its last piece."""

    index: int
    text: str
    tokens: tuple[Token, ...]
    finish: Finish | None


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer: text, tokens and finish of sample 0, and the further samples where n asked for some."""

    request_id: str
    text: str
    tokens: tuple[Token, ...]
    prompt_tokens: tuple[Token, ...]
    finish: Finish
    further_samples: tuple[Sample, ...] = ()

    @property
    def samples(self) -> tuple[Sample, ...]:
        """All n samples, by index."""
        return (Sample(0, self.text, self.tokens, self.finish), *self.further_samples)

    @property
    def usage(self) -> Usage:
        """Of the whole request."""
        usages = [sample.finish.usage for sample in self.samples]
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in usages),
            cached_tokens=sum(usage.cached_tokens for usage in usages),
            output_tokens=sum(usage.output_tokens for usage in usages),
        )


@dataclass(frozen=True, slots=True)
class Tokenized:
    """A prompt as the model reads it; `rendered` is the chat through its template, else empty."""

    ids: tuple[int, ...]
    token_bytes: tuple[bytes, ...]
    rendered: str
