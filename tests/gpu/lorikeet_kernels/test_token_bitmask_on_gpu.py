"""Bit masks on a GPU against the reference on a CPU, at gpt-oss's vocabulary and beside it."""

import pytest
import torch

from lorikeet_kernels.sampling.token_bitmask import num_mask_words, token_bitmask, token_bitmask_reference
from tests.support.device_waits import no_waiting

GPU = torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [50, 4096, 128_257, 201_088])
def test_rows_in_any_order(vocab: int, dtype: torch.dtype) -> None:
    """Bit for bit; rows that are not named keep theirs, and so does what lies behind the vocabulary."""
    generator = torch.Generator().manual_seed(vocab)
    whole = torch.randn(12, vocab + 7, generator=generator).to(dtype)
    masks = torch.randint(-(2**31), 2**31, (5, num_mask_words(vocab)), generator=generator, dtype=torch.int32)
    masks[1], masks[2] = 0, -1
    rows = torch.tensor([11, 0, 7, 3, 4])
    expected = whole.clone()
    token_bitmask_reference(expected[:, :vocab], masks, rows)
    got = whole.to(GPU)
    token_bitmask(got[:, :vocab], masks.to(GPU), rows.to(GPU))
    assert torch.equal(got.cpu(), expected)


def test_no_wait_for_the_device() -> None:
    """Nothing asks the device for a value."""
    logits = torch.randn(20, 9000, device=GPU)
    masks = torch.randint(-(2**31), 2**31, (20, num_mask_words(9000)), dtype=torch.int32, device=GPU)
    rows = torch.arange(20, device=GPU)
    token_bitmask(logits, masks, rows)
    with no_waiting():
        token_bitmask(logits, masks, rows)
