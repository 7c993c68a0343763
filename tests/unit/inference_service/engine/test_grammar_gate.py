"""Requests that wait for their grammars: order, sharing, refusal, withdrawal."""

import dataclasses
import threading
from pathlib import Path

import pytest

from inference_service.domain.request import EngineRequest
from inference_service.domain.sampling import SamplingParams
from inference_service.domain.structured_output import (
    Constraint,
    ConstraintKind,
    GrammarRefusedError,
    StructuredOutput,
)
from inference_service.engine import grammar_gate
from inference_service.engine.grammar_gate import GrammarGate
from inference_service.text.grammar import GrammarCompiler, serialized_grammar
from tests.support.grammar_models import model_dirs


def make_request(request_id: str, grammar: str) -> EngineRequest:
    """With structured output by a grammar of llguidance's own form."""
    sampling = SamplingParams(max_tokens=9, structured_output=StructuredOutput(grammar))
    return EngineRequest(request_id, "tenant", (1,), sampling)


def of_regex(expression: str) -> str:
    """A grammar."""
    return serialized_grammar(Constraint(ConstraintKind.REGEX, expression))


class Gate:
    """A gate whose compilations wait to be let go on."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        model_dir, end = model_dirs(root)["merges"]
        self.go, self.woken = threading.Event(), threading.Semaphore(0)
        self.compiled: list[str] = []
        compile_grammar = GrammarCompiler.compile

        def compile_slowly(compiler: GrammarCompiler, grammar: str) -> object:
            assert self.go.wait(60)
            self.compiled.append(grammar)
            return compile_grammar(compiler, grammar)

        monkeypatch.setattr(GrammarCompiler, "compile", compile_slowly)
        self.gate = GrammarGate(model_dir, 533, (end,), self.woken.release)

    def wait(self, count: int) -> None:
        """Until so many compilations were reported."""
        for _ in range(count):
            assert self.woken.acquire(timeout=60)


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """A gate of its own."""
    return Gate(tmp_path, monkeypatch)


def test_nothing_before_it_is_needed(tmp_path: Path) -> None:
    """Without structured output no tokenizer is read: there is none here."""
    gate = GrammarGate(tmp_path / "nowhere", 300, (1,), lambda: None)
    assert gate.take_ready(0.0) == []
    assert gate.withdraw("unknown") is None


def test_requests_come_out_with_matchers_of_one_compilation(slow: Gate) -> None:
    """In the order they came; a grammar that several ask for is compiled once, and kept."""
    first, second = of_regex("a+"), of_regex("b+")
    for name, grammar in (("x", first), ("y", second), ("z", first)):
        slow.gate.add(make_request(name, grammar))
    assert slow.gate.take_ready(0.0) == []
    slow.go.set()
    slow.wait(2)
    ready = slow.gate.take_ready(0.0)
    assert [(request.request_id, refusal) for request, refusal in ready] == [("x", ""), ("y", ""), ("z", "")]
    outputs = [request.sampling.structured_output for request, _ in ready]
    matchers = [output.matcher for output in outputs if output is not None]
    assert matchers[0] is matchers[2] is not None
    assert matchers[1] not in (None, matchers[0])
    slow.gate.add(make_request("again", first))
    ((request, _),) = slow.gate.take_ready(0.0)
    assert request.sampling.structured_output is not None
    assert request.sampling.structured_output.matcher is matchers[0]
    assert sorted(slow.compiled) == sorted([first, second])


def test_withdrawn_while_it_compiles(slow: Gate) -> None:
    """It comes back once, without a matcher; the compilation's end brings nothing."""
    slow.gate.add(make_request("x", of_regex("a+")))
    request = slow.gate.withdraw("x")
    assert request is not None
    assert request.request_id == "x"
    assert slow.gate.withdraw("x") is None
    slow.go.set()
    slow.wait(1)
    assert slow.gate.take_ready(0.0) == []


def test_a_deadline_that_passes_while_it_compiles(slow: Gate) -> None:
    """The request comes out as it is, once, for the scheduler to end it; the other waits on."""
    late = dataclasses.replace(make_request("late", of_regex("a+")), deadline_s=5.0)
    slow.gate.add(late)
    slow.gate.add(make_request("other", of_regex("a+")))
    assert slow.gate.take_ready(4.9) == []
    assert slow.gate.take_ready(5.0) == [(late, "")]
    slow.go.set()
    slow.wait(1)
    ((request, _),) = slow.gate.take_ready(6.0)
    assert request.request_id == "other"


def test_refused(slow: Gate) -> None:
    """What cannot be compiled comes out with the reason, again for the next request."""
    slow.go.set()
    for name in ("x", "y"):
        slow.gate.add(make_request(name, '{"grammars": [{"lark_grammar": "start: ("}]}'))
        slow.wait(1)
        ((request, refusal),) = slow.gate.take_ready(0.0)
        assert request.request_id == name
        assert refusal
    assert len(slow.compiled) == 2


def test_an_old_grammar_makes_room(slow: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least recently used goes; the requests that have its matcher keep it."""
    monkeypatch.setattr(grammar_gate, "_MAX_KEPT", 2)
    slow.go.set()
    grammars = [of_regex("a" * count) for count in (1, 2, 1, 3, 2)]
    for number, grammar in enumerate(grammars):
        known = len(slow.compiled)
        slow.gate.add(make_request(str(number), grammar))
        if number != 2:
            slow.wait(1)
            assert len(slow.compiled) == known + 1
        ((request, _),) = slow.gate.take_ready(0.0)
        assert request.sampling.structured_output is not None
        assert request.sampling.structured_output.matcher is not None


def test_no_llguidance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that lacks it refuses the request and lives."""
    slow = Gate(tmp_path, monkeypatch)
    slow.go.set()
    monkeypatch.setattr(grammar_gate, "GrammarCompiler", _refusing)
    slow.gate.add(make_request("x", of_regex("a")))
    slow.wait(1)
    ((_, refusal),) = slow.gate.take_ready(0.0)
    assert refusal == "not here"


def _refusing(*arguments: object) -> GrammarCompiler:
    raise GrammarRefusedError("not here")
