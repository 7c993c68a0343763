"""What a generation yields: pieces of text with their tokens, the last with how it ended."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from inference_service.domain.adapter import ResidencyTier
from inference_service.domain.request import FinishReason, RequestTimings, TokenLogprobs
from lorikeet_contract.names import AdapterName

# Default clients take messages up to 4 MiB. A piece stays far below that, so that serializing it does not
# hold other streams up, except that one token with the whole vocabulary's log-probabilities is never split
# (2.9 MiB at 262,144 entries).
MAX_PIECE_BYTES = 1 << 18
MAX_REPLY_BYTES = (4 << 20) - (64 << 10)


@dataclass(frozen=True, slots=True)
class TokenPiece:
    """One token; `logprobs` None where none were asked for."""

    id: int
    text_bytes: bytes
    logprobs: TokenLogprobs | None = None

    @property
    def num_top(self) -> int:
        """How many alternatives it comes with."""
        return 0 if self.logprobs is None else self.logprobs.num_top

    @property
    def max_wire_bytes(self) -> int:
        """At least what it takes in a message."""
        return 24 + len(self.text_bytes) + 12 * self.num_top


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """The revision that answers."""

    name: AdapterName
    digest: str


@dataclass(frozen=True, slots=True)
class GenerationFinish:
    """How a generation ended, what it used and where its time went."""

    reason: FinishReason
    stop_string: str = ""
    stop_token_id: int | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    timings: RequestTimings = field(default_factory=RequestTimings)
    adapter: ServedAdapter | None = None
    tier_hit: ResidencyTier | None = None


@dataclass(frozen=True, slots=True)
class GenerationPiece:
    """The text of all pieces of a sample, joined, is its whole text; likewise the tokens.

    `index` is the sample's; the prompt's tokens come with sample 0.
    """

    text: str = ""
    tokens: tuple[TokenPiece, ...] = ()
    prompt_tokens: tuple[TokenPiece, ...] = ()
    finish: GenerationFinish | None = None
    index: int = 0

    @property
    def max_wire_bytes(self) -> int:
        """At least what its text and tokens take in a message."""
        tokens = sum(t.max_wire_bytes for t in (*self.tokens, *self.prompt_tokens))
        return tokens + len(self.text.encode())

    def split(self) -> Iterator["GenerationPiece"]:
        """Pieces that each fit a message: prompt tokens, then tokens; text and finish are on the last."""
        if self.max_wire_bytes <= MAX_PIECE_BYTES:
            yield self
            return
        for group in _groups(self.prompt_tokens):
            yield GenerationPiece(prompt_tokens=group)
        *full, last = _groups(self.tokens) or [()]
        for group in full:
            yield GenerationPiece(tokens=group, index=self.index)
        yield replace(self, prompt_tokens=(), tokens=last)


def _groups(tokens: tuple[TokenPiece, ...]) -> list[tuple[TokenPiece, ...]]:
    groups: list[tuple[TokenPiece, ...]] = []
    begin = size = 0
    for index, token in enumerate(tokens):
        if index > begin and size + token.max_wire_bytes > MAX_PIECE_BYTES:
            groups.append(tokens[begin:index])
            begin, size = index, 0
        size += token.max_wire_bytes
    if tokens[begin:]:
        groups.append(tokens[begin:])
    return groups
