"""Dense and grouped projections, their row independence, activation and sum."""

import math
from functools import partial
from typing import cast

import pytest
import torch

from lorikeet_kernels.dense.embedding import embedding
from lorikeet_kernels.dense.gated_activation import GatedActivation, activate_rows, gated_activation
from lorikeet_kernels.dense.linear import linear
from lorikeet_kernels.dense.row_order import RowOrder
from lorikeet_kernels.experts.expert_blocks import ExpertBlocks
from lorikeet_kernels.experts.expert_gemm import expert_gemm
from lorikeet_kernels.experts.expert_linear import expert_linear
from lorikeet_kernels.experts.moe_experts import ExpertProjection, moe_experts
from lorikeet_kernels.experts.moe_sum import SharedRows, moe_sum, moe_sum_parts, sum_pairs
from lorikeet_kernels.experts.mxfp4 import Mxfp4Weight
from lorikeet_kernels.experts.mxfp4_layout import lay_out_mxfp4
from lorikeet_kernels.lora.lora_segments import make_lora_segments
from lorikeet_kernels.lora.moe_groups import MoeGroups, make_moe_groups
from lorikeet_kernels.lora.output_lanes import gate_up_lanes
from lorikeet_kernels.tiling.expert_tiles import ExpertTiles

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
DTYPES = list(TOLERANCE)


def make_groups(topk_ids: torch.Tensor, num_experts: int) -> MoeGroups:
    """Groups of a batch without adapters."""
    slots = torch.full((topk_ids.shape[0],), -1, dtype=torch.int32)
    return make_moe_groups(topk_ids, make_lora_segments(slots, 1), num_experts)


def route(tokens: int, top_k: int, num_experts: int, popularity: str) -> torch.Tensor:
    """Distinct experts for each token, or the same for all."""
    if popularity == "identical":
        return torch.arange(top_k, dtype=torch.int32).expand(tokens, -1).contiguous()
    return torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(tokens)]).to(torch.int32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("popularity", ["identical", "uniform"])
@pytest.mark.parametrize(("tokens", "top_k", "num_experts"), [(1, 1, 1), (1, 2, 8), (7, 2, 3), (300, 3, 13)])
def test_expert_linear(
    tokens: int, top_k: int, num_experts: int, popularity: str, dtype: torch.dtype
) -> None:
    """gate_up's and down's form against one matrix-vector product a pair, with bias and routed weights."""
    ids = route(tokens, top_k, num_experts, popularity)
    groups = make_groups(ids, num_experts)
    weight, bias = torch.randn(num_experts, 12, 20).to(dtype), torch.randn(num_experts, 12).to(dtype)
    routed = torch.rand(tokens, top_k)
    for x in (torch.randn(tokens, 20).to(dtype), torch.randn(tokens, top_k, 20).to(dtype)):
        out = torch.full((tokens, top_k, 12), float("nan"), dtype=dtype)
        expert_linear(x, weight, groups, out, bias=bias, topk_weights=routed)
        for t in range(tokens):
            for k in range(top_k):
                row, expert = (x[t] if x.dim() == 2 else x[t, k]), int(ids[t, k])
                expected = (weight[expert].double() @ row.double() + bias[expert]) * routed[t, k]
                assert torch.allclose(
                    out[t, k].double(), expected, atol=8 * TOLERANCE[dtype], rtol=TOLERANCE[dtype]
                )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out_features", "in_features"), [(96, 64), (64, 48), (300, 257), (2048, 256)])
def test_routing_of_neighbours_changes_no_bit(
    out_features: int, in_features: int, dtype: torch.dtype
) -> None:
    """Rows of one expert keep their bits however many others share it, at any place among them."""
    weight = torch.randn(8, out_features, in_features).to(dtype)
    for tokens in (3, 40, 300):
        x = torch.randn(tokens, in_features).to(dtype)
        x[-1] = x[0]
        results: list[torch.Tensor] = []
        for popularity in ("identical", "uniform", "uniform"):
            ids = route(tokens, 2, 8, popularity)
            ids[0] = ids[-1] = torch.tensor([3, 5])
            out = torch.empty(tokens, 2, out_features, dtype=dtype)
            expert_linear(x, weight, make_groups(ids, 8), out)
            results.extend((out[0], out[-1]))
        assert all(torch.equal(result, results[0]) for result in results[1:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out_features", "in_features"), [(96, 64), (300, 257), (2048, 256)])
def test_batch_invariant(out_features: int, in_features: int, dtype: torch.dtype) -> None:
    """Any prefix of the rows gives the same bits, dense and grouped."""
    x, weight = torch.randn(65, in_features).to(dtype), torch.randn(2, out_features, in_features).to(dtype)
    groups = make_groups(torch.zeros(65, 1, dtype=torch.int32), 2)
    whole = linear(x, weight[0], batch_invariant=True)
    grouped = expert_linear(x, weight, groups, whole.new_empty(65, 1, out_features), batch_invariant=True)
    for rows in (*range(1, 20), 33, 63, 64):
        assert torch.equal(linear(x[:rows], weight[0], batch_invariant=True), whole[:rows])
        groups = make_groups(torch.zeros(rows, 1, dtype=torch.int32), 2)
        out = whole.new_empty(rows, 1, out_features)
        expert_linear(x[:rows], weight, groups, out, batch_invariant=True)
        assert torch.equal(out, grouped[:rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_with_bias(dtype: torch.dtype) -> None:
    """Against float64, rounding once."""
    x, weight, bias = torch.randn(7, 13).to(dtype), torch.randn(5, 13).to(dtype), torch.randn(5).to(dtype)
    expected = x.double() @ weight.double().T + bias
    assert torch.allclose(
        linear(x, weight, bias).double(), expected, atol=4 * TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row_order", ["concatenated", "interleaved"])
@pytest.mark.parametrize(
    ("alpha", "limit", "up_offset"), [(1.0, None, 0.0), (1.702, 7.0, 1.0), (0.5, 2.0, -0.25)]
)
def test_gated_activation(
    alpha: float, limit: float | None, up_offset: float, row_order: RowOrder, dtype: torch.dtype
) -> None:
    """Both row orders; element by element in Python's floats, the gate clamped above only."""
    gate, up = (5 * torch.randn(3, 2, 7)).to(dtype), (5 * torch.randn(3, 2, 7)).to(dtype)
    fused = (
        torch.stack((gate, up), dim=-1).flatten(-2)
        if row_order == "interleaved"
        else torch.cat((gate, up), dim=-1)
    )
    got = gated_activation(fused, GatedActivation(alpha, limit, up_offset), row_order=row_order)
    assert got.dtype == dtype
    for g, u, y in zip(gate.flatten().tolist(), up.flatten().tolist(), got.flatten().tolist(), strict=True):
        bound = math.inf if limit is None else limit
        h = min(g, bound)
        expected = h / (1 + math.exp(-alpha * h)) * (max(-bound, min(u, bound)) + up_offset)
        assert y == pytest.approx(expected, abs=TOLERANCE[dtype], rel=TOLERANCE[dtype])


def test_gated_activation_keeps_what_is_not_a_number() -> None:
    """A clamp must not turn a broken row into a plausible one."""
    for place in range(2):
        fused = torch.ones(2)
        fused[place] = math.nan
        assert gated_activation(fused, GatedActivation(1.702, 7.0, 1.0)).isnan().all()


def test_moe_sum_rounds_once() -> None:
    """Terms that bfloat16 would lose one by one are kept."""
    x = torch.tensor([[[256.0], [1.0], [1.0]]], dtype=torch.bfloat16)
    assert moe_sum(x).item() == 258.0


def test_embedding_is_a_copy() -> None:
    """Rows by id, and writing to them leaves the table alone."""
    weight = torch.randn(5, 3)
    rows = embedding(torch.tensor([4, 0, 4]), weight)
    assert torch.equal(rows, torch.stack((weight[4], weight[0], weight[4])))
    rows.zero_()
    assert weight.abs().sum() > 0


def test_misfits_are_refused() -> None:
    """Shapes are named."""
    groups = make_groups(torch.zeros(2, 1, dtype=torch.int32), 1)
    with pytest.raises(ValueError, match="does not fit x"):
        expert_linear(torch.ones(2, 4), torch.ones(1, 3, 5), groups, torch.empty(2, 1, 3))
    with pytest.raises(ValueError, match="contiguous"):
        expert_linear(torch.ones(2, 4), torch.ones(1, 3, 4), groups, torch.empty(2, 2, 3))
    with pytest.raises(ValueError, match="does not fit x"):
        linear(torch.ones(2, 4), torch.ones(3, 5))
    with pytest.raises(ValueError, match="odd"):
        gated_activation(torch.ones(2, 5))
    with pytest.raises(ValueError, match=r"\[T, K, H\]"):
        moe_sum(torch.ones(2, 5))


def test_rows_that_a_sum_does_not_take() -> None:
    """None is broadcast, changes the result's dtype or is read with strides that it lacks: also on a CPU."""
    x, y = torch.ones(2, 3, 8).bfloat16(), torch.ones(2, 8).bfloat16()
    parts, ids, weights = torch.ones(2, 2, 3, 8), torch.zeros(2, 3, dtype=torch.int32), torch.ones(2, 3)
    sums = (
        lambda shared, delta=None: moe_sum_parts(
            parts, torch.empty_like(y), ids, weights, delta=delta, shared=shared
        ),
        lambda shared, delta=None: sum_pairs(x, torch.empty_like(y), delta=delta, shared=shared),
    )
    wrong = (
        SharedRows(y[:1]), SharedRows(y.float()), SharedRows(y.T.contiguous().T),
        SharedRows(y, y), SharedRows(y, y[:1].float()), SharedRows(y, y.float().T.contiguous().T),
    )  # fmt: skip
    for shared in wrong:
        for add_up in (partial(moe_sum, x), *sums):
            with pytest.raises(ValueError, match="moe_sum: added rows"):
                add_up(shared)
    for delta in (x[:1], x.float(), x.transpose(0, 1).contiguous().transpose(0, 1)):
        for add_up in sums:
            with pytest.raises(ValueError, match="moe_sum: added rows"):
                add_up(None, delta)
    assert moe_sum(x, SharedRows(y, y.float())).dtype == torch.bfloat16


def test_unknown_row_order_is_refused() -> None:
    """By the reference, the launch, the layout of MXFP4, the GEMMs and what describes columns to kernels."""
    order = cast("RowOrder", "halves")
    rows, act = torch.zeros(3, 8), torch.zeros(3, 4)
    blocks = ExpertBlocks(torch.zeros(3, dtype=torch.int32), torch.zeros(1, 4, dtype=torch.int32), 16, 2, 1)
    weight, tiles = torch.zeros(2, 8, 4), ExpertTiles("decode", 16, 64, 128, 3, 4)
    packed = Mxfp4Weight(*(torch.zeros(1, 16, 1, *last, dtype=torch.uint8) for last in ((16,), ())))
    calls = (
        lambda: gated_activation(rows, row_order=order),
        lambda: activate_rows(rows, act, GatedActivation(), order),
        lambda: gate_up_lanes(8, order),
        lambda: lay_out_mxfp4(packed, pairing=order),
        lambda: expert_gemm(act, weight, blocks, act, tiles, activation=GatedActivation(), row_order=order),
    )
    for call in calls:
        with pytest.raises(ValueError, match="row_order 'halves'"):
            call()


def test_fused_experts_on_a_cpu_name_the_references() -> None:
    """Rather than Triton's missing driver."""
    gate_up = ExpertProjection(torch.zeros(2, 8, 4), None, "concatenated")
    down = ExpertProjection(torch.zeros(2, 4, 4), None, None)
    ids = torch.zeros(3, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="on a CPU call expert_linear"):
        moe_experts(torch.zeros(3, 4), torch.ones(3, 1), ids, gate_up, down, GatedActivation())
