"""Requests that wait for their grammars: order, turns, shares of memory, refusal, withdrawal."""

import dataclasses
import threading
import time
from pathlib import Path

import pytest

from inference_service.domain.request import EngineRequest
from inference_service.domain.sampling import SamplingParams
from inference_service.domain.structured_output import (
    Constraint,
    ConstraintKind,
    GrammarRefusedError,
    StructuredOutput,
    TokenMatcher,
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


def matchers_of(request: EngineRequest) -> list[TokenMatcher]:
    """One for each sample."""
    matchers: list[TokenMatcher] = []
    for sample in request.samples():
        output = sample.sampling.structured_output
        assert output is not None
        assert output.matcher is not None
        assert not output.other_matchers
        matchers.append(output.matcher)
    assert len(matchers) == request.num_samples
    return matchers


def test_each_answer_has_a_compilation_of_its_own(slow: Gate) -> None:
    """Requests come out in the order they came, with a matcher for each sample."""
    first, second = of_regex("a+"), of_regex("b+")
    for name, grammar, count in (("x", first, 1), ("y", second, 3), ("z", first, 2)):
        slow.gate.add(dataclasses.replace(make_request(name, grammar), num_samples=count))
    assert slow.gate.take_ready(0.0) == []
    slow.go.set()
    slow.wait(3)
    ready = slow.gate.take_ready(0.0)
    assert [(request.request_id, refusal) for request, refusal in ready] == [("x", ""), ("y", ""), ("z", "")]
    matchers = [matcher for request, _ in ready for matcher in matchers_of(request)]
    assert len({id(matcher) for matcher in matchers}) == 6
    assert sorted(slow.compiled) == sorted([first] * 3 + [second] * 3)
    matchers[0].advance([3])  # no "a": none of the others is concerned
    assert [bool(matcher.error()) for matcher in matchers] == [True] + [False] * 5


def test_tenants_take_turns(slow: Gate) -> None:
    """One with many samples and requests holds another up for what is in hand."""
    many = dataclasses.replace(make_request("many", of_regex("a+")), num_samples=20, tenant="a")
    slow.gate.add(many)
    slow.gate.add(dataclasses.replace(many, request_id="more"))
    slow.gate.add(dataclasses.replace(make_request("one", of_regex("b+")), tenant="b"))
    slow.go.set()
    slow.wait(3)
    assert slow.compiled.index(of_regex("b+")) <= 4
    assert len(slow.gate.take_ready(0.0)) == 3


def test_matchers_that_live_hold_others_back(slow: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same tenant beyond its half; another's come out. Once they are dropped, the next is compiled."""
    monkeypatch.setattr(grammar_gate, "_MAX_BYTES", 100 << 20)
    slow.go.set()
    sized = StructuredOutput(of_regex("a+"), num_bytes=15 << 20)
    request = make_request("", sized.grammar)
    request = dataclasses.replace(
        request, sampling=dataclasses.replace(request.sampling, structured_output=sized), num_samples=2
    )
    for name, tenant in (("a0", "a"), ("a1", "a"), ("b0", "b")):
        slow.gate.add(dataclasses.replace(request, request_id=name, tenant=tenant))
    slow.wait(2)
    ready = {taken.request_id: matchers_of(taken) for taken, _ in slow.gate.take_ready(0.0)}
    assert set(ready) == {"a0", "b0"}
    assert slow.gate.take_ready(0.0) == []
    ready["a0"].clear()
    assert slow.gate.take_ready(0.0) == []  # it begins now
    slow.wait(1)
    assert [taken.request_id for taken, _ in slow.gate.take_ready(0.0)] == ["a1"]
    assert len(slow.compiled) == 6


def test_what_is_left_gives_its_share_back(slow: Gate) -> None:
    """Withdrawn when nothing, something and all of it is begun: nothing is kept of any."""
    for name in ("first", "second"):
        slow.gate.add(dataclasses.replace(make_request(name, of_regex("a+")), num_samples=5))
    for name in ("second", "first"):
        assert slow.gate.withdraw(name)
    slow.gate.add(make_request("last", of_regex("b")))
    slow.go.set()
    slow.wait(1)
    ((request, _),) = slow.gate.take_ready(0.0)
    assert len(matchers_of(request)) == 1
    del request
    slow.gate.add(make_request("none", '{"grammars": [{"lark_grammar": "start: ("}]}'))
    slow.wait(1)
    assert slow.gate.take_ready(0.0)[0][1]
    with slow.gate._lock:
        assert slow.gate._next() is None
    assert not slow.gate._queues
    # The thread that compiled may hold the last answer's state a moment longer.
    deadline = time.monotonic() + 10
    while slow.gate._live_bytes and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not slow.gate._live_bytes


def test_rules_that_lie_deep(slow: Gate) -> None:
    """What passes the check on its small stack is compiled on the pool's threads, twice as deep too."""
    depth = 1200
    rules = "\n".join(f'r{i}: "(" r{i - 1}? ")"' for i in range(1, depth + 1))
    text = f'start: r{depth}\nr0: "a"\n{rules}\n'
    slow.go.set()
    slow.gate.add(make_request("deep", serialized_grammar(Constraint(ConstraintKind.GRAMMAR, text))))
    slow.wait(1)
    ((request, refusal),) = slow.gate.take_ready(0.0)
    assert not refusal
    matchers_of(request)


def test_a_panic_ends_its_request(slow: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Native code's is no Exception; the next request is served."""

    class Panic(BaseException):
        pass

    def panic(compiler: GrammarCompiler, grammar: str) -> object:
        raise Panic

    with monkeypatch.context() as patch:
        patch.setattr(GrammarCompiler, "compile", panic)
        slow.gate.add(make_request("x", of_regex("a")))
        slow.wait(1)
        ((_, refusal),) = slow.gate.take_ready(0.0)
    assert refusal == "compiling it failed: Panic"
    slow.go.set()
    slow.gate.add(make_request("y", of_regex("a")))
    slow.wait(1)
    assert slow.gate.take_ready(0.0)[0][1] == ""


def test_withdrawn_while_it_compiles(slow: Gate) -> None:
    """It comes back once, without a matcher; the compilation's end brings nothing."""
    slow.gate.add(make_request("x", of_regex("a+")))
    request = slow.gate.withdraw("x")
    assert request is not None
    assert request.request_id == "x"
    assert slow.gate.withdraw("x") is None
    slow.go.set()
    slow.gate.add(make_request("next", of_regex("b")))
    slow.wait(1)
    assert [taken.request_id for taken, _ in slow.gate.take_ready(0.0)] == ["next"]


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
