"""docs/metrics.md as data."""

import re
from dataclasses import dataclass
from pathlib import Path

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
_SERVICES = {
    "Both services": {"node", "manager"},
    "Inference service": {"node"},
    "Adapter manager": {"manager"},
}


@dataclass(frozen=True)
class Row:
    """One series. `name` is the family's, as parsers name it: a counter's without `_total`."""

    name: str
    type: str
    labels: frozenset[str]


def documented(service: str) -> dict[str, Row]:
    """The rows of "node" or "manager"."""
    rows: dict[str, Row] = {}
    owners: set[str] = set()
    for line in DOCUMENT.read_text().splitlines():
        if line.startswith("## "):
            owners = _SERVICES.get(line.removeprefix("## "), set())
        if service not in owners or not line.startswith("| `"):
            continue
        shown, kind, unit, labels, _ = (cell.strip(" `") for cell in line.strip("|").split("|"))
        assert unit, line
        assert (kind == "counter") == shown.endswith("_total"), line
        name = shown.removesuffix("_total")
        assert name not in rows, line
        rows[name] = Row(name, kind, frozenset(re.findall(r"\w+", labels)))
    return rows
