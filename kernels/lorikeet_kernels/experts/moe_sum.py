"""Add up what a token's experts made of it.

    y[t] = sum_k x[t, k]            (routed weights are multiplied in already)

    y[t] = sum_k round(topk_weights[t, k] (sum_s parts[s, t, k] + bias[expert])) + delta[t, k]

    y[t] = round(y[t]) + round(shared[t] + shared_delta[t])     (where every token passes one more expert)

Shapes: x, delta [T, K, H]; parts [S, T, K, H] float32, what a split GEMM leaves; bias [E, H]; topk_weights
[T, K] float32; shared [T, H], shared_delta [T, H] float32; result [T, H]. Adds in float32, s and k ascending,
rounds once; each pair of `parts` is first rounded to the result's dtype, so that it has the bits of an x that
was stored, and delta's sum with it too.
"""

# A Triton kernel's arguments have no Python types, and its launch takes options that its signature lacks.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

BLOCK = 512


@dataclass(frozen=True, slots=True, eq=False)
class SharedRows:
    """What the expert that every token passes made, `y` [T, H], and what its adapters add, float32."""

    y: torch.Tensor
    delta: torch.Tensor | None = None


def moe_sum_reference(x: torch.Tensor, shared: SharedRows | None = None) -> torch.Tensor:
    """See `moe_sum`."""
    y = x.float().sum(dim=1).to(x.dtype)
    if shared is None:
        return y
    return y + (shared.y if shared.delta is None else (shared.y.float() + shared.delta).to(y.dtype))


def moe_sum_parts_reference(
    parts: torch.Tensor,
    out: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    delta: torch.Tensor | None = None,
    shared: SharedRows | None = None,
) -> torch.Tensor:
    """See `moe_sum_parts`."""
    pairs = parts.float().sum(dim=0)
    if bias is not None:
        pairs = pairs + bias.float()[topk_ids.to(torch.int64)]
    pairs = (pairs * topk_weights.unsqueeze(-1)).to(out.dtype)
    if delta is not None:
        pairs = pairs + delta
    return out.copy_(moe_sum_reference(pairs, shared))


@triton.jit(do_not_specialize=["num_tokens"])
def _moe_sum_kernel(
    out_ptr, x_ptr, ids_ptr, weights_ptr, bias_ptr, delta_ptr, shared_ptr, shared_delta_ptr, num_tokens,
    WIDTH: tl.constexpr, TOP_K: tl.constexpr, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_DELTA: tl.constexpr, HAS_SHARED: tl.constexpr, HAS_SHARED_DELTA: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """PARTS 0: x holds finished pairs; else that many float32 parts of each."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    dtype = out_ptr.dtype.element_ty
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        at = (token * TOP_K + k) * WIDTH + column
        if PARTS == 0:
            value = tl.load(x_ptr + at, mask=inside, other=0.0)
        else:
            pair = tl.zeros([BLOCK], tl.float32)
            for s in tl.static_range(PARTS):
                part_at = at + (num_tokens.to(tl.int64) * (s * TOP_K)) * WIDTH
                pair += tl.load(x_ptr + part_at, mask=inside, other=0.0)
            if HAS_BIAS:
                expert = tl.load(ids_ptr + token * TOP_K + k).to(tl.int64)
                pair += tl.load(bias_ptr + expert * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
            value = (pair * tl.load(weights_ptr + token * TOP_K + k)).to(dtype)
        if HAS_DELTA:
            delta = tl.load(delta_ptr + at, mask=inside, other=0.0)
            value = (value.to(tl.float32) + delta.to(tl.float32)).to(dtype)
        total += value.to(tl.float32)
    at = token * WIDTH + column
    if HAS_SHARED:
        shared = tl.load(shared_ptr + at, mask=inside, other=0.0)
        if HAS_SHARED_DELTA:
            shared = (shared.to(tl.float32) + tl.load(shared_delta_ptr + at, mask=inside, other=0.0)).to(
                dtype
            )
        total = total.to(dtype).to(tl.float32) + shared.to(tl.float32)
    tl.store(out_ptr + at, total.to(dtype), mask=inside)


def _dependent(x: torch.Tensor, *, is_dependent: bool) -> dict[str, bool]:
    """Launch options: on a GPU the launch overlaps with the end of the one before.

    Not where it also waits for another stream: a graph's edge from there is an ordinary one.
    """
    return {"PDL": True, "launch_pdl": True} if is_dependent and x.device.type == "cuda" else {"PDL": False}


def _check_added(
    pairs: torch.Size, dtype: torch.dtype, delta: torch.Tensor | None, shared: SharedRows | None
) -> None:
    """Raise ValueError where what is added to pairs [T, K, H], or to their sum, is not as these."""
    num_tokens, _, width = pairs
    added = [] if delta is None else [(delta, pairs, dtype)]
    if shared is not None:
        added.append((shared.y, torch.Size((num_tokens, width)), dtype))
        if shared.delta is not None:
            added.append((shared.delta, shared.y.shape, torch.float32))
    for rows, shape, wanted in added:
        if rows.shape != shape or rows.dtype != wanted or not rows.is_contiguous():
            raise ValueError(
                f"moe_sum: added rows {rows.dtype} {tuple(rows.shape)}, strides {rows.stride()}: pass "
                f"contiguous {wanted} {tuple(shape)}"
            )


def _shared_arguments(out: torch.Tensor, shared: SharedRows | None) -> dict[str, object]:
    """The kernel's arguments of the rows that are added last."""
    y, delta = (None, None) if shared is None else (shared.y, shared.delta)
    return {
        "shared_ptr": out if y is None else y, "shared_delta_ptr": out if delta is None else delta,
        "HAS_SHARED": y is not None, "HAS_SHARED_DELTA": delta is not None,
    }  # fmt: skip


def moe_sum(x: torch.Tensor, shared: SharedRows | None = None) -> torch.Tensor:
    """Return the sum over the experts of each token."""
    if x.dim() != 3:
        raise ValueError(f"moe_sum: expected [T, K, H], got {tuple(x.shape)}")
    if x.device.type == "cpu":
        _check_added(x.shape, x.dtype, None, shared)
        return moe_sum_reference(x, shared)
    return sum_pairs(x, x.new_empty((x.shape[0], x.shape[2])), shared=shared)


def sum_pairs(
    x: torch.Tensor,
    out: torch.Tensor,
    *,
    delta: torch.Tensor | None = None,
    shared: SharedRows | None = None,
    is_dependent: bool = True,
) -> torch.Tensor:
    """Launch: `out` [T, H] becomes the sum of x [T, K, H], each pair with its `delta` where given."""
    num_tokens, top_k, width = x.shape
    _check_added(x.shape, out.dtype, delta, shared)
    if num_tokens > 0:
        _moe_sum_kernel[(num_tokens, triton.cdiv(width, BLOCK))](
            out, x.contiguous(), x, x, x, x if delta is None else delta, num_tokens=num_tokens,
            WIDTH=width, TOP_K=top_k, PARTS=0, HAS_BIAS=False, HAS_DELTA=delta is not None, BLOCK=BLOCK,
            **_shared_arguments(out, shared), num_warps=2, **_dependent(x, is_dependent=is_dependent),
        )  # fmt: skip
    return out


def moe_sum_parts(
    parts: torch.Tensor,
    out: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    delta: torch.Tensor | None = None,
    shared: SharedRows | None = None,
    is_dependent: bool = True,
) -> torch.Tensor:
    """Write the sum over parts and experts into `out` [T, H] and return it.

    `is_dependent` False: the launch waits for the end of what is before it on its stream.
    """
    _, num_tokens, _, width = parts.shape
    if parts.dtype != torch.float32 or out.shape != (num_tokens, width) or not parts.is_contiguous():
        raise ValueError(f"moe_sum_parts: parts {parts.dtype} {tuple(parts.shape)}, out {tuple(out.shape)}")
    if out.device.type == "cpu":
        _check_added(parts.shape[1:], out.dtype, delta, shared)
        return moe_sum_parts_reference(
            parts, out, topk_ids, topk_weights, bias=bias, delta=delta, shared=shared
        )
    return sum_parts(
        parts, out, topk_ids, topk_weights, bias=bias, delta=delta, shared=shared, is_dependent=is_dependent
    )


def sum_parts(
    parts: torch.Tensor,
    out: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    delta: torch.Tensor | None = None,
    shared: SharedRows | None = None,
    is_dependent: bool = True,
) -> torch.Tensor:
    """Launch; `moe_sum_parts` on a GPU, and what the interpreter tests."""
    num_parts, num_tokens, top_k, width = parts.shape
    _check_added(parts.shape[1:], out.dtype, delta, shared)
    if num_tokens > 0:
        _moe_sum_kernel[(num_tokens, triton.cdiv(width, BLOCK))](
            out, parts, topk_ids, topk_weights, parts if bias is None else bias,
            out if delta is None else delta, num_tokens=num_tokens,
            WIDTH=width, TOP_K=top_k, PARTS=num_parts, HAS_BIAS=bias is not None,
            HAS_DELTA=delta is not None, BLOCK=BLOCK, **_shared_arguments(out, shared), num_warps=2,
            **_dependent(out, is_dependent=is_dependent),
        )  # fmt: skip
    return out
