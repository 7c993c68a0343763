"""One request and what came of it, as values for the judge."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from lorikeet_client import Finish


class Ending(StrEnum):
    """What the client means to do."""

    RUN = "run to the end"
    SLOW = "read slowly"
    CANCEL = "cancel"
    ABORT = "abort by another call"
    DEADLINE = "deadline"
    DISCONNECT = "disconnect"


@dataclass(frozen=True, slots=True)
class Asked:
    """A request. `reference` None asks the base model; `after_tokens` is when the client's ending comes."""

    request_id: str
    reference: str | None
    prompt: tuple[int, ...]
    max_tokens: int
    ending: Ending
    after_tokens: int = 0
    deadline_s: float | None = None
    stop_token: int | None = None


@dataclass(slots=True)
class Answer:
    """What the client saw. Filled while it happens."""

    sent_s: float
    first_s: float | None = None
    ended_s: float = 0.0
    tokens: list[int] = field(default_factory=list[int])
    finish: Finish | None = None
    # The status code of an error, and its words.
    code: str = ""
    message: str = ""
    # The client closed, aborted or cut the connection, and when.
    left_s: float | None = None
    # The stream broke the contract of streams: a gap, or an end without a finish.
    broken: str = ""
    is_hung: bool = False


class FaultKind(StrEnum):
    """Wrong: somebody else answered. Lost: something that was due did not come."""

    WRONG_TOKEN = "tokens of another revision"  # noqa: S105 (no secret)
    WRONG_REVISION = "a revision that the name did not hold"
    STALE_REVISION = "a revision that was replaced before the request"
    NOT_NOTHING = "an answer where nothing should answer"
    LOST_ANSWER = "an answer or a part of it is missing"
    LOST_WRITE = "an acknowledged write is missing"
    FAILED_OPERATION = "an operation failed without a good reason"

    @property
    def is_wrong(self) -> bool:
        """Whether it counts as wrong; else as lost."""
        return self not in {FaultKind.LOST_ANSWER, FaultKind.LOST_WRITE, FaultKind.FAILED_OPERATION}


@dataclass(frozen=True, slots=True)
class Fault:
    """One broken promise, with everything needed to look for it."""

    kind: FaultKind
    message: str
    at_s: float
    facts: dict[str, object]


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a request ended, in one word for the table, and what was wrong with it."""

    status: str
    faults: Sequence[Fault] = ()
