"""What a soak has seen so far: counts and faults."""

from collections import Counter
from collections.abc import Callable

from lorikeet_bench.soak.exchange import Fault, Verdict

# Each fault is shown as it happens; beyond this many they are only counted.
_KEPT_FAULTS = 50


class Tally:
    """One event loop adds, anybody reads."""

    def __init__(self, on_fault: Callable[[Fault], None]) -> None:
        self._on_fault = on_fault
        self.streams = Counter[str]()
        self.churn = Counter[tuple[str, str]]()
        self.faults: list[Fault] = []
        self.wrong = 0
        self.lost = 0
        self.tokens = 0
        self.open = 0
        self.open_at_most = 0

    def opened(self) -> None:
        """A stream was opened."""
        self.open += 1
        self.open_at_most = max(self.open_at_most, self.open)

    def closed(self) -> None:
        """A stream has ended."""
        self.open -= 1

    def judged(self, verdict: Verdict, num_tokens: int) -> None:
        """A request's end."""
        self.streams[verdict.status] += 1
        self.tokens += num_tokens
        for fault in verdict.faults:
            self.fault(fault)

    def churned(self, kind: str, outcome: str) -> None:
        """An operation's end."""
        self.churn[kind, outcome] += 1

    def fault(self, fault: Fault) -> None:
        """Something was wrong or got lost."""
        if fault.kind.is_wrong:
            self.wrong += 1
        else:
            self.lost += 1
        if len(self.faults) < _KEPT_FAULTS:
            self.faults.append(fault)
            self._on_fault(fault)
