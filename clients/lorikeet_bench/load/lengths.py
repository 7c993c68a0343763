"""How long prompts and answers are: fixed, uniform over a range, or read from a file."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np


class LoadError(ValueError):
    """A load that cannot be made as asked; the message names field, value and what to do."""


@dataclass(frozen=True, slots=True)
class LengthRange:
    """Tokens drawn uniformly from [low, high], both included; equal ends are a fixed length."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str, what: str) -> "LengthRange":
        """Read "1600" or "100:3000"; `what` names the option in the error."""
        low, _, high = text.partition(":")
        if not all(part.isascii() and part.isdecimal() for part in (low, high or low)):
            raise LoadError(
                f"{what} {text!r} is neither a number of tokens nor LOW:HIGH, e.g. 1600 or 100:3000"
            )
        found = cls(int(low), int(high or low))
        if not 1 <= found.low <= found.high:
            raise LoadError(f"{what} {text!r} must be at least 1, and LOW not above HIGH")
        return found

    def draw(self, rng: np.random.Generator) -> int:
        """One length."""
        return int(rng.integers(self.low, self.high + 1))


class RecordedRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a file of requests. `adapter` counts from 0; None lets the mix choose, -1 is the base.

    `arrival_s` counts from the beginning of the load; all lines have it or none.
    """

    input_tokens: int
    output_tokens: int
    adapter: int | None = None
    arrival_s: float | None = None


def read_requests(path: Path) -> tuple[RecordedRequest, ...]:
    """Read a JSONL file of requests, in its order; by arrival where lines have one.

    Raises:
        LoadError: a line is not as `RecordedRequest` says; the message names it.
    """
    decoder = msgspec.json.Decoder(RecordedRequest)
    found: list[RecordedRequest] = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise LoadError(f"lengths {path} cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            request = decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise LoadError(f"lengths {path} line {number}: {error}") from error
        if min(request.input_tokens, request.output_tokens) < 1:
            raise LoadError(
                f"lengths {path} line {number}: input_tokens and output_tokens must be at least 1"
            )
        found.append(request)
    if not found:
        raise LoadError(f"lengths {path} holds no request")
    return _in_order(found, path)


def _in_order(requests: Iterable[RecordedRequest], path: Path) -> tuple[RecordedRequest, ...]:
    requests = tuple(requests)
    timed = [(request.arrival_s, request) for request in requests if request.arrival_s is not None]
    if timed and len(timed) != len(requests):
        raise LoadError(
            f"lengths {path}: arrival_s stands in {len(timed)} of {len(requests)} lines; all or none"
        )
    if any(arrival_s < 0 for arrival_s, _ in timed):
        raise LoadError(
            f"lengths {path}: arrival_s counts from the beginning of the load, and is never negative"
        )
    if timed:
        return tuple(request for _, request in sorted(timed, key=lambda pair: pair[0]))
    return requests
