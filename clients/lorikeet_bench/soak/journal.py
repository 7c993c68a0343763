"""Who may answer when: the history of every name, written by those who change names, read by the judge.

A write counts as possible from the moment it was sent, and what it replaces until it was acknowledged and the
node surely works by it. In between either may answer; outside, only one.
"""

import math
from collections import deque
from dataclasses import dataclass, field

# Long enough for any request that could still ask about a replaced value.
_KEPT_WRITES = 256


@dataclass(slots=True)
class Write:
    """One change of what a reference means: a digest, or None for "not found"."""

    digest: str | None
    begin_s: float
    # When nothing before it can be meant any more; never, while its outcome is not known.
    settled_s: float = math.inf

    def __str__(self) -> str:
        what = self.digest[:12] if self.digest else "nothing"
        until = "in doubt" if math.isinf(self.settled_s) else f"settled {self.settled_s:.3f}"
        return f"{what} (sent {self.begin_s:.3f}, {until})"


@dataclass(slots=True)
class _History:
    writes: deque[Write] = field(default_factory=lambda: deque[Write](maxlen=_KEPT_WRITES))


class Journal:
    """Times are of one monotonic clock. References never written mean nothing."""

    def __init__(self) -> None:
        self._histories: dict[str, _History] = {}

    def begin(self, reference: str, digest: str | None, now_s: float) -> Write:
        """A write is about to be sent; writes of one reference must not overlap."""
        write = Write(digest, now_s)
        self._histories.setdefault(reference, _History()).writes.append(write)
        return write

    def refused(self, reference: str, write: Write) -> None:
        """The write was refused for certain: it never meant anything."""
        self._histories[reference].writes.remove(write)

    def possible(self, reference: str, from_s: float, until_s: float) -> frozenset[str | None]:
        """What a request that was resolved between the two times may have meant; None: not found."""
        found: set[str | None] = set()
        for write in reversed(self.history(reference)):
            if write.begin_s > until_s:
                continue
            found.add(write.digest)
            if write.settled_s <= from_s:
                return frozenset(found)
        return frozenset(found | {None})

    def ever(self, reference: str) -> frozenset[str]:
        """All digests that a reference has had, as far as is remembered."""
        return frozenset(write.digest for write in self.history(reference) if write.digest)

    def current(self, reference: str) -> str | None:
        """What the last write made of it."""
        history = self.history(reference)
        return history[-1].digest if history else None

    def history(self, reference: str) -> tuple[Write, ...]:
        """The remembered writes of a reference, oldest first."""
        history = self._histories.get(reference)
        return tuple(history.writes) if history else ()
