"""What probes and profiles see of a runner's steps, and that the runner sees nothing of them."""

from collections.abc import Generator
from contextlib import contextmanager

from inference_service.domain.sampling import SamplingParams
from inference_service.domain.step import NewRequest, ScheduledRequest, SchedulerOutput
from lorikeet_bench.engine.watched_runner import DecodeStep, WatchedRunner


class Runner:
    """Takes down what it is told."""

    is_asynchronous = True

    def __init__(self) -> None:
        self.launched: list[int] = []

    def launch(self, step: SchedulerOutput) -> None:
        """Like ports.ModelRunner."""
        self.launched.append(step.step)

    def collect(self) -> str:
        """Like ports.ModelRunner."""
        return "brought"


def new(request_id: str, slot: int) -> NewRequest:
    """A request of three prompt tokens."""
    return NewRequest(request_id, (1, 2, 3), 3, SamplingParams(max_tokens=9), (0,), 0, slot)


def decode(request_id: str, at: int) -> ScheduledRequest:
    """One token."""
    return ScheduledRequest(request_id, at, 1)


def test_decode_steps_are_told_with_their_slots_in_the_batchs_order() -> None:
    """Prefills and mixed steps are None; finished requests are forgotten; everything is passed on."""
    seen: list[DecodeStep | None] = []

    @contextmanager
    def watch(step: DecodeStep | None) -> Generator[None]:
        seen.append(step)
        yield

    runner = Runner()
    watched = WatchedRunner(runner, watch)
    assert watched.is_asynchronous
    watched.launch(SchedulerOutput(1, (ScheduledRequest("a", 0, 3),), (new("a", 2),)))
    watched.launch(SchedulerOutput(2, (decode("a", 3), ScheduledRequest("b", 0, 3)), (new("b", -1),)))
    watched.launch(SchedulerOutput(3, (decode("b", 3), decode("a", 4))))
    watched.launch(SchedulerOutput(4, (decode("a", 5),), finished=("b",)))
    # A prompt's last single token is no decode where it is the request's first step.
    watched.launch(SchedulerOutput(5, (decode("a", 6), decode("c", 2)), (new("c", 1),)))
    assert watched.collect() == "brought"
    assert seen == [None, None, DecodeStep((-1, 2)), DecodeStep((2,)), None]
    assert runner.launched == [1, 2, 3, 4, 5]
