"""How loads are sent: so many at a time, or each at its moment."""

import asyncio
import re
import time
from dataclasses import replace
from typing import Any

import pytest

from lorikeet_bench.load.arrivals import ClosedLoop, OpenLoop, Pace
from lorikeet_bench.load.driver import run_load
from lorikeet_bench.load.judge import Expectation, TokenJudge, tokens_digest
from lorikeet_bench.load.lengths import LengthRange
from lorikeet_bench.load.plan import LoadPlan
from lorikeet_bench.load.record import OK, RequestRecord

SHORT: dict[str, Any] = {"input_tokens": LengthRange(4, 4), "output_tokens": LengthRange(3, 3)}


class CountingTarget:
    """Answers at once, a token a turn of the loop, and counts what is open."""

    def __init__(self) -> None:
        self.open = self.open_at_most = 0
        self.seen: list[int] = []
        self.settled = 0

    async def send(self, record: RequestRecord) -> None:
        """See Target."""
        self.open += 1
        self.open_at_most = max(self.open_at_most, self.open)
        self.seen.append(record.request.index)
        for _ in range(record.request.output_tokens):
            await asyncio.sleep(0)
            record.came_s.append(time.perf_counter())
            record.counts.append(1)
            record.token_ids.append(7)
        record.status = OK
        self.open -= 1

    def settle(self, record: RequestRecord) -> None:
        """See Target."""
        self.settled += 1


async def test_a_closed_loop_keeps_so_many_open() -> None:
    """Never more, all of them once, in order; warm-up is apart, and everything is settled."""
    target = CountingTarget()
    plan = LoadPlan(ClosedLoop(5), 0, num_requests=23, num_warm_up=5, **SHORT)
    outcome = await run_load(target, plan)
    assert target.open_at_most == 5
    assert [record.request.index for record in outcome.records] == list(range(23))
    assert len(outcome.warm_up) == 5
    assert target.settled == 28
    assert all(record.sent_s <= record.came_s[0] <= record.end_s for record in outcome.records)
    assert outcome.meter.cost(1.0, 0.0).cpu_cores > 0


async def test_an_open_loop_waits_for_nobody() -> None:
    """All of a burst are open at once, and none is sent before its moment."""
    target = CountingTarget()
    plan = LoadPlan(OpenLoop(200.0, Pace.BURST, burst=10), 0, num_requests=20, **SHORT)
    outcome = await run_load(target, plan)
    assert target.open_at_most >= 10
    for record in outcome.records:
        assert record.request.arrival_s is not None
        assert record.sent_s >= outcome.begun_s + record.request.arrival_s


async def test_a_duration_ends_the_sending() -> None:
    """Nothing is begun after it."""
    plan = LoadPlan(ClosedLoop(2), 0, duration_s=0.05, **SHORT)
    outcome = await run_load(CountingTarget(), plan)
    assert outcome.until_s == outcome.begun_s + 0.05
    assert outcome.records
    slowest_turn_s = max(record.end_s - record.sent_s for record in outcome.records) + 1.0
    assert all(record.sent_s <= outcome.until_s + slowest_turn_s for record in outcome.records)


def answered(adapter: int | None, tokens: list[int], by: str | None = None) -> RequestRecord:
    """A record whose prompt ends in token 50 and that asked for three tokens."""
    plan = LoadPlan(ClosedLoop(1), 4, num_requests=1, **SHORT)
    request = replace(next(iter(plan.requests())), adapter=adapter)
    return RequestRecord(
        request,
        counts=[1] * len(tokens),
        token_ids=tokens,
        prompt_token_ids=(40, 50),
        status=OK,
        answered_by=by,
    )


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (answered(1, [2, 2, 2], "d1"), ""),
        (answered(None, [50, 50, 50], ""), ""),
        (answered(1, [2, 2, 3], "d1"), r"token 2 was due, tokens \[3\] came"),
        (answered(None, [2, 2, 2], ""), "token 50 was due"),
        (answered(1, [2, 2], "d1"), "2 tokens came, 3 were asked for"),
        (answered(1, [2, 2, 2], "d2"), "revision d2 answered, d1 was asked"),
        (answered(1, [2, 2, 2], ""), "revision base answered, d1 was asked"),
        (answered(None, [50, 50, 50], "d0"), "revision d0 answered, base was asked"),
    ],
)
def test_answers_of_others_are_found(record: RequestRecord, words: str) -> None:
    """By token, by revision and by count."""
    judge = TokenJudge(Expectation(("d0", "d1", "d2", "d3"), (1, 2, 3, 4)))
    judge.look([record])
    assert judge.wrong == bool(words)
    if words:
        assert re.search(words, judge.shown[0])


def test_equal_answers_have_equal_digests() -> None:
    """One token more or less makes another."""
    assert tokens_digest([answered(1, [2, 2])]) == tokens_digest([answered(2, [2, 2])])
    assert tokens_digest([answered(1, [2, 2])]) != tokens_digest([answered(1, [2, 3])])
    assert tokens_digest([answered(1, [22])]) != tokens_digest([answered(1, [2, 2])])
