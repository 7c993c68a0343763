"""Bit masks against a loop over tokens; misfits."""

import pytest
import torch

from lorikeet_kernels.sampling.token_bitmask import num_mask_words, token_bitmask


def packed(allowed: list[list[bool]]) -> torch.Tensor:
    """A bit each, as two's complement words."""
    masks = torch.zeros((len(allowed), num_mask_words(len(allowed[0]))), dtype=torch.int64)
    for row, tokens in enumerate(allowed):
        for token, is_allowed in enumerate(tokens):
            masks[row, token // 32] |= int(is_allowed) << (token % 32)
    return torch.where(masks >= 2**31, masks - 2**32, masks).to(torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 300])
def test_against_a_loop(vocab: int, dtype: torch.dtype) -> None:
    """Words' first and last bits among them; what is allowed, NaN too, and unnamed rows keep their bits."""
    generator = torch.Generator().manual_seed(vocab)
    allowed = (torch.rand(3, vocab, generator=generator) < 0.5).tolist()
    rows = [4, 0, 2]
    logits = torch.randn(5, vocab, generator=generator).to(dtype)
    logits[2, 0] = float("nan")
    before = logits.clone()
    token_bitmask(logits, packed(allowed), torch.tensor(rows))
    for row, tokens in zip(rows, allowed, strict=True):
        for token, is_allowed in enumerate(tokens):
            if is_allowed:
                assert torch.equal(logits[row, token].isnan(), before[row, token].isnan())
                assert torch.equal(logits[row, token].nan_to_num(), before[row, token].nan_to_num())
            else:
                assert logits[row, token] == float("-inf")
    assert torch.equal(logits[[1, 3]], before[[1, 3]])


def test_all_and_nothing() -> None:
    """Full words change nothing; empty ones leave no token."""
    logits = torch.randn(2, 70)
    before = logits.clone()
    token_bitmask(logits, torch.tensor([[-1] * 3, [0] * 3], dtype=torch.int32), torch.tensor([0, 1]))
    assert torch.equal(logits[0], before[0])
    assert bool((logits[1] == float("-inf")).all())
    token_bitmask(logits, torch.zeros((0, 3), dtype=torch.int32), torch.zeros(0, dtype=torch.int64))
    assert torch.equal(logits[0], before[0])


@pytest.mark.parametrize(
    "masks",
    [
        torch.zeros((1, 2), dtype=torch.int32),
        torch.zeros((2, 3), dtype=torch.int32),
        torch.zeros((1, 3), dtype=torch.int64),
    ],
)
def test_misfits_are_refused(masks: torch.Tensor) -> None:
    """Another vocabulary, another number of rows, another type."""
    with pytest.raises(ValueError, match=r"masks \(1, 3\) belong to logits \(4, 70\)"):
        token_bitmask(torch.zeros(4, 70), masks, torch.tensor([0]))
