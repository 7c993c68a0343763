"""Masks in the sampler: which rows, which tokens, what min_tokens and bad words may take, and what fails."""

from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch

from inference_service.domain.sampling import SamplingParams
from inference_service.domain.step import NewRequest
from inference_service.domain.structured_output import StructuredOutput
from inference_service.execution.request_table import RequestState, RequestTable
from inference_service.execution.sampler import TokenSampler
from tests.support.scripted_matcher import END, ScriptedMatcher

VOCAB = 70  # more than two words, with spare bits
Script = Callable[[tuple[int, ...]], Collection[int] | None]


def add(
    table: RequestTable,
    name: str,
    script: Script | None,
    *,
    output: tuple[int, ...] = (),
    ends_late: bool = False,
    **sampling: Any,
) -> RequestState:
    """A request with a prompt of three tokens."""
    structured = StructuredOutput("", ends_late, ScriptedMatcher(script)) if script is not None else None
    params = SamplingParams(max_tokens=50, structured_output=structured, **sampling)
    table.add(NewRequest(name, (9, 9, 9, *output), 3, params, (), 0, -1))
    return table._states[name]


def make_table() -> RequestTable:
    """Few places."""
    return RequestTable(max_requests=6, max_context_tokens=64, block_tokens=16)


def test_rows_of_a_mixed_batch() -> None:
    """Greedy choices among what is allowed; the others keep the model's; every output token is followed."""
    table, generator = make_table(), torch.Generator().manual_seed(0)
    scripts: dict[str, Script | None] = {
        "plain": None,
        "counts": lambda output: {len(output), 40 + len(output), 64},
        "late": lambda output: {69, 31, 32} if len(output) < 4 else {END},
        "bias": None,
    }
    states = {
        name: add(table, name, script, temperature=0.0, logit_bias=((5, 4.0),) if name == "bias" else ())
        for name, script in scripts.items()
    }
    outputs: dict[str, tuple[int, ...]] = dict.fromkeys(scripts, ())
    for step in range(8):
        names = sorted(scripts) if step % 2 else sorted(scripts, reverse=True)[step % 3 :]
        logits = torch.randn(len(names), VOCAB, generator=generator)
        before = logits.clone()
        tokens, _ = TokenSampler(table).sample(logits, [states[name] for name in names])
        assert torch.equal(logits, before)
        for row, (name, token_id) in enumerate(zip(names, tokens, strict=True)):
            scores = before[row].clone()
            scores[5] += 4.0 if name == "bias" else 0.0
            script = scripts[name]
            allowed = range(VOCAB) if script is None else sorted(script(outputs[name]) or ())
            assert token_id == max(allowed, key=lambda i: float(scores[i]))
            table.append(states[name], token_id)
            outputs[name] += (token_id,)
    assert not any(state.failure for state in states.values())


def test_a_preempted_request_goes_on() -> None:
    """Its matcher stays with it: each output token is seen once, in both lives, and no prompt token."""
    table = make_table()
    matcher = ScriptedMatcher(lambda output: {7 + len(output)})
    sampling = SamplingParams(
        max_tokens=50, temperature=0.0, structured_output=StructuredOutput("", matcher=matcher)
    )
    output: tuple[int, ...] = ()
    for life in range(3):
        table.add(NewRequest("a", (9, 9, 9, *output), 3, sampling, (), 0, -1))
        state = table._states["a"]
        for _ in range(2):
            (token_id,), _ = TokenSampler(table).sample(torch.randn(1, VOCAB), [state])
            assert token_id == 7 + len(output)
            assert matcher.output == output
            # The last token of a life is sampled for nobody: the scheduler has preempted its request.
            table.append(state, token_id)
            output += (token_id,)
        output = output[:-1] if life == 0 else output
        table.remove("a")


@pytest.mark.parametrize(
    ("ends_late", "min_tokens"), [(True, 0), (False, 3), (True, 3)], ids=["eos", "min", "both"]
)
def test_the_end_comes_late(ends_late: bool, min_tokens: int) -> None:
    """Not while anything else may come; then in spite of min_tokens."""
    table = make_table()
    state = add(
        table,
        "a",
        lambda output: {END, 8} if len(output) < 2 else {END},
        ends_late=ends_late,
        temperature=0.0,
        min_tokens=min_tokens,
        held_back_token_ids=(END, 11),
    )
    logits = torch.zeros(1, VOCAB)
    logits[0, END] = 50.0
    for expected in (8, 8, END):
        assert TokenSampler(table).sample(logits, [state])[0] == [expected]
        table.append(state, expected)
    assert state.failure == ""


def test_min_tokens_once_they_are_out() -> None:
    """The model's own end counts again."""
    table = make_table()
    state = add(table, "a", lambda _: {END, 8}, temperature=0.0, min_tokens=1, held_back_token_ids=(END,))
    logits = torch.zeros(1, VOCAB)
    logits[0, END] = 50.0
    for expected in (8, END):
        assert TokenSampler(table).sample(logits, [state])[0] == [expected]
        table.append(state, expected)


@pytest.mark.parametrize(
    ("script", "sampling", "words"),
    [
        (lambda _: None, {}, "too complex: out of fuel"),
        (lambda _: (), {}, "allows no token"),
        (lambda _: {7, 8}, {"bad_words": ((7,), (9, 8))}, "bad_words or min_tokens"),
        (lambda _: {11}, {"min_tokens": 4, "held_back_token_ids": (END, 11)}, "bad_words or min_tokens"),
    ],
    ids=["error", "empty", "bad words", "stop token"],
)
def test_failures(script: Script, sampling: dict[str, Any], words: str) -> None:
    """The one request has its reason; the row beside it is as alone, now and in later steps."""
    table, logits = make_table(), torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1))
    failing = add(table, "failing", script, output=(9,), temperature=0.0, **sampling)
    other = add(table, "other", lambda _: {3, 4}, temperature=0.0)
    for _ in range(2):
        tokens, _ = TokenSampler(table).sample(logits, [failing, other])
        assert tokens[1] == (3 if logits[1, 3] > logits[1, 4] else 4)
        assert words in failing.failure
        assert other.failure == ""


def test_logits_that_are_not_finite_are_no_failure_of_the_grammar() -> None:
    """They are found by the token that is none."""
    table = make_table()
    state = add(table, "a", lambda _: {3, 4})
    logits = torch.randn(1, VOCAB)
    logits[0, 3] = float("nan")
    assert TokenSampler(table).sample(logits, [state])[0] == [-1]
    assert state.failure == ""
