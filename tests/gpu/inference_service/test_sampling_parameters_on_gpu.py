"""The sampler of a batch with every parameter on a GPU: the CPU's tokens, and no wait before the tokens."""

import dataclasses

import pytest
import torch

from inference_service.domain.sampling import SamplingParams
from inference_service.domain.step import NewRequest
from inference_service.execution.logit_changes import LogitChanges
from inference_service.execution.request_table import RequestState, RequestTable
from inference_service.execution.sampler import TokenSampler
from tests.support.device_waits import no_waiting

VOCAB, STEPS = 32_000, 12
PLAIN = SamplingParams(max_tokens=99, temperature=0.9, top_k=40, top_p=0.95)
FULL = SamplingParams(
    max_tokens=99,
    temperature=0.8,
    top_k=100,
    min_p=0.01,
    presence_penalty=0.5,
    frequency_penalty=0.25,
    repetition_penalty=1.3,
    logit_bias=tuple((token, 0.5) for token in range(0, VOCAB, 100)),
    min_tokens=5,
    held_back_token_ids=(2, 17),
    bad_words=((5,), (6, 7)),
)
REQUESTS = {
    "plain": PLAIN,
    "full": FULL,
    "greedy": dataclasses.replace(FULL, temperature=0.0),
    "biased": dataclasses.replace(PLAIN, logit_bias=((9, 4.0),)),
}


def make_states(table: RequestTable) -> list[RequestState]:
    """All of them, with a prompt and some output."""
    for seed, (name, sampling) in enumerate(REQUESTS.items()):
        tokens = tuple(range(seed, 300 + seed))
        table.add(NewRequest(name, tokens, 250, dataclasses.replace(sampling, seed=seed), (), 0, -1))
    return [table._states[name] for name in REQUESTS]


def test_tokens_are_the_cpus() -> None:
    """Step after step, each fed with its own tokens; a rounding may part one request of the four."""
    tokens: dict[str, list[list[int]]] = {}
    for device in ("cpu", "cuda"):
        generator = torch.Generator().manual_seed(3)
        table = RequestTable(8, 1024, 16)
        states, sampler = make_states(table), TokenSampler(table)
        tokens[device] = []
        for _ in range(STEPS):
            logits = (torch.randn(len(states), VOCAB, generator=generator) * 3).to(torch.bfloat16)
            chosen, _ = sampler.sample(logits.to(device), states)
            for state, token in zip(states, chosen, strict=True):
                table.append(state, token)
            tokens[device].append(chosen)
    by_request = [list(zip(*tokens[device], strict=True)) for device in ("cpu", "cuda")]
    assert sum(a != b for a, b in zip(*by_request, strict=True)) <= 1


def test_changes_do_not_wait_for_the_device() -> None:
    """Neither the first step, which fills the counts, nor a later one."""
    table = RequestTable(8, 1024, 16)
    states, changes = make_states(table), LogitChanges(table)
    logits = torch.randn(len(states), VOCAB, device="cuda")
    chosen = torch.arange(len(states), device="cuda")
    changes.apply(logits, states)  # compiles, and makes the pinned memory that later copies take
    for state in states:
        state.is_counted = False
    with no_waiting():
        for _ in range(2):
            changes.apply(logits, states)
            changes.count(chosen, states)


@pytest.mark.parametrize("num_requests", [1, 3, 8])
def test_plain_requests_launch_what_they_did(num_requests: int) -> None:
    """Their logits go to the sampler as they are, and nothing is allocated for them."""
    table = RequestTable(8, 1024, 16)
    for index in range(num_requests):
        table.add(NewRequest(str(index), (1, 2), 2, PLAIN, (), 0, -1))
    changes = LogitChanges(table)
    logits = torch.randn(num_requests, VOCAB, device="cuda")
    before = torch.cuda.memory_allocated()
    assert changes.apply(logits, [table._states[str(i)] for i in range(num_requests)]) is logits
    assert torch.cuda.memory_allocated() == before
