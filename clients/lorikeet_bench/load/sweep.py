"""The points of a command: every concurrency or rate with every number of adapters, repeats taking turns."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from lorikeet_bench.load.arrivals import Arrivals, ClosedLoop, OpenLoop
from lorikeet_bench.load.driver import LoadOutcome
from lorikeet_bench.load.judge import Expectation, TokenJudge, tokens_digest
from lorikeet_bench.load.metrics import LoadSummary, summarize
from lorikeet_bench.load.plan import LoadPlan
from lorikeet_bench.load.result import PointResult, median_of
from lorikeet_bench.load.words import counted

_LEAST_REQUESTS = 3


@dataclass(frozen=True, slots=True)
class Sweep:
    """`template` gives every point all but arrivals, adapters, warm-up and number of requests.

    `requests` None takes twice the concurrency, at least three, as vLLM was measured; `warm_up` None once the
    concurrency. `chosen` leaves of all combinations only these, of a concurrency and a number of adapters.
    """

    template: LoadPlan
    arrivals: tuple[Arrivals, ...]
    adapters: tuple[int, ...]
    requests: int | None = None
    warm_up: int | None = None
    repeats: int = 1
    chosen: frozenset[tuple[int, int]] | None = None

    def plans(self) -> tuple[LoadPlan, ...]:
        """One plan a point, by adapters, then by load."""
        return tuple(
            self._plan(arrivals, count)
            for count in self.adapters
            for arrivals in self.arrivals
            if self._is_wanted(arrivals, count)
        )

    def _is_wanted(self, arrivals: Arrivals, num_adapters: int) -> bool:
        if self.chosen is None:
            return True
        return isinstance(arrivals, ClosedLoop) and (arrivals.concurrency, num_adapters) in self.chosen

    def _plan(self, arrivals: Arrivals, num_adapters: int) -> LoadPlan:
        open_at_once = arrivals.concurrency if isinstance(arrivals, ClosedLoop) else 8
        num_requests = self.template.num_requests
        if self.template.duration_s is None:
            num_requests = self.requests or max(_LEAST_REQUESTS, 2 * open_at_once)
        return replace(
            self.template,
            arrivals=arrivals,
            num_adapters=num_adapters,
            num_requests=num_requests,
            num_warm_up=open_at_once if self.warm_up is None else self.warm_up,
        )


class PointLog:
    """What one point's repeats brought so far."""

    def __init__(self, plan: LoadPlan, expectation: Expectation) -> None:
        self.plan = plan
        self.judge = TokenJudge(expectation)
        self._summaries: list[LoadSummary] = []
        self._digest = ""

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.plan.arrivals.name}, {counted(self.plan.num_adapters, 'adapter')}"

    def add(self, outcome: LoadOutcome) -> LoadSummary:
        """Judge and count one repeat; records are not kept."""
        self.judge.look((*outcome.warm_up, *outcome.records))
        self._digest = self._digest or tokens_digest(outcome.records)
        summary = summarize(outcome)
        self._summaries.append(summary)
        return summary

    def result(self) -> PointResult:
        """Over all repeats."""
        arrivals = self.plan.arrivals
        return PointResult(
            name=self.name,
            adapters=self.plan.num_adapters,
            concurrency=arrivals.concurrency if isinstance(arrivals, ClosedLoop) else None,
            rate=arrivals.rate if isinstance(arrivals, OpenLoop) else None,
            repeats=tuple(self._summaries),
            median=median_of(self._summaries),
            tokens_digest=self._digest,
            wrong=self.judge.wrong,
            checked_tokens=self.judge.checked_tokens,
            wrong_shown=tuple(self.judge.shown),
        )


async def run_points(
    plans: Sequence[LoadPlan],
    repeats: int,
    expectation: Expectation,
    run: Callable[[LoadPlan], Awaitable[LoadOutcome]],
    on_point: Callable[[str, LoadSummary], None] = lambda _name, _summary: None,
) -> tuple[PointResult, ...]:
    """Run all points once, then all again: what drifts meanwhile drifts under every point alike."""
    logs = [PointLog(plan, expectation) for plan in plans]
    for _ in range(repeats):
        for log in logs:
            on_point(log.name, log.add(await run(log.plan)))
    return tuple(log.result() for log in logs)
