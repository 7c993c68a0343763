"""Biases, masks and penalties of a batch against a loop in Python's floats; what they must leave alone."""

import math
import random
from typing import Any

import pytest
import torch

from inference_service.domain.sampling import SamplingParams
from inference_service.domain.step import NewRequest
from inference_service.execution.logit_changes import LogitChanges
from inference_service.execution.request_table import RequestState, RequestTable
from inference_service.execution.sampler import TokenSampler
from lorikeet_kernels.sampling.sampling import NO_TOKEN
from tests.support.sampling_reference import Asked, changed, kept

VOCAB = 40
ASKED = {
    "plain": Asked(),
    "presence": Asked(presence_penalty=1.5),
    "frequency": Asked(frequency_penalty=-0.75),
    "repetition": Asked(repetition_penalty=1.8),
    "lenient": Asked(repetition_penalty=0.4, presence_penalty=-2.0, frequency_penalty=2.0),
    "bias": Asked(logit_bias={0: 100.0, 7: -3.5, 39: 2.25}),
    "held": Asked(min_tokens=4, held_back=(3, 5), logit_bias={3: 50.0}),
    "words": Asked(bad_words=((6,), (1, 2), (2, 2, 1), (1, 1, 1, 1, 1, 1))),
    "all": Asked(1.0, 0.5, 1.2, {4: 1.0, 5: 9.0}, 5, (5, 6, 7), ((2, 4), (8,))),
}


def params_of(asked: Asked, **others: Any) -> SamplingParams:
    """The domain's form."""
    return SamplingParams(
        max_tokens=99,
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        repetition_penalty=asked.repetition_penalty,
        logit_bias=tuple(asked.logit_bias.items()),
        min_tokens=asked.min_tokens,
        held_back_token_ids=tuple(asked.held_back),
        bad_words=tuple(tuple(word) for word in asked.bad_words),
        **others,
    )


def add(
    table: RequestTable, name: str, sampling: SamplingParams, prompt: list[int], output: list[int]
) -> None:
    """A request that has these tokens already."""
    table.add(NewRequest(name, (*prompt, *output), len(prompt), sampling, (), 0, -1))


def state_of(table: RequestTable, name: str) -> RequestState:
    """As the runner gets it."""
    return table._states[name]


def make_table() -> RequestTable:
    """Places for few, so that they are used again."""
    return RequestTable(max_requests=len(ASKED), max_context_tokens=64, block_tokens=16)


def test_every_step_of_a_mixed_batch_is_the_loops() -> None:
    """Requests come, are preempted, come back in another's place and end; the batch changes its order."""
    draw = random.Random(5)
    generator = torch.Generator().manual_seed(5)
    table = make_table()
    changes = LogitChanges(table)
    sequences: dict[str, tuple[list[int], list[int]]] = {}
    for _ in range(150):
        for name, asked in ASKED.items():
            if name not in sequences and draw.random() < 0.5:
                sequences[name] = ([draw.randrange(9) for _ in range(draw.randrange(1, 7))], [])
                add(table, name, params_of(asked), *sequences[name])
            elif name in sequences and draw.random() < 0.15:
                table.remove(name)
                if draw.random() < 0.5 or len(sequences[name][1]) > 30:
                    del sequences[name]
                else:
                    add(table, name, params_of(asked), *sequences[name])
        batch = draw.sample(sorted(sequences), draw.randrange(len(sequences) + 1))
        states = [state_of(table, name) for name in batch]
        logits = torch.randn(len(batch), VOCAB, generator=generator) * 3
        before = logits.clone()
        scores = changes.apply(logits, states)
        assert torch.equal(logits, before)
        for row, name in enumerate(batch):
            expected = torch.tensor(changed(before[row].tolist(), *sequences[name], ASKED[name]))
            torch.testing.assert_close(scores[row], expected, rtol=1e-5, atol=1e-5)
            if name == "plain":
                assert torch.equal(scores[row], before[row])
        chosen = torch.tensor([draw.randrange(9) for _ in batch], dtype=torch.int64)
        changes.count(chosen, states)
        for name, state, token in zip(batch, states, chosen.tolist(), strict=True):
            table.append(state, token)
            sequences[name][1].append(token)


def test_without_parameters_nothing_is_touched() -> None:
    """The very tensor goes to the sampler, and no counts are ever made."""
    table = make_table()
    changes = LogitChanges(table)
    add(table, "a", SamplingParams(max_tokens=3, temperature=0.5, top_k=3, min_p=0.1), [1, 2], [])
    logits = torch.randn(1, VOCAB)
    states = [state_of(table, "a")]
    assert changes.apply(logits, states) is logits
    changes.count(torch.tensor([3]), states)
    assert changes._counts is None


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_what_is_beside_does_not_matter(temperature: float) -> None:
    """A plain request draws the token that it draws alone, in bfloat16 too."""
    logits = (torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(2)) * 2).to(torch.bfloat16)
    tokens: list[int] = []
    for names in (["plain"], ["plain", "all"]):
        table = make_table()
        for name in names:
            sampling = params_of(ASKED[name], temperature=temperature, seed=4, top_k=9)
            add(table, name, sampling, [1, 2, 4], [8, 2])
        states = [state_of(table, name) for name in names]
        tokens.append(TokenSampler(table).sample(logits[: len(names)], states)[0][0])
    assert tokens[0] == tokens[1]


def test_log_probabilities_are_the_models_own() -> None:
    """They do not know of the bias that decided."""
    table = make_table()
    sampling = params_of(Asked(logit_bias={7: 100.0}), temperature=0.0, logprobs=1)
    add(table, "a", sampling, [1], [])
    logits = torch.zeros(1, VOCAB)
    logits[0, 3] = 5.0
    (token,), (entry,) = TokenSampler(table).sample(logits, [state_of(table, "a")])
    assert token == 7
    assert entry is not None
    assert list(entry.top_ids) == [3]
    assert entry.logprob == pytest.approx(-math.log(VOCAB - 1 + math.exp(5.0)), abs=1e-5)


def test_a_row_that_is_not_finite_ends_alone() -> None:
    """Its penalties are counted nowhere else; the row beside it draws on."""
    table = make_table()
    for name in ("presence", "all"):
        add(table, name, params_of(ASKED[name], temperature=0.0), [1], [2])
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(8))
    logits[0, 5] = math.nan
    tokens, _ = TokenSampler(table).sample(logits, [state_of(table, n) for n in ("presence", "all")])
    assert tokens[0] == NO_TOKEN
    expected = changed(logits[1].tolist(), [1], [2], ASKED["all"])
    assert tokens[1] == expected.index(max(expected))


@pytest.mark.parametrize(
    "cuts",
    [
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"min_p": 0.05, "top_k": 4},
        {"min_p": 0.05, "top_p": 0.7},
        {"min_p": 0.1, "top_k": 6, "top_p": 0.8},
    ],
)
def test_draws_follow_what_the_loop_keeps(cuts: dict[str, Any]) -> None:
    """All that is kept is drawn, in its share, and nothing else; penalties and bias came before."""
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(11)) * 2
    asked, prompt, output, draws = ASKED["all"], [1, 2, 9], [4, 8, 8], 3000
    expected = kept(changed(logits[0].tolist(), prompt, output, asked), 1.3, **cuts)
    table = RequestTable(1, 64, 16)
    sampler = TokenSampler(table)
    seen = [0] * VOCAB
    for seed in range(draws):
        add(table, "a", params_of(asked, temperature=1.3, seed=seed, **cuts), prompt, output)
        (token,), _ = sampler.sample(logits, [state_of(table, "a")])
        table.remove("a")
        seen[token] += 1
    assert {token for token, count in enumerate(seen) if count} <= set(expected)
    for token, share in expected.items():
        spread = math.sqrt(draws * share * (1 - share))
        assert abs(seen[token] - draws * share) <= 5 * spread + 1e-9
