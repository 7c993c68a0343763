"""The golden table: model x adapter, the worst relative error met and how many greedy tokens agreed."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tests.support.golden import GREEDY_TOKENS

Verdicts = Sequence[tuple[bool | None, str]]
"""The checker's, as `tests.support.golden.compare` returns them."""

_ERROR = re.compile(r"rel rms ([0-9.e+-]+)")
_DIFFERS = re.compile(r"differs at step (\d+)")


@dataclass(slots=True)
class GoldenRow:
    """One adapter of one model over all comparisons of a session."""

    worst_error: float = 0.0
    agreed: int = 0
    compared: int = 0
    num_wrong: int = 0

    def add(self, verdicts: Verdicts) -> None:
        """Count one set of answers in; a prompt whose tokens part at a near-tie agrees up to there."""
        for ok, text in verdicts:
            self.num_wrong += ok is False
            if error := _ERROR.search(text):
                self.worst_error = max(self.worst_error, float(error[1]))
            if text.startswith("greedy"):
                differs = _DIFFERS.search(text)
                self.agreed += int(differs[1]) if differs else GREEDY_TOKENS
                self.compared += GREEDY_TOKENS


class GoldenTable:
    """All comparisons of a session by model and adapter, in the order in which they came."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], GoldenRow] = {}
        self.refused: list[tuple[str, str, str]] = []

    def add(self, model: str, adapter: str | None, verdicts: Verdicts) -> None:
        """Count one set of answers in; `adapter` None is the base model."""
        self.rows.setdefault((model, adapter or "base"), GoldenRow()).add(verdicts)

    def add_refused(self, model: str, adapter: str, field: str) -> None:
        """An adapter that may be refused, and was, by the name of `field`."""
        self.refused.append((model, adapter, field))

    def lines(self) -> list[str]:
        """The table as text; empty where nothing was compared."""
        if not self.rows:
            return []
        lines = [f"{'model':<14} {'adapter':<28} {'worst rel error':>15} {'greedy agreement':>17}"]
        former = ""
        for (model, adapter), row in self.rows.items():
            agreement = f"{row.agreed}/{row.compared}"
            note = "" if row.num_wrong == 0 else f"  {row.num_wrong} WRONG"
            shown = model if model != former else ""
            lines.append(f"{shown:<14} {adapter:<28} {row.worst_error:>15.1e} {agreement:>17}{note}")
            former = model
        lines += [f"{model:<14} {adapter:<28} refused for {field}" for model, adapter, field in self.refused]
        rows = self.rows.values()
        lines.append(
            f"{len(rows)} rows, {sum(row.num_wrong > 0 for row in rows)} wrong: worst relative error "
            f"{max(row.worst_error for row in rows):.1e}, greedy tokens that agree "
            f"{sum(row.agreed for row in rows)} of {sum(row.compared for row in rows)}"
        )
        return lines
