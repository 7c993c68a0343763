"""A load as data: what each request will be, decided before anything is sent. Pure and seeded."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from lorikeet_bench.load.arrivals import Arrivals, ClosedLoop, OpenLoop, Pace
from lorikeet_bench.load.lengths import LengthRange, LoadError, RecordedRequest
from lorikeet_bench.load.mix import AdapterChoice, AdapterMix

BASE_LINE = -1  # how a file of requests says "the base model"


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request. `adapter` counts from 0, None is the base model; `arrival_s` None: when one before ends.

    `prompt_seed` decides the prompt's tokens.
    """

    index: int
    input_tokens: int
    output_tokens: int
    adapter: int | None
    arrival_s: float | None
    prompt_seed: tuple[int, int]


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """One measured point.

    Either `num_requests` or `duration_s` says where it ends. `recorded`, where there are any, give lengths
    (and adapters and arrivals as far as they say them) in their order, from the start again where more
    requests are wanted. `num_warm_up` requests go first, all at once, and are not measured.
    """

    arrivals: Arrivals
    num_adapters: int
    mix: AdapterMix = field(default_factory=AdapterMix)
    input_tokens: LengthRange = field(default_factory=lambda: LengthRange(1600, 1600))
    output_tokens: LengthRange = field(default_factory=lambda: LengthRange(600, 600))
    recorded: tuple[RecordedRequest, ...] = ()
    num_requests: int | None = None
    duration_s: float | None = None
    num_warm_up: int = 0
    warm_up_output_tokens: int = 16
    seed: int = 1

    def __post_init__(self) -> None:
        if (self.num_requests is None) == (self.duration_s is None):
            raise LoadError("give one of requests and duration: it says where the load ends")
        if isinstance(self.arrivals, OpenLoop) and self.arrivals.pace is Pace.RECORDED:
            if not self.recorded or self.recorded[0].arrival_s is None:
                raise LoadError("recorded arrivals need a file of lengths whose lines have arrival_s")
            if self.num_requests is None or self.num_requests > len(self.recorded):
                raise LoadError(
                    f"the file has {len(self.recorded)} arrivals: ask for at most as many requests"
                )
        for request in self.recorded:
            if request.adapter is not None and not BASE_LINE <= request.adapter < self.num_adapters:
                raise LoadError(
                    f"a line of the lengths names adapter {request.adapter}; there are {self.num_adapters}, "
                    "counted from 0, and -1 is the base model"
                )

    def requests(self) -> Iterator[PlannedRequest]:
        """The measured requests in the order of sending; endless unless `num_requests` is set."""
        return self._requests(0, self.num_requests)

    def warm_up(self) -> Iterator[PlannedRequest]:
        """What is sent before: other prompts of the same lengths, every adapter in turn, short answers."""
        for request in self._requests(1, self.num_warm_up):
            yield PlannedRequest(
                index=request.index,
                input_tokens=request.input_tokens,
                output_tokens=min(request.output_tokens, self.warm_up_output_tokens),
                adapter=request.index % self.num_adapters if self.num_adapters else None,
                arrival_s=None,
                prompt_seed=request.prompt_seed,
            )

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and answer."""
        if self.recorded:
            return max(request.input_tokens + request.output_tokens for request in self.recorded)
        return self.input_tokens.high + self.output_tokens.high

    @property
    def most_open(self) -> int | None:
        """Requests open at once at most; None where nothing bounds them."""
        return self.arrivals.concurrency if isinstance(self.arrivals, ClosedLoop) else None

    def _requests(self, stream: int, count: int | None) -> Iterator[PlannedRequest]:
        # One generator for each question: a longer answer changes no arrival, another mix no length.
        lengths, adapters, moments = (np.random.default_rng((self.seed, stream, kind)) for kind in range(3))
        choice = AdapterChoice(self.mix, self.num_adapters, adapters)
        arrivals = self._arrivals(moments)
        index = 0
        while count is None or index < count:
            recorded = self.recorded[index % len(self.recorded)] if self.recorded else None
            adapter = choice.draw()
            if recorded is not None and recorded.adapter is not None:
                adapter = None if recorded.adapter == BASE_LINE else recorded.adapter
            yield PlannedRequest(
                index=index,
                input_tokens=recorded.input_tokens if recorded else self.input_tokens.draw(lengths),
                output_tokens=recorded.output_tokens if recorded else self.output_tokens.draw(lengths),
                adapter=adapter,
                arrival_s=next(arrivals),
                prompt_seed=(self.seed, 2 * index + stream),
            )
            index += 1

    def _arrivals(self, rng: np.random.Generator) -> Iterator[float | None]:
        if isinstance(self.arrivals, ClosedLoop):
            while True:
                yield None
        elif self.arrivals.pace is Pace.RECORDED:
            # In turn without an end, as the lengths: warm-ups, which are sent at once, may be more.
            while True:
                for request in self.recorded:
                    yield request.arrival_s
        else:
            yield from self.arrivals.arrivals(rng)
