"""Penalties against a loop in float64; misfits."""

import pytest
import torch

from lorikeet_kernels.sampling.penalties import IN_OUTPUT, IN_PROMPT, Penalties, penalize
from tests.support.sampling_reference import Asked, changed


def make_penalties(counts: torch.Tensor, asked: list[Asked], rows: list[int], slots: list[int]) -> Penalties:
    """Of these requests."""
    return Penalties(
        counts,
        torch.tensor(rows, dtype=torch.int64),
        torch.tensor(slots, dtype=torch.int64),
        torch.tensor([a.repetition_penalty for a in asked]),
        torch.tensor([a.frequency_penalty for a in asked]),
        torch.tensor([a.presence_penalty for a in asked]),
    )


def test_against_a_loop() -> None:
    """Each combination of prompt and output, both signs of logits; unnamed rows keep their bits."""
    generator = torch.Generator().manual_seed(0)
    vocab, asked = 300, [Asked(1.0, 0.3, 1.5), Asked(-2.0, -0.1, 0.7), Asked()]
    prompts = [torch.randint(0, vocab, (50,), generator=generator).tolist() for _ in asked]
    outputs = [torch.randint(0, 60, (200,), generator=generator).tolist() for _ in asked]
    slots, rows = [4, 0, 2], [1, 3, 0]
    counts = torch.randint(0, 9, (5, vocab), generator=generator, dtype=torch.int32)
    for slot, prompt, output in zip(slots, prompts, outputs, strict=True):
        counts[slot] = IN_OUTPUT * torch.bincount(torch.tensor(output), minlength=vocab)
        counts[slot, prompt] += IN_PROMPT
    logits = torch.randn(4, vocab, generator=generator) * 5
    logits[1, 8] = float("-inf")
    before = logits.clone()
    penalize(logits, make_penalties(counts, asked, rows, slots))
    for row, prompt, output, one in zip(rows, prompts, outputs, asked, strict=True):
        expected = torch.tensor(changed(before[row].tolist(), prompt, output, one))
        torch.testing.assert_close(logits[row], expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(logits[[0, 2]], before[[0, 2]])


def test_misfits_are_refused() -> None:
    """Another vocabulary, another type."""
    counts = torch.zeros(2, 5, dtype=torch.int32)
    with pytest.raises(ValueError, match="do not fit"):
        penalize(torch.zeros(1, 6), make_penalties(counts, [Asked()], [0], [0]))
    with pytest.raises(ValueError, match="float32 logits"):
        penalize(torch.zeros(1, 5, dtype=torch.float16), make_penalties(counts, [Asked()], [0], [0]))
