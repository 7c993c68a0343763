"""What one request of a load brought, and who sends it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from lorikeet_bench.load.plan import PlannedRequest

OK = "OK"


@dataclass(slots=True)
class RequestRecord:
    """Times are on the clock of `time.perf_counter`.

    `came_s` and `counts` have one entry for each piece of the answer that held tokens. `status` is OK, or
    what the request ended with: a status code, an error's reason, or an end that was not asked for.
    """

    request: PlannedRequest
    sent_s: float = 0.0
    end_s: float = 0.0
    came_s: list[float] = field(default_factory=list[float])
    counts: list[int] = field(default_factory=list[int])
    token_ids: list[int] = field(default_factory=list[int])
    prompt_token_ids: Sequence[int] = ()
    prompt_tokens: int = 0
    status: str = ""
    message: str = ""
    # The revision that answered as the server named it; None: it said the base model, or it does not say.
    answered_by: str | None = None
    # What the sender keeps until `settle`.
    raw: list[bytes] = field(default_factory=list[bytes])

    @property
    def is_ok(self) -> bool:
        """Whether it ended as asked."""
        return self.status == OK

    @property
    def output_tokens(self) -> int:
        """Tokens that came."""
        return sum(self.counts)


class Target(Protocol):
    """Where a load goes to."""

    async def send(self, record: RequestRecord) -> None:
        """Send `record.request`, note when its pieces come, and set `status`. Never raises for a refusal."""
        ...

    def settle(self, record: RequestRecord) -> None:
        """Read what `send` left unread, once nothing is measured any more."""
        ...
