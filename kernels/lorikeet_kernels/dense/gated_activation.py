"""The gated activation between an MLP's two matrices.

    y = g / (1 + exp(-alpha g)) * (u + up_offset)

g is the gate and u is up; with a limit, first g = min(g, limit) and u = min(max(u, -limit), limit). The
defaults are silu(gate) * up.

Shapes: gate_up [..., 2I], out [..., I]. Rows hold [gate | up], or g0, u0, g1, u1, ... where `row_order` is
"interleaved". Where a delta [..., 2I] is given, what adapters add, g and u are gate_up + delta rounded to
gate_up's dtype. Computes in float32, rounds once. A NaN stays one: a minimum or maximum that drops it would
hide a broken request.
"""

# A Triton kernel's arguments have no Python types, and its launch takes options that its signature lacks.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from lorikeet_kernels.dense.row_order import RowOrder, check_row_order, slice_columns
from lorikeet_kernels.dense.sigmoid import sigmoid


@dataclass(frozen=True, slots=True)
class GatedActivation:
    """The constants of a model's gated activation; see this module's docstring."""

    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0


SILU = GatedActivation()


def gated_activation_reference(
    gate_up: torch.Tensor,
    activation: GatedActivation = SILU,
    *,
    row_order: RowOrder = "concatenated",
    delta: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `gated_activation`."""
    if delta is not None:
        gate_up = (gate_up.float() + delta.float()).to(gate_up.dtype)
    width = gate_up.shape[-1]
    gate, up = (gate_up[..., slice_columns(row_order, width, index)].float() for index in range(2))
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    gated = gate * sigmoid(activation.alpha * gate)
    return (gated * (up + activation.up_offset)).to(gate_up.dtype)


@triton.jit
def _load_with_delta(gate_up_ptr, delta_ptr, at, inside, HAS_DELTA: tl.constexpr):
    value = tl.load(gate_up_ptr + at, mask=inside, other=0.0)
    if HAS_DELTA:
        delta = tl.load(delta_ptr + at, mask=inside, other=0.0).to(tl.float32)
        value = (value.to(tl.float32) + delta).to(value.dtype)
    return value.to(tl.float32)


@triton.jit
def _gated_activation_kernel(
    out_ptr, gate_up_ptr, delta_ptr, alpha, limit, up_offset,
    INNER: tl.constexpr, INTERLEAVED: tl.constexpr, HAS_LIMIT: tl.constexpr, HAS_DELTA: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < INNER
    at = row * (2 * INNER)
    if INTERLEAVED:
        both = tl.program_id(1) * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
        loaded = _load_with_delta(gate_up_ptr, delta_ptr, at + both, both < 2 * INNER, HAS_DELTA)
        gate, up = tl.split(tl.reshape(loaded, [BLOCK, 2]))
    else:
        gate = _load_with_delta(gate_up_ptr, delta_ptr, at + column, inside, HAS_DELTA)
        up = _load_with_delta(gate_up_ptr, delta_ptr, at + INNER + column, inside, HAS_DELTA)
    if HAS_LIMIT:  # comparisons keep a NaN, minimum and maximum may not
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    y = gate / (1.0 + tl.exp(-alpha * gate)) * (up + up_offset)
    tl.store(out_ptr + row * INNER + column, y.to(out_ptr.dtype.element_ty), mask=inside)


def activate_rows(
    gate_up: torch.Tensor,
    out: torch.Tensor,
    activation: GatedActivation,
    row_order: RowOrder,
    delta: torch.Tensor | None = None,
    *,
    delta_is_joined: bool = False,
) -> torch.Tensor:
    """Launch over contiguous rows; `gated_activation` on a GPU, and what the interpreter tests.

    A delta that is not of the launch before comes from another stream, after whose join a launch waits for
    what is before it in any case.
    """
    check_row_order(row_order)
    inner = out.shape[-1]
    num_rows = out.numel() // inner
    block = 512
    pdl = out.device.type == "cuda"
    limit = activation.limit
    if num_rows > 0:
        _gated_activation_kernel[(num_rows, triton.cdiv(inner, block))](
            out, gate_up, gate_up if delta is None else delta,
            activation.alpha, 0.0 if limit is None else limit, activation.up_offset,
            INNER=inner, INTERLEAVED=row_order == "interleaved", HAS_LIMIT=limit is not None,
            HAS_DELTA=delta is not None, BLOCK=block, PDL=pdl, num_warps=4,
            **({"launch_pdl": True} if pdl and (delta is None or delta_is_joined) else {}),
        )  # fmt: skip
    return out


def gated_activation(
    gate_up: torch.Tensor,
    activation: GatedActivation = SILU,
    *,
    row_order: RowOrder = "concatenated",
    delta: torch.Tensor | None = None,
    delta_is_joined: bool = False,
) -> torch.Tensor:
    """Return the activation of `gate_up`, a new tensor; `delta_is_joined` where one launch made both."""
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gated_activation: last dimension of {tuple(gate_up.shape)} is odd")
    if delta is not None and delta.shape != gate_up.shape:
        raise ValueError(
            f"gated_activation: delta {tuple(delta.shape)} does not fit rows {tuple(gate_up.shape)}"
        )
    if gate_up.device.type == "cpu":
        return gated_activation_reference(gate_up, activation, row_order=row_order, delta=delta)
    out = gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))
    added = None if delta is None else delta.contiguous()
    return activate_rows(
        gate_up.contiguous(), out, activation, row_order, added, delta_is_joined=delta_is_joined
    )
