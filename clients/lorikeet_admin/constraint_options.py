"""The options of `lorikeet generate` that say what an answer must look like."""

import sys
from collections.abc import Sequence
from pathlib import Path

import typer

from lorikeet_client import StructuredOutput


def structured_output(
    json_schema: Path | None,
    grammar: Path | None,
    *,
    json_object: bool,
    regex: str | None,
    choice: Sequence[str] | None,
    compact: bool,
) -> StructuredOutput | None:
    """None where none is given; raises BadParameter for two, or for a file that cannot be read."""
    given = (json_schema is not None, grammar is not None, json_object, regex is not None, bool(choice))
    if sum(given) > 1:
        raise typer.BadParameter("give one of --json-schema, --json-object, --regex, --grammar and --choice")
    if compact and json_schema is None and not json_object:
        raise typer.BadParameter("--compact goes with --json-schema or --json-object")
    if not any(given):
        return None
    return StructuredOutput(
        json_schema=_text(json_schema),
        json_object=json_object,
        regex=regex,
        grammar=_text(grammar),
        choice=choice or (),
        disable_any_whitespace=compact,
    )


def _text(path: Path | None) -> str | None:
    if path is None:
        return None
    if str(path) == "-":
        return sys.stdin.read()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{path} cannot be read: {error}") from error
