"""The fault table: one row for each fault at each stage, with what was lost, what was wrong, time to recover.

A case is a context. Its row is in the table however it ends; it fails where anything was lost or wrong.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class FaultCase:
    """One fault at one stage, while its test runs.

    `lost`: acknowledged changes that are missing or undone, and accepted streams that ended without a clear
    status, in words. `wrong`: answers of another adapter or revision than was asked for, in words.
    """

    fault: str
    stage: str
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    recover_s: float | None = None
    is_done: bool = False

    def recovered(self, seconds: float) -> None:
        """How long after the fault's end everything worked again; 0 for what never stopped working."""
        self.recover_s = max(seconds, self.recover_s or 0.0)

    @property
    def cells(self) -> tuple[str, str, str, str, str]:
        """The row as text."""
        recover = "-" if self.recover_s is None else f"{self.recover_s:.1f}"
        note = "" if self.is_done else "  FAILED"
        return self.fault, self.stage, str(len(self.lost)), str(len(self.wrong)), recover + note


class FaultTable:
    """All cases of one test session, in the order in which they began."""

    def __init__(self) -> None:
        self.cases: list[FaultCase] = []

    @contextmanager
    def case(self, fault: str, stage: str) -> Iterator[FaultCase]:
        """Run one case; fails at its end unless nothing was lost or wrong and it recovered."""
        case = FaultCase(fault, stage)
        self.cases.append(case)
        yield case
        assert not case.lost, f"{fault} / {stage}: lost {case.lost}"
        assert not case.wrong, f"{fault} / {stage}: wrong {case.wrong}"
        assert case.recover_s is not None, f"{fault} / {stage}: the case did not say when it recovered"
        case.is_done = True

    def lines(self) -> Sequence[str]:
        """The table as text; empty where there were no cases."""
        if not self.cases:
            return []
        head = ("fault", "stage", "lost", "wrong", "recover s")
        rows = [case.cells for case in self.cases]
        widths = [max(len(row[i]) for row in (head, *rows)) for i in range(5)]
        lines = [_line(head, widths)]
        former = ""
        for row in rows:
            lines.append(_line((row[0] if row[0] != former else "", *row[1:]), widths))
            former = row[0]
        slowest = max((case.recover_s or 0.0 for case in self.cases), default=0.0)
        lines.append(
            f"{len(rows)} rows: lost {sum(len(c.lost) for c in self.cases)}, "
            f"wrong {sum(len(c.wrong) for c in self.cases)}, "
            f"not finished {sum(not c.is_done for c in self.cases)}, slowest recovery {slowest:.1f} s"
        )
        return lines


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    texts = [row[i].ljust(widths[i]) if i < 2 else row[i].rjust(widths[i]) for i in range(len(row))]
    return "  ".join(texts).rstrip()
