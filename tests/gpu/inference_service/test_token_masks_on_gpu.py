"""Structured output on a GPU, with a scripted matcher: the CPU's tokens, and no wait for the device."""

import torch

from inference_service.domain.sampling import SamplingParams
from inference_service.domain.step import NewRequest
from inference_service.domain.structured_output import StructuredOutput
from inference_service.execution.logit_changes import LogitChanges
from inference_service.execution.request_table import RequestState, RequestTable
from inference_service.execution.sampler import TokenSampler
from tests.support.device_waits import no_waiting
from tests.support.scripted_matcher import ScriptedMatcher

VOCAB, STEPS = 201_088, 6


def make_states(table: RequestTable) -> list[RequestState]:
    """Three constrained requests among others, one of them with much beside."""
    scripts = (
        None,
        lambda output: {len(output), VOCAB - 1, 4095, 4096, 77_777},
        None,
        lambda output: range(len(output), VOCAB, 1001),
        lambda output: {31, 32, 63, 64},
    )
    for index, script in enumerate(scripts):
        output = None if script is None else StructuredOutput("", matcher=ScriptedMatcher(script))
        sampling = SamplingParams(
            max_tokens=99,
            temperature=0.0 if index == 4 else 0.8,
            seed=index,
            top_k=20 if index == 3 else 0,
            repetition_penalty=1.3 if index == 3 else 1.0,
            structured_output=output,
        )
        table.add(NewRequest(str(index), (1, 2, 3), 3, sampling, (), 0, -1))
    return [table._states[str(index)] for index in range(len(scripts))]


def test_tokens_are_the_cpus() -> None:
    """Step after step; a rounding may part one request."""
    tokens: dict[str, list[list[int]]] = {}
    for device in ("cpu", "cuda"):
        generator = torch.Generator().manual_seed(3)
        table = RequestTable(8, 64, 16)
        states, sampler = make_states(table), TokenSampler(table)
        tokens[device] = []
        for _ in range(STEPS):
            logits = (torch.randn(len(states), VOCAB, generator=generator) * 3).to(torch.bfloat16)
            chosen, _ = sampler.sample(logits.to(device), states)
            assert chosen[1] in {state.num_output_tokens for state in states} | {
                4095,
                4096,
                77_777,
                VOCAB - 1,
            }
            assert chosen[4] in {31, 32, 63, 64}
            for state, token in zip(states, chosen, strict=True):
                table.append(state, token)
            tokens[device].append(chosen)
    by_request = [list(zip(*tokens[device], strict=True)) for device in ("cpu", "cuda")]
    assert sum(a != b for a, b in zip(*by_request, strict=True)) <= 1


def test_masks_do_not_wait_for_the_device() -> None:
    """They are made on the host and copied from pinned memory."""
    table = RequestTable(8, 64, 16)
    states, changes = make_states(table), LogitChanges(table)
    logits = torch.randn(len(states), VOCAB, device="cuda")
    changes.apply(logits, states)  # compiles, and makes the pinned memory that later copies take
    with no_waiting():
        for _ in range(2):
            changes.apply(logits, states)
