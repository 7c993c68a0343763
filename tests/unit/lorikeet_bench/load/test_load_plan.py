"""A load is decided before it is sent: seeded, with the frequencies, rates and lengths asked for."""

from collections import Counter
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest

from lorikeet_bench.load.arrivals import ClosedLoop, OpenLoop, Pace
from lorikeet_bench.load.lengths import LengthRange, LoadError, read_requests
from lorikeet_bench.load.mix import AdapterMix, Popularity
from lorikeet_bench.load.plan import LoadPlan, PlannedRequest
from lorikeet_bench.load.prompts import TextPrompts, TokenPrompts
from lorikeet_bench.load.sweep import Sweep


def plan(**changes: object) -> LoadPlan:
    """100 requests at concurrency 4 over 8 adapters."""
    values: dict[str, object] = {"arrivals": ClosedLoop(4), "num_adapters": 8, "num_requests": 100}
    return LoadPlan(**(values | changes))  # pyright: ignore[reportArgumentType]


def some(count: int, **changes: object) -> list[PlannedRequest]:
    """The first requests of a plan."""
    return list(islice(plan(num_requests=count, **changes).requests(), count))


def test_equal_seeds_give_equal_loads_and_others_do_not() -> None:
    """Everything of a request follows from the plan."""
    lengths = {"input_tokens": LengthRange(10, 500), "output_tokens": LengthRange(5, 50)}
    arrivals = OpenLoop(10.0)
    first, second = (some(200, arrivals=arrivals, seed=7, **lengths) for _ in range(2))
    assert first == second
    assert some(200, arrivals=arrivals, seed=8, **lengths) != first


def test_one_question_does_not_disturb_another() -> None:
    """Longer answers change no arrival and no prompt; another mix changes no length."""
    ranged = {"input_tokens": LengthRange(10, 500), "arrivals": OpenLoop(10.0)}
    first = some(50, **ranged)
    longer = some(50, output_tokens=LengthRange(900, 900), **ranged)
    mixed = some(50, mix=AdapterMix(Popularity.ZIPF, 1.2, 0.5), **ranged)
    assert [(r.arrival_s, r.prompt_seed) for r in first] == [(r.arrival_s, r.prompt_seed) for r in longer]
    assert [r.input_tokens for r in first] == [r.input_tokens for r in mixed]


def test_lengths_cover_their_range_evenly() -> None:
    """Both ends included; the mean in the middle within five standard errors."""
    drawn = [r.input_tokens for r in some(20_000, input_tokens=LengthRange(100, 300))]
    assert (min(drawn), max(drawn)) == (100, 300)
    assert abs(np.mean(drawn) - 200) < 5 * (200 / 12**0.5) / 20_000**0.5


def test_adapters_take_turns() -> None:
    """Round robin: each as often as the others, in order."""
    assert [r.adapter for r in some(17)] == [index % 8 for index in range(17)]


@pytest.mark.parametrize(
    ("mix", "weights"),
    [
        (AdapterMix(Popularity.UNIFORM), [1.0] * 8),
        (AdapterMix(Popularity.ZIPF, 1.0), [1 / rank for rank in range(1, 9)]),
        (AdapterMix(Popularity.ZIPF, 1.7), [rank**-1.7 for rank in range(1, 9)]),
    ],
)
def test_popularity_has_the_frequencies_of_its_law(mix: AdapterMix, weights: list[float]) -> None:
    """Each adapter's count within five standard deviations of what the law says."""
    count = 8_000
    found = Counter(r.adapter for r in some(count, mix=mix))
    for index, weight in enumerate(weights):
        share = weight / sum(weights)
        assert abs(found[index] - count * share) < 5 * (count * share * (1 - share)) ** 0.5


def test_base_share_goes_to_the_base_model_and_leaves_the_turns_as_they_are() -> None:
    """A quarter of the requests; the others still take turns."""
    drawn = [r.adapter for r in some(8_000, mix=AdapterMix(base_share=0.25))]
    assert abs(drawn.count(None) - 2_000) < 5 * (8_000 * 0.25 * 0.75) ** 0.5
    turns = [adapter for adapter in drawn if adapter is not None]
    assert turns == [index % 8 for index in range(len(turns))]
    assert {r.adapter for r in some(20, num_adapters=0)} == {None}


def test_poisson_arrivals_have_the_rate_and_the_scatter() -> None:
    """Exponential gaps: mean 1/rate, and a standard deviation as large as the mean."""
    arrivals = [r.arrival_s for r in some(8_000, arrivals=OpenLoop(50.0))]
    gaps = np.diff(np.array(arrivals, np.float64))
    assert gaps.min() >= 0
    assert abs(gaps.mean() - 0.02) < 5 * 0.02 / 8_000**0.5
    assert abs(gaps.std() / gaps.mean() - 1) < 0.07


def test_constant_and_burst_arrivals() -> None:
    """Evenly, or so many at once at the same rate overall."""
    constant = [r.arrival_s for r in some(5, arrivals=OpenLoop(4.0, Pace.CONSTANT))]
    assert constant == [0.0, 0.25, 0.5, 0.75, 1.0]
    burst = [r.arrival_s for r in some(7, arrivals=OpenLoop(4.0, Pace.BURST, burst=3))]
    assert burst == [0.0, 0.0, 0.0, 0.75, 0.75, 0.75, 1.5]


def test_a_file_of_requests_is_followed(tmp_path: Path) -> None:
    """Lengths, adapters and arrivals as it says them, by arrival; what it leaves out is the mix's."""
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"input_tokens": 10, "output_tokens": 3, "adapter": 5, "arrival_s": 2.5}\n\n'
        '{"input_tokens": 20, "output_tokens": 4, "arrival_s": 0.5}\n'
        '{"input_tokens": 30, "output_tokens": 5, "adapter": -1, "arrival_s": 1.0}\n'
    )
    recorded = read_requests(path)
    requests = some(3, recorded=recorded, arrivals=OpenLoop(0.0, Pace.RECORDED))
    assert [(r.input_tokens, r.output_tokens, r.arrival_s) for r in requests] == [
        (20, 4, 0.5),
        (30, 5, 1.0),
        (10, 3, 2.5),
    ]
    assert [r.adapter for r in requests] == [0, None, 5]
    arrivals = OpenLoop(0.0, Pace.RECORDED)
    few = plan(num_requests=2, recorded=recorded[:2], arrivals=arrivals, num_warm_up=5)
    assert [r.input_tokens for r in few.warm_up()] == [20, 30, 20, 30, 20]
    assert [r.arrival_s for r in few.requests()] == [0.5, 1.0]
    again = some(5, recorded=recorded)
    assert [r.input_tokens for r in again] == [20, 30, 10, 20, 30]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no request"),
        ('{"input_tokens": 1}', "line 1: .*output_tokens"),
        ('{"input_tokens": 0, "output_tokens": 1}', "line 1: .*at least 1"),
        ('{"input_tokens": 1, "output_tokens": 1, "color": 2}', "line 1: .*color"),
        (
            '{"input_tokens": 1, "output_tokens": 1, "arrival_s": 1}\n{"input_tokens": 1,"output_tokens": 1}',
            "1 of 2 lines; all or none",
        ),
    ],
)
def test_a_wrong_file_is_refused_by_line(tmp_path: Path, text: str, message: str) -> None:
    """The message says which line, and why."""
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(LoadError, match=message):
        read_requests(path)


def test_what_cannot_be_planned_is_refused() -> None:
    """By the name of the option."""
    for text in ("many", "5:2", "0", "1:2:3", "-4"):
        with pytest.raises(LoadError, match="--input-tokens"):
            LengthRange.parse(text, "--input-tokens")
    for text in ("zipfy", "zipf", "zipf:", "uniform:2", "zipf:x", "zipf:11"):
        with pytest.raises(LoadError, match="zipf"):
            AdapterMix.parse(text, 0.0)
    with pytest.raises(LoadError, match="one of requests and duration"):
        plan(duration_s=1.0)
    with pytest.raises(LoadError, match="rate 0 must be above 0"):
        OpenLoop(0.0)


def test_prompts_are_random_in_range_and_the_same_at_each_call() -> None:
    """Another request, another prompt; made ahead or not."""
    first, second = some(2)
    prompts = TokenPrompts(30, 60)
    ids = prompts.ids(first)
    assert len(ids) == 1600
    assert set(ids) == set(range(30, 60))
    assert prompts.ids(first) == ids
    assert prompts.ids(second) != ids
    prompts.prepare([second])
    assert prompts.ids(second) == TokenPrompts(30, 60).ids(second)
    text = TextPrompts(words_per_token=0.2).text(first)
    assert len(text.split()) == 320
    assert TextPrompts(0.2).text(first) == text


def test_warm_up_is_other_prompts_and_every_adapter() -> None:
    """Nothing of what is measured is seen before."""
    loaded = plan(num_warm_up=16)
    warm_up = list(loaded.warm_up())
    assert [r.adapter for r in warm_up] == [index % 8 for index in range(16)]
    assert max(r.output_tokens for r in warm_up) == loaded.warm_up_output_tokens
    assert not {r.prompt_seed for r in warm_up} & {r.prompt_seed for r in loaded.requests()}


def test_a_sweep_has_every_load_with_every_number_of_adapters() -> None:
    """Twice the concurrency, at least three, unless asked otherwise; adapters in the outer turn."""
    sweep = Sweep(plan(), (ClosedLoop(1), ClosedLoop(16)), (0, 8))
    points = [(p.arrivals.name, p.num_adapters, p.num_requests, p.num_warm_up) for p in sweep.plans()]
    assert points == [
        ("concurrency 1", 0, 3, 1),
        ("concurrency 16", 0, 32, 16),
        ("concurrency 1", 8, 3, 1),
        ("concurrency 16", 8, 32, 16),
    ]
    assert all(a.num_adapters <= b.num_adapters for a, b in pairwise(sweep.plans()))


def test_a_sweep_can_be_of_chosen_points() -> None:
    """In the same order; no other combination of theirs."""
    sweep = Sweep(plan(), (ClosedLoop(1), ClosedLoop(16)), (2, 8), chosen=frozenset({(16, 8), (1, 2)}))
    assert [(p.arrivals.name, p.num_adapters) for p in sweep.plans()] == [
        ("concurrency 1", 2),
        ("concurrency 16", 8),
    ]
