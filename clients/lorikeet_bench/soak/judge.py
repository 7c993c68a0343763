"""Judges each answer token by token against the journal. Pure."""

from collections.abc import Callable

from lorikeet_bench.soak.contents import ContentPool
from lorikeet_bench.soak.exchange import Answer, Asked, Ending, Fault, FaultKind, Verdict
from lorikeet_bench.soak.journal import Journal
from lorikeet_bench.soak.plan import base_answer
from lorikeet_client import Finish, FinishReason

# Clocks and timers of two processes: how much earlier than asked a deadline may be noticed.
_DEADLINE_SLACK_S = 0.05
# Statuses that a client's own leaving may bring.
_AFTER_LEAVING = {"CANCELLED", "UNAVAILABLE"}
_SHOWN_TOKENS = 64


class Judge:
    """Knows the journal and what each revision must say.

    Args:
        revision_reference: the reference of one revision of the adapter that another reference names.
    """

    def __init__(
        self, journal: Journal, pool: ContentPool, revision_reference: Callable[[str, str], str]
    ) -> None:
        self._journal = journal
        self._pool = pool
        self._revision_reference = revision_reference

    def verdict(self, asked: Asked, answer: Answer) -> Verdict:
        """Judge one answer."""
        possible = self._possible(asked, answer)
        faults = [*self._token_faults(asked, answer, possible), *self._ending_faults(asked, answer, possible)]
        if answer.finish is not None:
            faults += self._finish_faults(asked, answer, answer.finish, possible)
        return Verdict(
            _status(asked, answer),
            tuple(self._fault(kind, message, asked, answer, possible) for kind, message in faults),
        )

    def _possible(self, asked: Asked, answer: Answer) -> frozenset[str | None]:
        """The digests that the request may have meant: names are resolved before the first piece."""
        if asked.reference is None:
            return frozenset()
        until_s = answer.ended_s if answer.first_s is None else answer.first_s
        return self._journal.possible(asked.reference, answer.sent_s, until_s)

    def _token_faults(
        self, asked: Asked, answer: Answer, possible: frozenset[str | None]
    ) -> list[tuple[FaultKind, str]]:
        """Every token, whatever the end was."""
        if not answer.tokens:
            return []
        seen = tuple(answer.tokens)
        if asked.reference is None:
            want = base_answer(asked.prompt[-1], len(seen))
            return [] if seen == want else [(FaultKind.WRONG_TOKEN, f"the base walks {_shown(want)}")]
        if possible <= {None}:
            return [(FaultKind.NOT_NOTHING, f"{asked.reference} named nothing, but tokens came")]
        digests = possible
        if answer.finish is not None and answer.finish.adapter is not None:
            digests = frozenset({answer.finish.adapter.digest})
        allowed = {self._pool.token(digest) for digest in digests if digest} - {None}
        if len(set(seen)) == 1 and seen[0] in allowed:
            return []
        return [(FaultKind.WRONG_TOKEN, f"only one of {sorted(t for t in allowed if t)} may come, alone")]

    def _finish_faults(
        self, asked: Asked, answer: Answer, finish: Finish, possible: frozenset[str | None]
    ) -> list[tuple[FaultKind, str]]:
        """The last piece: who answered, how much, and why it ended."""
        found = self._adapter_faults(asked, finish, possible)
        count = len(answer.tokens)
        if finish.usage.output_tokens != count:
            found.append(
                (FaultKind.LOST_ANSWER, f"{finish.usage.output_tokens} tokens were made, {count} came")
            )
        if finish.usage.prompt_tokens != len(asked.prompt):
            found.append((FaultKind.WRONG_TOKEN, f"usage says {finish.usage.prompt_tokens} prompt tokens"))
        if asked.stop_token in answer.tokens[:-1]:
            found.append((FaultKind.WRONG_TOKEN, f"it went on after its stop token {asked.stop_token}"))
        match finish.reason:
            case FinishReason.LENGTH:
                if count != asked.max_tokens:
                    found.append((FaultKind.LOST_ANSWER, f"{count} of {asked.max_tokens} tokens came"))
            case FinishReason.STOP_TOKEN:
                if asked.stop_token is None or answer.tokens[-1:] != [asked.stop_token]:
                    found.append((FaultKind.LOST_ANSWER, "it stopped at a token that is no stop token"))
            case FinishReason.ABORTED:
                if asked.ending is not Ending.ABORT or answer.left_s is None:
                    found.append((FaultKind.LOST_ANSWER, "it was aborted, but not by us"))
            case FinishReason.DEADLINE:
                pass  # the status that follows is judged
            case _:
                found.append(
                    (FaultKind.LOST_ANSWER, f"it ended for {finish.reason}, which was not asked for")
                )
        return found

    def _adapter_faults(
        self, asked: Asked, finish: Finish, possible: frozenset[str | None]
    ) -> list[tuple[FaultKind, str]]:
        used = finish.adapter.digest if finish.adapter else None
        if asked.reference is None:
            return [(FaultKind.WRONG_REVISION, f"{used} answered for the base model")] if used else []
        if used is None:
            return [(FaultKind.NOT_NOTHING, "the base model answered for an adapter")]
        if used in possible:
            return []
        if used in self._journal.ever(asked.reference):
            return [(FaultKind.STALE_REVISION, f"{used} answered, which the name did not hold then")]
        return [(FaultKind.WRONG_REVISION, f"{used} answered, which never belonged to the name")]

    def _ending_faults(
        self, asked: Asked, answer: Answer, possible: frozenset[str | None]
    ) -> list[tuple[FaultKind, str]]:
        """How the stream ended: each end needs a reason."""
        if answer.is_hung:
            return [(FaultKind.LOST_ANSWER, "it did not end")]
        if answer.broken and answer.left_s is None:
            return [(FaultKind.LOST_ANSWER, answer.broken)]
        if not answer.code:
            if answer.finish is None and answer.left_s is None and not answer.broken:
                return [(FaultKind.LOST_ANSWER, "it ended without its finish and without a status")]
            return []
        if self._is_due(asked, answer, possible):
            return []
        if answer.code == "NOT_FOUND" and asked.reference is not None:
            return [(FaultKind.LOST_WRITE, f"{asked.reference} was registered, but was not found")]
        return [(FaultKind.LOST_ANSWER, f"it ended with {answer.code}, for which there was no reason")]

    def _is_due(self, asked: Asked, answer: Answer, possible: frozenset[str | None]) -> bool:
        """Whether an error was the right end."""
        took_s = answer.ended_s - answer.sent_s
        if answer.left_s is not None and answer.code in _AFTER_LEAVING:
            return True
        if answer.code == "DEADLINE_EXCEEDED":
            return asked.deadline_s is not None and took_s >= asked.deadline_s - _DEADLINE_SLACK_S
        if asked.reference is None:
            return False
        if answer.code == "NOT_FOUND" and None in possible:
            return not answer.tokens
        # Deleted while the request waited for its weights or was answered: a clear end is all it can get.
        return answer.code in {"NOT_FOUND", "FAILED_PRECONDITION"} and any(
            None
            in self._journal.possible(
                self._revision_reference(asked.reference, digest), answer.sent_s, answer.ended_s
            )
            for digest in possible
            if digest
        )

    def _fault(
        self, kind: FaultKind, message: str, asked: Asked, answer: Answer, possible: frozenset[str | None]
    ) -> Fault:
        reference = asked.reference
        facts: dict[str, object] = {
            "request_id": asked.request_id,
            "adapter": reference or "the base model",
            "prompt": list(asked.prompt),
            "max_tokens": asked.max_tokens,
            "client": asked.ending.value,
            "after_tokens": asked.after_tokens,
            "deadline_s": asked.deadline_s,
            "sent_s": round(answer.sent_s, 3),
            "first_s": answer.first_s and round(answer.first_s, 3),
            "ended_s": round(answer.ended_s, 3),
            "left_s": answer.left_s and round(answer.left_s, 3),
            "tokens": answer.tokens[:_SHOWN_TOKENS],
            "num_tokens": len(answer.tokens),
            "finish": str(answer.finish) if answer.finish else None,
            "status": f"{answer.code} {answer.message}".strip(),
            "possible": sorted(f"{d[:12]}={self._pool.token(d)}" if d else "nothing" for d in possible),
            "history": [str(write) for write in self._journal.history(reference or "")[-8:]],
        }
        return Fault(kind, message, answer.ended_s, facts)


def _status(asked: Asked, answer: Answer) -> str:
    """One of few words for the table."""
    if answer.is_hung:
        return "hung"
    if answer.finish is not None and answer.finish.reason is not FinishReason.DEADLINE:
        return f"finished: {answer.finish.reason}"
    if answer.left_s is not None:
        return f"left: {asked.ending}"
    if answer.broken:
        return "broken"
    return answer.code or "no status"


def _shown(tokens: tuple[int, ...]) -> str:
    return str(list(tokens[:_SHOWN_TOKENS])) + ("..." if len(tokens) > _SHOWN_TOKENS else "")
