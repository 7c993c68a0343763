"""What an answer must look like, and the matcher that follows an answer through it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Protocol


class ConstraintKind(StrEnum):
    """The fields of the message's oneof."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    GRAMMAR = "grammar"
    CHOICE = "choice"


@dataclass(frozen=True, slots=True)
class Constraint:
    """As the client asked. `text` is schema, expression or grammar; `choices` come with CHOICE only."""

    kind: ConstraintKind
    text: str = ""
    choices: tuple[str, ...] = ()
    allows_whitespace: bool = True


class GrammarRefusedError(ValueError):
    """A constraint cannot be served: it is invalid, unsupported, or takes too much. The message says why."""


class GrammarsUnavailableError(ValueError):
    """This node, its tokenizer or its model cannot do structured output at all. The message says why."""


@dataclass(frozen=True, slots=True)
class CheckedGrammar:
    """A constraint in llguidance's own form, and the bytes of memory that a matcher of it takes at first."""

    grammar: str
    num_bytes: int = 0


class TokenMatcher(Protocol):
    """One answer on its way through a grammar. One caller; what it does depends on its own tokens alone."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer that it has seen."""
        ...

    def advance(self, token_ids: Sequence[int]) -> None:
        """The answer goes on by these tokens; what comes after its end is ignored."""
        ...

    def fill_masks(self, matchers: "Sequence[TokenMatcher]", out: Any) -> None:
        """The tokens that may come next, a bit each, of all `matchers` (of this one's kind), at once.

        `out` is int32 [len(matchers), ceil(vocabulary / 32)], a contiguous array of the host; bit t % 32 of
        word t // 32 is token t. A matcher that has an error allows nothing.
        """
        ...

    def error(self) -> str:
        """Why the matcher cannot go on, such as a limit of its work that was passed; else ""."""
        ...

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """The model's end-of-sequence tokens, which are allowed where the answer is complete."""
        ...


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """A constraint that was checked. `grammar` is llguidance's own form of it, which the engine compiles.

    `ends_late`: the request ignores end-of-sequence tokens, so they come only where nothing else may.
    `matcher` is there in the engine process once it was compiled, and lives as long as the request: it goes
    on where it was after a preemption. `other_matchers` are those of samples 1 and following; `num_bytes` is
    what each takes.
    """

    grammar: str
    ends_late: bool = False
    matcher: TokenMatcher | None = None
    other_matchers: tuple[TokenMatcher, ...] = ()
    num_bytes: int = 0

    def of_sample(self, index: int) -> "StructuredOutput":
        """That of one sample, as of a request of its own."""
        if not self.other_matchers:
            return self
        matcher = self.other_matchers[index - 1] if index else self.matcher
        return replace(self, matcher=matcher, other_matchers=())
