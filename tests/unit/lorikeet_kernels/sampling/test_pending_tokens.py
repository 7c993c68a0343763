"""Tokens that the device alone knows, against a loop; misfits."""

import pytest
import torch

from lorikeet_kernels.sampling.pending_tokens import pending_tokens


def test_against_a_loop() -> None:
    """Known ids stay, pending ones come from their place, a place without a token gives 0."""
    sampled = torch.tensor([11, 12, -1, 14])
    ids = torch.tensor([5, -1, 0, -4, -3, -2, 7])
    expected = [max(0, int(sampled[-1 - i])) if i < 0 else int(i) for i in ids.tolist()]
    assert expected == [5, 11, 0, 14, 0, 12, 7]
    before = ids.clone()
    assert pending_tokens(ids, sampled).tolist() == expected
    assert torch.equal(ids, before)
    assert pending_tokens(ids[:0], sampled).shape == (0,)


def test_misfits_are_refused() -> None:
    """Other types, other shapes."""
    with pytest.raises(ValueError, match="int64 vectors"):
        pending_tokens(torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="int64 vectors"):
        pending_tokens(torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))
