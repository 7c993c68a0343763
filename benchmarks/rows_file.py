"""Rows of measured figures, and the documents that keep them: what a run did not measure stays in one."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

_ADVICE = "repair it, move it away or name another"


@dataclass(frozen=True)
class Row:
    """One figure. `floor` is in the row's unit; None where there is none, as for `peer` and the targets."""

    name: str
    value: float
    unit: str
    floor: float | None = None
    peer: float | None = None
    peer_version: str = ""
    target: float | None = None
    stretch: float | None = None
    commit: str = ""


def read_object(path: Path, **kinds: type) -> dict[str, Any]:
    """The JSON object that a file holds.

    Raises:
        ValueError: it holds none with values of these kinds; the message does not name the file.
    """
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"is no JSON, or was cut: {error}") from error
    if not isinstance(found, dict):
        raise ValueError("is no JSON object")  # noqa: TRY004 (of a file, not of an argument)
    if wrong := [key for key, kind in kinds.items() if not isinstance(found.get(key), kind)]:
        raise ValueError(f"has no proper {', '.join(wrong)}")
    return found


def read_document(path: Path) -> dict[str, Any]:
    """What the file holds, or an empty document.

    Raises:
        ValueError: it holds anything else; the message says what to do about it.
    """
    if not path.exists():
        return {"machines": {}, "failures": {}, "rows": []}
    try:
        document = read_object(path, machines=dict, failures=dict, rows=list)
        for row in document["rows"]:
            Row(**row)
    except TypeError as error:
        raise ValueError(f"{path} has other rows ({error}); {_ADVICE}") from error
    except ValueError as error:
        raise ValueError(f"{path} {error}; {_ADVICE}") from error
    return document


def write_document(path: Path, document: dict[str, Any]) -> None:
    """Whole or not at all: a run that is cut leaves the document as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(document, indent=1) + "\n")
    part.replace(path)


def merge_rows(kept: Iterable[dict[str, Any]], made: Iterable[Row]) -> list[dict[str, Any]]:
    """A document's rows with those that were made in their places, by name; new ones come last.

    A row whose value is what it was keeps its commit, which may have been put right by hand since.
    """
    rows = {row["name"]: row for row in kept}
    for row in made:
        old = rows.get(row.name, {})
        commit = old.get("commit", "") if old.get("value") == row.value else row.commit
        rows[row.name] = asdict(replace(row, commit=commit))
    return list(rows.values())


def show_rows(path: Path) -> None:
    """Print a document's rows as a table, and what failed."""
    document = read_document(path)
    rows = [Row(**row) for row in document["rows"]]
    print(as_table(rows))
    for name, reasons in document["failures"].items():
        print(f"{name} failed: {'; '.join(reasons)}")
    print(f"{len(rows)} rows in {path}")


def figure_alone(row: Row) -> Row:
    """The same without what it is held against."""
    return Row(row.name, row.value, row.unit, commit=row.commit)


def as_table(rows: Sequence[Row]) -> str:
    """Markdown, as docs show it; what a peer's version says behind a comma stands beside its figure."""
    lines = ["| what | measured | floor | peer | target | stretch |", "|---|---|---|---|---|---|"]
    for row in rows:
        cells = [_figure(value) for value in (row.value, row.floor, row.peer, row.target, row.stretch)]
        if remark := row.peer_version.partition(", ")[2]:
            cells[2] += f" ({remark})"
        lines.append(f"| {row.name}, {row.unit} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _figure(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
