"""The soak's judge must catch each kind of wrong, and must not cry wolf."""

from dataclasses import replace
from pathlib import Path

import pytest

from lorikeet_bench.soak.contents import Content, ContentKind, ContentPool
from lorikeet_bench.soak.exchange import Answer, Asked, Ending, FaultKind
from lorikeet_bench.soak.journal import Journal
from lorikeet_bench.soak.judge import Judge
from lorikeet_bench.soak.plan import base_answer
from lorikeet_bench.soak.roster import revision_reference
from lorikeet_client import AdapterTier, AdapterUsed, Finish, FinishReason, Timings, Usage

A, B, OTHER = "a" * 64, "b" * 64, "c" * 64
TOKENS = {A: 10, B: 20, OTHER: 30}
NAME = "demo/x"
# A was pushed at 1 and acknowledged at 2; B replaced it, sent at 5 and acknowledged at 6.
BEFORE, DURING, AFTER = 3.0, 5.5, 7.0


@pytest.fixture
def journal() -> Journal:
    """The history above, revisions included; `demo/gone` was deleted at 2."""
    journal = Journal()
    for reference, digest, begin_s, settled_s in (
        (NAME, A, 1.0, 2.0),
        (revision_reference(NAME, A), A, 1.0, 2.0),
        (NAME, B, 5.0, 6.0),
        (revision_reference(NAME, B), B, 5.0, 6.0),
        ("demo/gone", A, 0.0, 0.5),
        ("demo/gone", None, 1.0, 2.0),
    ):
        journal.begin(reference, digest, begin_s).settled_s = settled_s
    return journal


@pytest.fixture
def judge(journal: Journal) -> Judge:
    """Over three contents."""
    contents = [Content(Path(), ContentKind.EXPERTS, token, digest) for digest, token in TOKENS.items()]
    return Judge(journal, ContentPool(contents), revision_reference)


def asked(reference: str | None = NAME, **changes: object) -> Asked:
    """Four tokens of the adapter, read to the end."""
    request = Asked("r", reference, (3, 5), 4, Ending.RUN)
    return replace(request, **changes)  # type: ignore[arg-type]


def finish(
    digest: str | None = A, reason: FinishReason = FinishReason.LENGTH, count: int = 4, prompt: int = 2
) -> Finish:
    """The last piece."""
    used = AdapterUsed("", digest, AdapterTier.ACTIVE) if digest else None
    return Finish(reason, None, None, Usage(prompt, 0, count), Timings(0, 0, 0, 0), used)


def answer(
    tokens: list[int] | None = None, sent_s: float = BEFORE, took_s: float = 0.1, **changes: object
) -> Answer:
    """An answer that began and ended soon after it was sent."""
    seen = Answer(
        sent_s=sent_s, first_s=sent_s + took_s / 2, ended_s=sent_s + took_s, tokens=tokens or [], **changes
    )  # type: ignore[arg-type]
    if not seen.tokens:
        seen.first_s = None
    return seen


def kinds(judge: Judge, request: Asked, seen: Answer) -> list[FaultKind]:
    """What the judge finds."""
    verdict = judge.verdict(request, seen)
    for fault in verdict.faults:
        assert fault.facts["request_id"] == "r"
        assert fault.facts["num_tokens"] == len(seen.tokens)
    return [fault.kind for fault in verdict.faults]


RIGHT = {
    "its own token to the end": (asked(), answer([10] * 4, finish=finish())),
    "the newer after the replacement": (asked(), answer([20] * 4, AFTER, finish=finish(B))),
    "the base's walk": (asked(None), answer(list(base_answer(5, 4)), finish=finish(None))),
    "nothing under a deleted name": (asked("demo/gone"), answer(sent_s=3.0, code="NOT_FOUND")),
    "nothing under an unknown name": (asked("demo/never"), answer(code="NOT_FOUND")),
    "cancelled while it ran": (asked(ending=Ending.CANCEL), answer([10, 10], left_s=3.05)),
    "cancelled before the first token": (asked(ending=Ending.CANCEL), answer(left_s=3.05)),
    "cut off": (asked(ending=Ending.DISCONNECT), answer([10], left_s=3.05, code="UNAVAILABLE")),
    "aborted": (
        asked(ending=Ending.ABORT),
        answer([10], left_s=3.01, finish=finish(reason=FinishReason.ABORTED, count=1)),
    ),
    "aborted too late": (asked(ending=Ending.ABORT), answer([10] * 4, left_s=3.09, finish=finish())),
    "out of time in the middle": (
        asked(ending=Ending.DEADLINE, deadline_s=0.1),
        answer(
            [10],
            finish=finish(reason=FinishReason.DEADLINE, count=1),
            code="DEADLINE_EXCEEDED",
        ),
    ),
    "out of time at once": (
        asked(ending=Ending.DEADLINE, deadline_s=0.001),
        answer(took_s=0.002, code="DEADLINE_EXCEEDED"),
    ),
    "stopped at its stop token": (
        asked(stop_token=10),
        answer([10], finish=finish(reason=FinishReason.STOP_TOKEN, count=1)),
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_answers_pass(judge: Judge, name: str) -> None:
    """Each end that a request may rightly have."""
    assert kinds(judge, *RIGHT[name]) == []


@pytest.mark.parametrize("digest", [A, B])
def test_while_a_replacement_is_under_way_either_may_answer(judge: Judge, digest: str) -> None:
    """But only one, and wholly."""
    token = TOKENS[digest]
    assert kinds(judge, asked(), answer([token] * 4, DURING, finish=finish(digest))) == []
    assert kinds(judge, asked(ending=Ending.CANCEL), answer([token], DURING, left_s=5.6)) == []
    mixed = answer([10, 20], DURING, left_s=5.6)
    assert kinds(judge, asked(ending=Ending.CANCEL), mixed) == [FaultKind.WRONG_TOKEN]


WRONG = {
    "another adapter's token": (asked(), answer([30] * 4, finish=finish()), FaultKind.WRONG_TOKEN),
    "one token of another": (asked(), answer([10, 10, 20, 10], finish=finish()), FaultKind.WRONG_TOKEN),
    "another's token before a cancel": (
        asked(ending=Ending.CANCEL),
        answer([30], left_s=3.05),
        FaultKind.WRONG_TOKEN,
    ),
    "the newer one's token under the older one's digest": (
        asked(),
        answer([20] * 4, finish=finish()),
        FaultKind.WRONG_TOKEN,
    ),
    "the older revision after an acknowledged replacement": (
        asked(),
        answer([10] * 4, AFTER, finish=finish(A)),
        FaultKind.STALE_REVISION,
    ),
    "the older revision's token, cancelled, after the replacement": (
        asked(ending=Ending.CANCEL),
        answer([10], AFTER, left_s=7.05),
        FaultKind.WRONG_TOKEN,
    ),
    "the newer revision before it was pushed": (
        asked(),
        answer([20] * 4, BEFORE, finish=finish(B)),
        FaultKind.STALE_REVISION,
    ),
    "a digest that never belonged to the name": (
        asked(),
        answer([30] * 4, finish=finish(OTHER)),
        FaultKind.WRONG_REVISION,
    ),
    "a digest that nobody uploaded": (
        asked(),
        answer([10] * 4, finish=finish("d" * 64)),
        FaultKind.WRONG_REVISION,
    ),
    "the base model instead of nothing": (
        asked("demo/gone"),
        answer(list(base_answer(5, 4)), 3.0, finish=finish(None)),
        FaultKind.NOT_NOTHING,
    ),
    "the deleted adapter": (
        asked("demo/gone"),
        answer([10] * 4, 3.0, finish=finish(A)),
        FaultKind.NOT_NOTHING,
    ),
    "the base model instead of the adapter": (
        asked(),
        answer(list(base_answer(5, 4)), finish=finish(None)),
        FaultKind.NOT_NOTHING,
    ),
    "an adapter instead of the base model": (
        asked(None),
        answer([10] * 4, finish=finish(A)),
        FaultKind.WRONG_REVISION,
    ),
    "the base's walk with a token left out": (
        asked(None),
        answer([6, 7, 9, 10], finish=finish(None)),
        FaultKind.WRONG_TOKEN,
    ),
    "going on after the stop token": (
        asked(stop_token=10),
        answer([10] * 4, finish=finish()),
        FaultKind.WRONG_TOKEN,
    ),
    "an end without finish or status": (asked(), answer([10] * 4), FaultKind.LOST_ANSWER),
    "a gap in the stream": (asked(), answer([10], broken="piece 3 came"), FaultKind.LOST_ANSWER),
    "no end at all": (asked(), answer([10], is_hung=True), FaultKind.LOST_ANSWER),
    "a token too few": (asked(), answer([10] * 3, finish=finish(count=3)), FaultKind.LOST_ANSWER),
    "tokens that were made but did not come": (
        asked(max_tokens=3),
        answer([10] * 3, finish=finish(count=4)),
        FaultKind.LOST_ANSWER,
    ),
    "an abort that nobody asked for": (
        asked(),
        answer([10], finish=finish(reason=FinishReason.ABORTED, count=1)),
        FaultKind.LOST_ANSWER,
    ),
    "a stop that nobody asked for": (
        asked(),
        answer([10], finish=finish(reason=FinishReason.STOP_TOKEN, count=1)),
        FaultKind.LOST_ANSWER,
    ),
    "an internal error": (asked(), answer(code="INTERNAL"), FaultKind.LOST_ANSWER),
    "a connection lost without our doing": (asked(), answer([10], code="UNAVAILABLE"), FaultKind.LOST_ANSWER),
    "a deadline before its time": (
        asked(ending=Ending.DEADLINE, deadline_s=2.0),
        answer(code="DEADLINE_EXCEEDED"),
        FaultKind.LOST_ANSWER,
    ),
    "a deadline that was not set": (asked(), answer(code="DEADLINE_EXCEEDED"), FaultKind.LOST_ANSWER),
    "an acknowledged adapter that is not found": (asked(), answer(code="NOT_FOUND"), FaultKind.LOST_WRITE),
    "a refusal that nothing explains": (asked(), answer(code="FAILED_PRECONDITION"), FaultKind.LOST_ANSWER),
}


@pytest.mark.parametrize("name", WRONG)
def test_each_kind_of_wrong_is_caught(judge: Judge, name: str) -> None:
    """One fault of the right kind at least, and wrong is told from lost."""
    request, seen, kind = WRONG[name]
    assert kind in kinds(judge, request, seen)
    assert kind.is_wrong == (kind not in {FaultKind.LOST_ANSWER, FaultKind.LOST_WRITE})


def test_a_revision_deleted_under_a_waiting_request_may_end_it(judge: Judge, journal: Journal) -> None:
    """Only if the deletion was under way before the request ended."""
    refused = answer(sent_s=AFTER, took_s=1.0, code="FAILED_PRECONDITION")
    assert kinds(judge, asked(), refused) == [FaultKind.LOST_ANSWER]
    journal.begin(revision_reference(NAME, B), None, 7.5).settled_s = 9.0
    assert kinds(judge, asked(), refused) == []


@pytest.mark.parametrize(
    ("request_", "seen", "status"),
    [
        (asked(), answer([10] * 4, finish=finish()), "finished: length"),
        (asked(ending=Ending.CANCEL), answer([10], left_s=3.05), "left: cancel"),
        (asked(), answer(code="NOT_FOUND"), "NOT_FOUND"),
        (asked(), answer(is_hung=True), "hung"),
        (asked(), answer(broken="gap"), "broken"),
        (asked(), answer(), "no status"),
    ],
)
def test_the_table_has_one_word_for_each_end(
    judge: Judge, request_: Asked, seen: Answer, status: str
) -> None:
    """Few words, whatever was wrong."""
    assert judge.verdict(request_, seen).status == status
