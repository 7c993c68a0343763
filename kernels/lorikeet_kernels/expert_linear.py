"""Grouped GEMM over the experts: each (token, expert) pair times its expert's matrix.

    y[t, k] = W[expert] x + bias[expert], times topk_weights[t, k] where given;   expert = topk_ids[t, k]

Shapes: x [T, in] (gate_up: a token's experts share its row) or [T, K, in] (down); weight [E, out, in]; bias
[E, out]; topk_weights [T, K] float32; out [T, K, out], contiguous. Accumulates in float32, rounds once to
out's dtype. A pair's result depends on neither the pairs beside it nor their number: an adapter that reroutes
its own tokens leaves everybody else's bits alone.
"""

import torch

from lorikeet_kernels.linear import float32_rows
from lorikeet_kernels.moe_groups import MoeGroups


def expert_linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    groups: MoeGroups,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `expert_linear`."""
    order = groups.order.to(torch.int64)
    # index_select and index_copy_ cost a quarter of the same by [] on a CPU (4 us against 16 us a call).
    rows = (
        x.index_select(0, order // groups.top_k) if x.dim() == 2 else x.flatten(0, 1).index_select(0, order)
    )
    bounds = groups.expert_indptr.tolist()
    parts: list[torch.Tensor] = []
    for expert in range(groups.num_experts):
        begin, end = bounds[expert], bounds[expert + 1]
        if begin == end:
            continue
        # One GEMM an expert, its rows filled up to a multiple of ROW_TILE: their number changes with the
        # neighbours' routing, their bits must not. Row-by-row products over gathered weights would do as
        # well, but copy [pairs, out, in].
        part = float32_rows(rows[begin:end].float(), weight[expert].float())
        parts.append(part if bias is None else part + bias[expert])
    result = torch.cat(parts)
    if topk_weights is not None:
        result *= topk_weights.flatten().index_select(0, order).unsqueeze(1)
    out.flatten(0, 1).index_copy_(0, order, result.to(out.dtype))
    return out


def expert_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    groups: MoeGroups,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write every pair's product into `out` and return it."""
    if weight.shape != (groups.num_experts, out.shape[-1], x.shape[-1]):
        raise ValueError(
            f"expert_linear: weight {tuple(weight.shape)} does not fit x {tuple(x.shape)}, "
            f"out {tuple(out.shape)} and {groups.num_experts} experts"
        )
    if out.shape[1] != groups.top_k or not out.is_contiguous():
        raise ValueError(f"expert_linear: out {tuple(out.shape)} must be contiguous [T, {groups.top_k}, out]")
    return expert_linear_reference(x, weight, groups, out, bias=bias, topk_weights=topk_weights)
