"""When a failed load may be tried again: bounded, with growing pauses, each revision for itself. Pure."""

from dataclasses import dataclass

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 60.0
MAX_ATTEMPTS = 6


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong with a revision on a node, and how often."""

    message: str
    attempts: int
    failed_at_s: float
    is_final: bool = False

    def may_retry(self, now_s: float) -> bool:
        """Whether another attempt makes sense and its time has come. A final failure's never does."""
        return not self.is_final and self.attempts < MAX_ATTEMPTS and self.is_due(now_s)

    def is_due(self, now_s: float) -> bool:
        """Whether the pause after the last attempt is over."""
        return now_s - self.failed_at_s >= min(
            _LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(self.attempts - 1, 16)
        )


def failed_again(former: Failure | None, message: str, now_s: float, *, is_final: bool) -> Failure:
    """The record after one more failure."""
    attempts = former.attempts + 1 if former else 1
    return Failure(message, attempts, now_s, is_final)
