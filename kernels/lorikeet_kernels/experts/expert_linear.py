"""Grouped GEMM over the experts: each (token, expert) pair times its expert's matrix.

    y[t, k] = W[expert] x + bias[expert], times topk_weights[t, k] where given;   expert = topk_ids[t, k]

Shapes: x [T, in] (gate_up: a token's experts share its row) or [T, K, in] (down); weight [E, out, in]; bias
[E, out]; topk_weights [T, K] float32; out [T, K, out], contiguous. The weight may be an Mxfp4Weight, whose
values are unpacked exactly, or an Fp8Weight, which takes x quantised as it says (`quantize_rows`).
Accumulates in float32, rounds once to out's dtype. A pair's result depends on neither the pairs beside it nor
their number: an adapter that reroutes its own tokens leaves everybody else's bits alone.
"""

from itertools import pairwise

import torch
from torch.nn import functional as F

from lorikeet_kernels.dense.fp8_weight import Fp8Weight, dequantize_fp8
from lorikeet_kernels.dense.quantize_rows import dequantize_rows, quantize_rows_reference
from lorikeet_kernels.experts.mxfp4 import Mxfp4Weight, dequantize_mxfp4_expert
from lorikeet_kernels.lora.moe_groups import MoeGroups

ExpertWeight = torch.Tensor | Mxfp4Weight | Fp8Weight
"""[E, out, in], in the compute dtype, packed or quantised."""

_TILES = (4, 16, 64)


def expert_linear_reference(
    x: torch.Tensor,
    weight: ExpertWeight,
    groups: MoeGroups,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """See `expert_linear`."""
    if isinstance(weight, Fp8Weight):
        x = dequantize_rows(quantize_rows_reference(x, weight.activations))
    # How many rows an expert has changes with the neighbours' routing, and a BLAS picks its order of
    # additions by the number of rows. So every GEMM here has the same number, `tile`, which depends on the
    # batch's shape only. Row-by-row products over gathered weights would do too, but copy [pairs, out, in].
    tile = _TILES[0] if batch_invariant else _tile_rows(out.shape[0] * groups.top_k, groups.num_experts)
    order = groups.order.to(torch.int64)
    tile_experts, places = _layout(groups.expert_indptr.tolist(), tile)
    place = torch.tensor(places, device=x.device)
    # Rows that only fill up a tile repeat pair 0; they are never read.
    source = order.new_zeros(len(tile_experts) * tile).index_copy_(0, place, order)
    rows = (
        x.index_select(0, source // groups.top_k) if x.dim() == 2 else x.flatten(0, 1).index_select(0, source)
    )
    parts: list[torch.Tensor] = []
    matrix, held = torch.empty(0), -1
    tiles = rows.float().view(len(tile_experts), tile, -1).unbind()
    for expert, part in zip(tile_experts, tiles, strict=True):
        if expert != held:  # an expert's tiles follow one another
            matrix, held = _matrix(weight, expert), expert
        parts.append(F.linear(part, matrix, None if bias is None else bias[expert].float()))
    result = torch.cat(parts).index_select(0, place)
    if topk_weights is not None:
        result *= topk_weights.flatten().index_select(0, order).unsqueeze(1)
    out.flatten(0, 1).index_copy_(0, order, result.to(out.dtype))
    return out


def _matrix(weight: ExpertWeight, expert: int) -> torch.Tensor:
    if isinstance(weight, Mxfp4Weight):
        return dequantize_mxfp4_expert(weight, expert, torch.float32)
    if isinstance(weight, Fp8Weight):
        return dequantize_fp8(weight.expert(expert), torch.float32)
    return weight[expert].float()


def _tile_rows(num_pairs: int, num_experts: int) -> int:
    """Rows of a GEMM: about what an expert gets if all get equally many."""
    return next((tile for tile in _TILES if num_pairs <= tile * num_experts), _TILES[-1])


def _layout(bounds: list[int], tile: int) -> tuple[list[int], list[int]]:
    """Each expert's pairs in whole tiles of their own: the expert of every tile, the row of every pair."""
    tile_experts: list[int] = []
    places: list[int] = []
    for expert, (begin, end) in enumerate(pairwise(bounds)):
        first = len(tile_experts) * tile
        places.extend(range(first, first + end - begin))
        tile_experts.extend([expert] * -(-(end - begin) // tile))
    return tile_experts, places


def expert_linear(
    x: torch.Tensor,
    weight: ExpertWeight,
    groups: MoeGroups,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Write every pair's product into `out` and return it.

    With `batch_invariant` a pair's bits do not depend on the number of tokens either.
    """
    if weight.shape != (groups.num_experts, out.shape[-1], x.shape[-1]):
        raise ValueError(
            f"expert_linear: weight {tuple(weight.shape)} does not fit x {tuple(x.shape)}, "
            f"out {tuple(out.shape)} and {groups.num_experts} experts"
        )
    if out.shape[1] != groups.top_k or not out.is_contiguous():
        raise ValueError(f"expert_linear: out {tuple(out.shape)} must be contiguous [T, {groups.top_k}, out]")
    return expert_linear_reference(
        x, weight, groups, out, bias=bias, topk_weights=topk_weights, batch_invariant=batch_invariant
    )
