"""Were the answers right? As many tokens as asked, by the revision asked, and on a rig, token by token."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lorikeet_bench.load.record import RequestRecord

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Expectation:
    """What must come back.

    `digests` are the adapters' revisions. `forced_tokens`, on a rig, is the one token that each adapter emits
    at every step; there the base model repeats the prompt's last token.
    """

    digests: Sequence[str] = ()
    forced_tokens: Sequence[int] | None = None


class TokenJudge:
    """Counts what is wrong, and keeps the first few with their facts."""

    def __init__(self, expectation: Expectation) -> None:
        self._expected = expectation
        self.wrong = 0
        self.checked_tokens = 0
        self.shown: list[str] = []

    def look(self, records: Iterable[RequestRecord]) -> None:
        """Judge requests that ended as asked; what failed is counted elsewhere, its tokens judged too."""
        for record in records:
            if fault := self._fault(record):
                self.wrong += 1
                if len(self.shown) < _SHOWN:
                    asked = record.request.adapter
                    who = "the base model" if asked is None else f"adapter {asked}"
                    self.shown.append(f"request {record.request.index} to {who}: {fault}")

    def _fault(self, record: RequestRecord) -> str:
        asked = record.request.adapter
        if record.is_ok and record.output_tokens != record.request.output_tokens:
            return f"{record.output_tokens} tokens came, {record.request.output_tokens} were asked for"
        if record.answered_by is not None and self._expected.digests:
            wanted = "" if asked is None else self._expected.digests[asked]
            if record.answered_by != wanted:
                return f"revision {record.answered_by or 'base'} answered, {wanted or 'base'} was asked"
        if self._expected.forced_tokens is None or not record.token_ids:
            return ""
        self.checked_tokens += len(record.token_ids)
        token = record.prompt_token_ids[-1] if asked is None else self._expected.forced_tokens[asked]
        strangers = sorted(set(record.token_ids) - {token})
        return f"token {token} was due, tokens {strangers} came as well" if strangers else ""


def tokens_digest(records: Iterable[RequestRecord]) -> str:
    """Sha256 over all answers' tokens in the requests' order: equal for equal answers, bit for bit."""
    found = hashlib.sha256()
    for record in records:
        found.update(b"%d:" % record.request.index)
        found.update(b",".join(b"%d" % token for token in record.token_ids))
    return found.hexdigest()
