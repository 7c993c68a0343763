"""One worker of a campaign: runs seeds and tells its parent of each, a JSON line before and one after."""

import json
import resource
import sys
import traceback
from pathlib import Path
from typing import Any

import structlog

from tests.support.fuzz.world import MAX_GROWTH_BYTES, Outcome, run_seeds


class _Reporter:
    def begin(self, seed: int) -> None:
        _tell({"begin": seed})

    def ended(self, seed: int, outcome: Outcome) -> None:
        _tell({"ended": seed, "kind": outcome.kind, "compared": outcome.is_compared, "cpu_s": outcome.cpu_s,
               "growth": outcome.growth_bytes})  # fmt: skip

    def failed(self, seed: int, error: Exception) -> None:
        is_promise = isinstance(error, AssertionError)
        text = str(error) if is_promise else "".join(traceback.format_exception(error, limit=-6))
        _tell({"failed": seed, "why": f"{type(error).__name__}: {text}"})


def _tell(document: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


def _drop(*_: object) -> Any:
    raise structlog.DropEvent


def _limit_memory() -> None:
    """An allocation bomb ends this process instead of the machine."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + 4 * MAX_GROWTH_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    structlog.configure(processors=[_drop])
    _limit_memory()
    run_seeds(Path(sys.argv[1]), range(int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])), _Reporter())
