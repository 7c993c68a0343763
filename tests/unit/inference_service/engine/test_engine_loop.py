"""What the loop does with messages, turn by turn, on fakes of everything around it."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from inference_service.domain.request import EngineRequest, FinishReason, RequestOutput
from inference_service.domain.structured_output import StructuredOutput
from inference_service.engine.engine_loop import EngineLoop
from inference_service.engine.messages import AbortRequest, AddRequest, StepOutputs, ToEngine
from tests.support.engine_builders import Rig, make_request


class Grammars:
    """Compiles nothing: what is added waits for ever."""

    def __init__(self) -> None:
        self.waiting: dict[str, EngineRequest] = {}

    def add(self, request: EngineRequest) -> None:
        """See GrammarGate."""
        self.waiting[request.request_id] = request

    def withdraw(self, request_id: str) -> EngineRequest | None:
        """See GrammarGate."""
        return self.waiting.pop(request_id, None)

    def take_ready(self, now_s: float) -> list[tuple[EngineRequest, str]]:
        """Never."""
        return []


class Side:
    """Hands out a turn's messages, and keeps what is sent."""

    def __init__(self) -> None:
        self.inbox: list[ToEngine] = []
        self.outputs: list[RequestOutput] = []

    def receive(self) -> list[ToEngine]:
        """All that came."""
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, message: Any) -> None:
        """Outputs, here."""
        assert isinstance(message, StepOutputs)
        self.outputs += message.outputs

    def wait(self, timeout_s: float) -> tuple[int, ...]:
        """Not at all."""
        return ()


def make_loop(rig: Rig) -> tuple[EngineLoop, Side, Grammars]:
    """A loop around a rig's scheduler and fakes."""
    side, grammars = Side(), Grammars()
    parts: dict[str, Any] = {
        "backend": SimpleNamespace(runner=rig.runner), "scheduler": rig.scheduler,
        "residency": rig.residency, "source": rig.source, "grammars": grammars, "side": side,
        "waker": SimpleNamespace(fd=-1), "lifeline_fd": -2, "overlaps": False, "clock": lambda: 100.0,
        "collector": SimpleNamespace(between_steps=lambda: None, while_idle=lambda: None),
    }  # fmt: skip
    return EngineLoop(**parts), side, grammars


def test_samples_that_wait_for_a_grammar_are_aborted_together() -> None:
    """Their aborts come in different turns; without a matcher none of them is ever scheduled."""
    rig = Rig()
    loop, side, grammars = make_loop(rig)
    request = make_request("a")
    constrained = StructuredOutput("g")
    request = replace(
        request, num_samples=3, sampling=replace(request.sampling, structured_output=constrained)
    )
    side.inbox = [AddRequest(request)]
    loop._turn()
    assert set(grammars.waiting) == {"a"}
    for sample in request.samples():
        side.inbox = [AbortRequest(sample.request_id)]
        loop._turn()
    assert not grammars.waiting
    assert rig.runner.steps == []
    ends = {output.request_id: output.finish for output in side.outputs}
    assert set(ends) == {sample.request_id for sample in request.samples()}
    assert {finish.reason for finish in ends.values() if finish} == {FinishReason.ABORTED}
    assert rig.scheduler.stats().waiting_requests == 0
