"""What lies between the fused projection and attention, and the experts' cut, on a CPU."""

import pytest
import torch

from lorikeet_kernels.attention.attention_inputs import attention_inputs
from lorikeet_kernels.attention.head_norm import head_norm
from lorikeet_kernels.attention.kv_scales import FP8, KvScales
from lorikeet_kernels.attention.kv_write import kv_write
from lorikeet_kernels.attention.rotary import rotary
from lorikeet_kernels.experts.expert_blocks import block_capacity, expert_blocks
from lorikeet_kernels.experts.moe_sum import moe_sum_parts


def test_one_call_is_three() -> None:
    """Norm, rotation and cache write one after the other give the same bits."""
    heads = torch.randn(5, 10, 16)
    weight, table = torch.rand(8, 16), torch.randn(30, 2, 8)
    positions, slots = torch.tensor([3, 29, 0, 7, 7]), torch.tensor([8, 1, 0, 5, 11])
    caches = [torch.zeros(3, 4, 2, 16) for _ in range(4)]
    mine = heads.clone()
    q = attention_inputs(
        mine, caches[0], caches[1], slots, norm_weight=weight, eps=1e-5, positions=positions, table=table
    )
    head_norm(heads[:, :8], weight, 1e-5)
    rotary(heads[:, :8], positions, table)
    kv_write(heads[:, 6:8], heads[:, 8:], caches[2], caches[3], slots)
    assert torch.equal(q, heads[:, :6])
    assert torch.equal(caches[0], caches[2])
    assert torch.equal(caches[1], caches[3])


def test_neighbours_turn_as_complex_numbers_and_are_normed_behind() -> None:
    """Llama 4's order, in float64: rotation of pairs, norm without a weight, a factor for queries alone."""
    heads = torch.randn(3, 8, 6)
    positions, slots = torch.tensor([0, 3, 17]), torch.tensor([2, 0, 3])
    angles = torch.arange(18, dtype=torch.float64)[:, None] / 100.0 ** (torch.arange(3) / 3)
    table, factors = torch.stack((angles.cos(), angles.sin()), 1).float(), torch.rand(18) + 0.5
    keys, values = torch.zeros(2, 1, 4, 2, 6).unbind(0)
    q = attention_inputs(
        heads.clone(), keys, values, slots, norm_weight=torch.ones(6, 6), eps=1e-5, positions=positions,
        table=table, interleaved=True, norms_rotated=True, factors=factors,
    )  # fmt: skip
    pairs = torch.view_as_complex(heads[:, :6].double().unflatten(-1, (3, 2)).contiguous())
    turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[positions, None])
    turned = turned.flatten(-2)
    normed = turned / (turned.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(
        q.double(), normed[:, :4] * factors[positions, None, None], atol=1e-5, rtol=1e-5
    )
    torch.testing.assert_close(keys[0, slots].double(), normed[:, 4:], atol=1e-5, rtol=1e-5)
    assert torch.equal(values[0, slots], heads[:, 6:])


def test_misfits_are_refused() -> None:
    """Caches of another width, norm weights of other heads, a table without positions, odd scales."""
    heads, cache, slots = torch.zeros(2, 6, 8), torch.zeros(1, 4, 2, 8), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="do not fit caches"):
        attention_inputs(heads, torch.zeros(1, 4, 2, 4), cache, slots)
    with pytest.raises(ValueError, match="norm weight"):
        attention_inputs(heads, cache, cache, slots, norm_weight=torch.zeros(3, 8))
    with pytest.raises(ValueError, match="need positions"):
        attention_inputs(heads, cache, cache, slots, table=torch.zeros(4, 2, 4))
    with pytest.raises(ValueError, match="does not fit heads of 8"):
        attention_inputs(heads, cache, cache, slots, table=torch.zeros(4, 2, 5), positions=slots)
    with pytest.raises(ValueError, match=r"float32 takes no scales"):
        attention_inputs(heads, cache, cache, slots, scales=KvScales(torch.ones(2), torch.ones(2)))
    with pytest.raises(ValueError, match="has no scales"):
        attention_inputs(heads, cache.to(FP8), cache.to(FP8), slots)
    with pytest.raises(ValueError, match=r"scales .* do not fit"):
        attention_inputs(
            heads, cache.to(FP8), cache.to(FP8), slots, scales=KvScales(torch.ones(3), torch.ones(2))
        )


@pytest.mark.parametrize(("tokens", "top_k", "experts", "rows"), [(1, 1, 1, 8), (7, 2, 5, 2), (40, 3, 4, 16)])
def test_blocks_cover_every_pair_once(tokens: int, top_k: int, experts: int, rows: int) -> None:
    """Each block is of one expert and no longer than it may be, and the bound on their number holds."""
    ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]).to(torch.int32)
    cut = expert_blocks(ids, experts, rows)
    seen: list[int] = []
    for first, count, expert, _ in cut.blocks.tolist():
        assert count <= rows
        pairs = cut.order[first : first + count].tolist()
        assert all(int(ids.flatten()[pair]) == expert for pair in pairs)
        seen += pairs
    assert sorted(seen) == list(range(tokens * top_k))
    assert cut.capacity == block_capacity(tokens * top_k, experts, rows)


def test_parts_are_summed_weighted_and_rounded_by_pair() -> None:
    """Against a loop in float64, in bfloat16 with a bias and a delta."""
    parts, weights = torch.randn(3, 2, 2, 5), torch.rand(2, 2)
    bias, delta = torch.randn(4, 5).bfloat16(), torch.randn(2, 2, 5).bfloat16()
    ids = torch.tensor([[0, 3], [2, 1]], dtype=torch.int32)
    out = moe_sum_parts(parts, torch.empty(2, 5).bfloat16(), ids, weights, bias=bias, delta=delta)
    for t in range(2):
        total = torch.zeros(5, dtype=torch.float64)
        for k in range(2):
            pair = (parts[:, t, k].double().sum(0) + bias[int(ids[t, k])].double()) * weights[t, k].double()
            total += (pair.bfloat16() + delta[t, k]).double()
        assert torch.allclose(out[t].double(), total, atol=0.05, rtol=0.01)
