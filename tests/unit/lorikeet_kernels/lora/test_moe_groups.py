"""Segments and groups: who comes where."""

import pytest
import torch

from lorikeet_kernels.lora.lora_segments import make_lora_segments
from lorikeet_kernels.lora.moe_groups import make_moe_groups


def test_segments_list_base_first_then_slots_in_batch_order() -> None:
    """Order and indptr cut the batch into base, slot 0, slot 1, …; empty slots have empty segments."""
    segments = make_lora_segments(torch.tensor([2, -1, 0, 2, -1], dtype=torch.int32), 4)
    assert segments.order.tolist() == [1, 4, 2, 0, 3]
    assert segments.indptr.tolist() == [0, 2, 3, 3, 5, 5]


def test_all_base() -> None:
    """A batch without adapters has one segment."""
    segments = make_lora_segments(torch.full((3,), -1, dtype=torch.int32), 1)
    assert segments.indptr.tolist() == [0, 3, 3]


def test_wrong_dtype_is_refused() -> None:
    """int64 slots are refused by name."""
    with pytest.raises(ValueError, match="token_slot"):
        make_lora_segments(torch.zeros(3, dtype=torch.int64), 1)


@pytest.mark.parametrize("num_tokens", [1, 7, 13, 300])
def test_groups_partition_the_pairs(num_tokens: int) -> None:
    """Order sorts the pairs by (expert, slot), expert_indptr bounds experts, base pairs are in no group."""
    generator = torch.Generator().manual_seed(num_tokens)
    ids = torch.rand(num_tokens, 9, generator=generator).topk(3, dim=1).indices.to(torch.int32)
    slots = torch.randint(-1, 4, (num_tokens,), generator=generator, dtype=torch.int32)
    groups = make_moe_groups(ids, make_lora_segments(slots, 4), 9)
    order = groups.order.tolist()
    assert sorted(order) == list(range(3 * num_tokens))
    keys = [(int(ids.view(-1)[p]), int(slots[p // 3]), p) for p in order]
    assert keys == sorted(keys)
    for e in range(9):
        start, end = groups.expert_indptr[e], groups.expert_indptr[e + 1]
        assert all(key[0] == e for key in keys[start:end])
    walked = [
        (int(expert), chosen.slot, int(pair))
        for chosen in groups.slot_pairs
        for expert, pair, token in zip(chosen.experts, chosen.pairs, chosen.tokens, strict=True)
        if token == pair // 3
    ]
    assert sorted(walked) == [key for key in keys if key[1] >= 0]


def test_token_counts_must_agree() -> None:
    """Ids of another batch are refused."""
    segments = make_lora_segments(torch.zeros(3, dtype=torch.int32), 1)
    with pytest.raises(ValueError, match="must agree"):
        make_moe_groups(torch.zeros((4, 2), dtype=torch.int32), segments, 2)


@pytest.mark.parametrize("slots", [[0, 7, 1], [0, -2, 1], [2, 0, 0]])
def test_slots_that_do_not_exist_are_refused(slots: list[int]) -> None:
    """Their rows would come out as the base model's."""
    with pytest.raises(ValueError, match="pass -1 to 1"):
        make_lora_segments(torch.tensor(slots, dtype=torch.int32), 2)


@pytest.mark.parametrize("expert", [-1, 4, 99])
def test_experts_that_do_not_exist_are_refused(expert: int) -> None:
    """By the number, where they are grouped."""
    ids = torch.tensor([[0, 1], [2, expert]], dtype=torch.int32)
    segments = make_lora_segments(torch.zeros(2, dtype=torch.int32), 1)
    with pytest.raises(ValueError, match=f"{expert}.*pass 0 to 3"):
        make_moe_groups(ids, segments, 4)


def test_ids_that_the_ops_refuse_make_no_groups() -> None:
    """int64 and transposed ones."""
    segments = make_lora_segments(torch.zeros(3, dtype=torch.int32), 1)
    for ids in (torch.zeros((3, 2), dtype=torch.int64), torch.zeros((2, 3), dtype=torch.int32).T):
        with pytest.raises(ValueError, match="contiguous int32"):
            make_moe_groups(ids, segments, 2)
