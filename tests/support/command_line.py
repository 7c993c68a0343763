"""What a run of the `lorikeet` command left behind."""

import json
from collections.abc import Callable
from typing import Any

from typer.testing import Result

Run = Callable[..., Result]


def documents(result: Result) -> list[Any]:
    """Stdout as JSON, a document a line; fails on anything else there."""
    assert result.stdout, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]
