"""What a command prints: tables for people, or one JSON document a line on stdout and nothing else there."""

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any

import msgspec
import typer
from rich.console import Console

from lorikeet_admin.exits import ExitCode, advice, exit_code
from lorikeet_client import CallError, LorikeetError

# Wider than any table; and both sizes must be given, or rich takes 80 columns for a terminal called "dumb".
_PIPED_WIDTH, _PIPED_HEIGHT = 10_000, 25


class Output:
    """The one writer of a command; `as_json` decides the form."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self.console = _console(stderr=False)
        self.notes = _console(stderr=True)

    def result(self, value: Any, show: Callable[[Console], None]) -> None:
        """Print the command's result: `value` as JSON, or what `show` draws."""
        if self.as_json:
            self.json_line(value)
        else:
            show(self.console)

    def json_line(self, value: Any) -> None:
        """One JSON document on a line: dataclasses as objects, times in RFC 3339, bytes in base64."""
        sys.stdout.write(msgspec.json.encode(value, enc_hook=_encode_path).decode() + "\n")
        sys.stdout.flush()

    def note(self, text: str) -> None:
        """Something for a person's eyes beside the result, on stderr."""
        self.notes.print(text)

    def error(self, error: LorikeetError) -> None:
        """A failure: a line with advice on stderr, and with --json an object on stdout too."""
        message = str(error) or type(error).__name__
        hint = advice(error)
        if self.as_json:
            fields: dict[str, Any] = {"message": message, "advice": hint, "exit_code": int(exit_code(error))}
            if isinstance(error, CallError):
                fields |= {"code": error.code, "reason": error.reason, "metadata": error.metadata}
            self.json_line({"error": fields})
        self.note(f"error: {message}")
        if hint:
            self.note(f"hint: {hint}")

    def fail(self, message: str, code: ExitCode = ExitCode.FAILED) -> typer.Exit:
        """Report a failure that is this command's own; raise what it returns."""
        if self.as_json:
            self.json_line({"error": {"message": message, "exit_code": int(code)}})
        self.note(f"error: {message}")
        return typer.Exit(code)

    @contextmanager
    def reported_errors(self) -> Generator[None]:
        """End the command with the right exit code on any error of the client."""
        try:
            yield
        except LorikeetError as error:
            self.error(error)
            raise typer.Exit(exit_code(error)) from error


def _console(*, stderr: bool) -> Console:
    # Markup off: names and messages come from elsewhere and may hold square brackets. Into a file or a pipe
    # tables take the width they need, and lines are not broken.
    piped = not (sys.stderr if stderr else sys.stdout).isatty()
    width, height = (_PIPED_WIDTH, _PIPED_HEIGHT) if piped else (None, None)
    return Console(stderr=stderr, markup=False, highlight=False, soft_wrap=piped, width=width, height=height)


def _encode_path(value: Any) -> str:
    if isinstance(value, PurePath):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def size(num_bytes: int) -> str:
    """A byte count as people read it."""
    value, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def short_digest(digest: str) -> str:
    """Enough of a digest to tell it from others."""
    return digest[:12]
