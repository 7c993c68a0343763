"""Figures of timelines written by hand: each definition by numbers that can be checked on paper."""

from dataclasses import replace

import numpy as np
import pytest

from lorikeet_bench.load.arrivals import ClosedLoop, OpenLoop
from lorikeet_bench.load.driver import LoadOutcome
from lorikeet_bench.load.generator_cost import CostMeter, GeneratorCost
from lorikeet_bench.load.metrics import (
    Distribution,
    burst_share,
    decode_rate,
    inter_token_ms,
    summarize,
    worst_ttft_over_bucket,
)
from lorikeet_bench.load.plan import LoadPlan, PlannedRequest
from lorikeet_bench.load.record import OK, RequestRecord
from lorikeet_bench.load.result import BenchResult, PointResult, ServerFacts, median_of
from lorikeet_bench.load.routing import RoutedStep, RoutingSummary, expected_distinct, summarize_routing
from lorikeet_bench.machine import describe_machine

PLAN = LoadPlan(ClosedLoop(2), 0, num_requests=2)


def record(
    came: list[tuple[float, int]], *, sent_s: float = 0.0, status: str = OK, input_tokens: int = 100
) -> RequestRecord:
    """A request whose pieces came at these moments with so many tokens."""
    request = PlannedRequest(0, input_tokens, sum(n for _, n in came), None, None, (1, 0))
    return RequestRecord(
        request,
        sent_s=sent_s,
        end_s=came[-1][0] if came else sent_s,
        came_s=[moment for moment, _ in came],
        counts=[count for _, count in came],
        prompt_tokens=input_tokens,
        status=status,
    )


def outcome(*records: RequestRecord, plan: LoadPlan = PLAN, until_s: float | None = None) -> LoadOutcome:
    """A load that began at 0."""
    return LoadOutcome(plan, tuple(records), (), 0.0, until_s, CostMeter())


def test_a_closed_loop_of_two() -> None:
    """TTFT, rates and totals of two requests."""
    first = record([(1.0, 1), (1.5, 1), (2.0, 1)], sent_s=0.5)
    second = record([(2.0, 1), (4.0, 1), (5.0, 1), (5.5, 1)], sent_s=1.0)
    found = summarize(outcome(first, second))
    assert found.ttft_ms.mean == pytest.approx((500 + 1000) / 2)
    assert found.end_to_end_ms.max == pytest.approx(4500)
    assert found.decode_tokens_per_s.mean == pytest.approx((2 / 1.0 + 3 / 3.5) / 2)
    assert found.overall_tokens_per_s.mean == pytest.approx((3 / 1.5 + 4 / 4.5) / 2)
    # From the first call at 0.5 to the last token at 5.5.
    assert found.duration_s == pytest.approx(5.0)
    assert found.tokens_per_s == pytest.approx(7 / 5.0)
    assert found.requests_per_s == pytest.approx(2 / 5.0)
    assert (found.requests, found.output_tokens, found.input_tokens) == (2, 7, 200)
    assert found.failures == {}


def test_a_piece_of_several_tokens_shares_its_gap() -> None:
    """Three tokens after 0.6 s are three gaps of 0.2 s; the first piece's tokens are no gaps."""
    several = record([(1.0, 2), (1.6, 3), (1.7, 1)])
    assert inter_token_ms([several]) == pytest.approx([200, 200, 200, 100])
    assert decode_rate(several) == pytest.approx(4 / 0.7)
    assert decode_rate(record([(1.0, 5)])) is None


def test_tokens_that_come_at_once_are_bursts() -> None:
    """Several in a piece, or pieces with no step's time between them."""
    steady = record([(0.01 * i, 1) for i in range(1, 12)])
    assert burst_share([steady], 10.0) == 0
    late = record([(1.0, 1), *((1.2 + 0.00005 * i, 1) for i in range(10))])
    together = record([(1.0, 1), (1.04, 4), (1.05, 1)])
    assert burst_share([late], 20.0) == pytest.approx(9 / 10)
    assert burst_share([together], 10.0) == pytest.approx(4 / 5)
    # A tiny model may be as fast as that, evenly.
    assert burst_share([record([(0.0002 * i, 1) for i in range(1, 12)])], 0.2) == 0
    found = summarize(outcome(late))
    assert found.inter_token_ms.mean == pytest.approx(200.45 / 10)
    point = PointResult("p", 0, 2, None, (found,), found, "")
    assert point.came_in_bursts
    assert "90 % of the tokens came in bursts" in make_result(point).warnings[0]


def test_a_planned_duration_counts_what_came_within_it() -> None:
    """What ends later is waited for, and not counted in the rates."""
    timed = replace(PLAN, num_requests=None, duration_s=2.0)
    early = record([(0.5, 1), (1.0, 1)])
    late = record([(1.5, 1), (3.0, 1)], sent_s=1.0)
    found = summarize(outcome(early, late, plan=timed, until_s=2.0))
    assert found.tokens_per_s == pytest.approx(3 / 2.0)
    assert found.requests_per_s == pytest.approx(1 / 2.0)
    assert found.ttft_ms.count == 2


def test_failures_are_counted_and_are_in_no_latency() -> None:
    """By status; their tokens took the server's time and count in the total."""
    good, failed = record([(1.0, 1), (2.0, 1)]), record([(9.0, 1)], status="UNAVAILABLE")
    found = summarize(outcome(good, failed, record([], status="NOT_FOUND")))
    assert found.failures == {"UNAVAILABLE": 1, "NOT_FOUND": 1}
    assert found.ttft_ms.count == 1
    assert found.output_tokens == 3
    nothing = summarize(outcome(record([], status="NOT_FOUND")))
    assert (nothing.tokens_per_s, nothing.ttft_ms) == (0.0, Distribution())


def test_percentiles_are_numpys() -> None:
    """Linear between the nearest ranks."""
    found = Distribution.of(np.arange(101.0))
    assert (found.median, found.p90, found.p95, found.p99, found.max) == (50, 90, 95, 99, 100)
    assert Distribution.of([1.0, 2.0]).p90 == pytest.approx(1.9)


def test_a_length_that_stands_out_of_its_bucket() -> None:
    """Buckets of 64 prompt tokens; two requests are no bucket."""
    times = {64: 0.1, 70: 0.11, 100: 0.15, 640: 1.0, 650: 9.0}
    records = [record([(seconds, 1)], input_tokens=tokens) for tokens, seconds in times.items()]
    assert worst_ttft_over_bucket(records) == pytest.approx(0.15 / 0.11)


def test_sending_late_is_told() -> None:
    """An open loop's mean delay."""
    late = record([(2.0, 1)], sent_s=1.25)
    late.request = replace(late.request, arrival_s=1.0)
    found = summarize(outcome(late, plan=LoadPlan(OpenLoop(1.0), 0, num_requests=1)))
    assert found.generator.send_late_ms == pytest.approx(250)


def test_a_busy_generator_warns() -> None:
    """Above 5 % of the machine, or of the time between two tokens."""
    assert not GeneratorCost(0.05, 0.8, 0.1, 0.2, lag_share=0.05).warnings
    assert "6.0 % of this machine's CPU" in GeneratorCost(0.06, 1.0, 0.1, 0.2).warnings[0]
    assert "20.0 % of the mean time between" in GeneratorCost(0.01, 0.1, 1.0, 2.0, lag_share=0.2).warnings[0]


def test_medians_are_taken_figure_by_figure() -> None:
    """Numbers inside records too; failures add up."""
    runs = [
        summarize(outcome(record([(1.0, 1), (1.0 + gap, 1)]), record([], status="LOST")))
        for gap in (1.0, 4.0, 2.0)
    ]
    found = median_of(runs)
    assert found.inter_token_ms.mean == pytest.approx(2000)
    assert found.tokens_per_s == pytest.approx(2 / 3.0)
    assert found.requests == 2
    assert found.failures == {"LOST": 3}


def test_even_routing_is_expected_by_the_urn() -> None:
    """The closed form against a simulated even router; one row reads K experts."""
    rng = np.random.default_rng(0)
    seen = [len({e for _ in range(16) for e in rng.permutation(32)[:4]}) for _ in range(2000)]
    assert np.mean(seen) == pytest.approx(expected_distinct(32, 4, 16), rel=0.005)
    assert expected_distinct(32, 4, 1) == pytest.approx(4)


def test_routing_is_averaged_over_layers_and_steps() -> None:
    """Pairs are expected adapter by adapter; base rows have none."""
    steps = [RoutedStep(2, 8, 2, {-1: 1, 0: 2, 3: 1}, 10, 9), RoutedStep(2, 8, 2, {-1: 4}, 12, 0)]
    found = summarize_routing(steps)
    assert found is not None
    assert (found.experts, found.pairs, found.rows) == (22 / 4, 9 / 4, 4.0)
    even = 8 * (1 - 0.75**4)
    assert found.expected_experts == pytest.approx(even)
    assert found.expected_pairs == pytest.approx((8 * (1 - 0.75**2) + 2) / 2)
    assert found.share == pytest.approx(5.5 / even)
    assert summarize_routing([]) is None


def make_result(point: PointResult, **changes: object) -> BenchResult:
    """A result of one point."""
    facts = ServerFacts("m", "bfloat16", "cpu", 0, 1.0, 0, None, 0)
    made = BenchResult("engine client", describe_machine(), {}, (facts,), (point,), routing_floor=0.95)
    return replace(made, **changes)


def test_void_failed_and_wrong_runs_say_so() -> None:
    """Each by itself; a good run says nothing."""
    good = summarize(outcome(record([(1.0, 1), (2.0, 1)])))
    even = RoutingSummary(8, 4.0, 7.8, 8.0, 0.0, 0.0)
    point = PointResult("p", 0, 2, None, (good,), good, "", routing=even)
    assert make_result(point).failures == []
    skewed = replace(point, routing=replace(even, experts=7.5))
    assert "VOID" in make_result(skewed).failures[0]
    assert make_result(skewed, routing_floor=None).failures == []
    assert "2 answers were wrong; x" in make_result(replace(point, wrong=2, wrong_shown=("x",))).failures[0]
    failed = replace(good, failures={"UNAVAILABLE": 3})
    assert (
        "3 requests failed (UNAVAILABLE)" in make_result(replace(point, repeats=(good, failed))).failures[0]
    )
