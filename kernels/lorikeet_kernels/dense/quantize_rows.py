"""Activations in e4m3 with a scale for each row, or for each 128 columns of a row, made as they come.

    q[r, c] = e4m3(x[r, c] / s[r, c // G]),    s[r, g] = max over the group of |x| / 448

Shapes: x [..., in] in 16 or 32 bits; q [..., in] float8_e4m3fn; s [rows, groups] float32. "group": G is 128
(the last group may have fewer columns), as DeepSeek-V3's and Qwen3's FP8 checkpoints are run; "token": G is
the whole row, |x| counted up to `bound` where one is given (fbgemm); "static": s is the checkpoint's own
number and nothing is measured. Divides and rounds to nearest even once; beyond 448 values end there. A group
of zeros has a scale that is not zero. A NaN stays one, an infinity makes its group's values NaN or 0.

A row's values depend on no other row. Source: DeepSeek-V3 technical report, section 3.3.2 (1 x 128 tiles).
"""

# A Triton kernel's arguments have no Python types, and its launch takes options that its signature lacks.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl

GROUP = 128
"""Columns that share a scale."""
LARGEST = 448.0
"""Of e4m3's values."""
SMALLEST_PEAK = 1e-10
"""What a group's largest value counts as at least: zeros need a scale too."""
ROW_TILE = 4
"""Torch's product reads the scales of a group by 16 bytes."""
E4M3 = torch.float8_e4m3fn
_UNITS = 16  # groups of a program: 16 elements a thread
SLICE = 2048
"""Columns of a row of one scale that a program quantises at once where rows go by slices."""
PROGRAMS = 128
"""So many share few rows: dividing takes longer than reading a row again, which all of its programs do."""
WIDE = 16384
"""More columns go by slices whatever the number of rows: a row at once leaves no room for another."""

Scaling = Literal["group", "token", "static"]


@dataclass(frozen=True, slots=True, eq=False)
class ActivationScaling:
    """How a projection's input is quantised; `scale` [1] float32 for "static", `bound` for "token" only."""

    kind: Scaling
    scale: torch.Tensor | None = None
    bound: float | None = None

    def __post_init__(self) -> None:
        if (self.kind == "static") != (self.scale is not None) or (self.bound and self.kind != "token"):
            raise ValueError(f"activation scaling {self.kind}: scale {self.scale}, bound {self.bound}")


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedRows:
    """Quantised activations: `values` in the shape of x, `scales` [rows, groups] float32.

    Scales lie a row after the other, or, for torch's product, a group after the other (strides 1, rows); then
    there are more rows than x has, up to a multiple of ROW_TILE, and nothing in those.
    """

    values: torch.Tensor
    scales: torch.Tensor


def num_groups(in_features: int, scaling: ActivationScaling) -> int:
    """Scales of a row."""
    return -(-in_features // GROUP) if scaling.kind == "group" else 1


def shares_rows(num_rows: int, in_features: int) -> bool:
    """Whether rows of one scale go by slices, by a kernel of its own; one row's time is hidden anyway."""
    return num_rows > 1 and (2 * num_rows <= PROGRAMS or in_features > WIDE)


def scales_of(peaks: torch.Tensor) -> torch.Tensor:
    """What makes the largest values of groups, float32, e4m3's largest."""
    # by a tensor: torch on a GPU multiplies by the reciprocal of a number, which rounds twice
    return peaks.clamp(min=SMALLEST_PEAK) / torch.full_like(peaks, LARGEST)


def dequantize_rows(rows: QuantizedRows) -> torch.Tensor:
    """Float32 [..., in]: what the values stand for."""
    values, groups = rows.values, rows.scales.shape[1]
    in_features = values.shape[-1]
    factors = rows.scales
    if groups > 1:
        factors = factors.repeat_interleave(GROUP, dim=1)[:, :in_features]
    return (values.float().view(-1, in_features) * factors).view(values.shape)


def quantize_rows_reference(x: torch.Tensor, scaling: ActivationScaling) -> QuantizedRows:
    """See `quantize_rows`."""
    in_features = x.shape[-1]
    rows = x.reshape(-1, in_features).float()
    groups = num_groups(in_features, scaling)
    width = GROUP if scaling.kind == "group" else in_features
    padded = torch.nn.functional.pad(rows, (0, groups * width - in_features)).view(
        rows.shape[0], groups, width
    )
    if scaling.scale is not None:
        scales = scaling.scale.float().expand(rows.shape[0], 1).contiguous()
    else:
        peaks = padded.abs().amax(dim=-1)
        if scaling.bound is not None:
            peaks = peaks.clamp(max=scaling.bound)
        scales = scales_of(peaks)
    values = (padded / scales.unsqueeze(-1)).clamp(-LARGEST, LARGEST)  # torch's cast does not saturate
    flat = values.view(rows.shape[0], groups * width)[:, :in_features].to(E4M3)
    return QuantizedRows(flat.view(x.shape), scales)


@triton.jit
def _saturate(value, LARGEST: tl.constexpr):
    """Within e4m3's range; comparisons keep a NaN, minimum and maximum may not."""
    return tl.where(value > LARGEST, LARGEST, tl.where(value < -LARGEST, -LARGEST, value))


@triton.jit
def _wait_for_those_before():
    """So that who waits for this launch waits for them too.

    One program is enough, and the others leave their places to further ones while the launch before runs.
    """
    if tl.program_id(0) == 0:
        tl.extra.cuda.gdc_wait()


@triton.jit
def _store_quantized(q_ptr, x, scale, at, inside, LARGEST: tl.constexpr):
    value = _saturate(tl.div_rn(x, scale + tl.zeros_like(x)), LARGEST)
    tl.store(q_ptr + at, value.to(q_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_units", "stride"])
def _quantize_groups_kernel(
    q_ptr, s_ptr, x_ptr, num_units, stride,
    IN: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, UNITS: tl.constexpr,
    BY_GROUP: tl.constexpr, LARGEST: tl.constexpr, SMALLEST_PEAK: tl.constexpr, PDL: tl.constexpr,
    IS_READY: tl.constexpr,
):  # fmt: skip
    """UNITS groups, which may belong to several rows; BY_GROUP scales of a group lie `stride` apart."""
    if PDL:
        if not IS_READY:
            tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    unit = tl.program_id(0).to(tl.int64) * UNITS + tl.arange(0, UNITS)
    column = (unit % GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    at = (unit // GROUPS)[:, None] * IN + column
    inside = (unit < num_units)[:, None]
    if IN % GROUP != 0:
        inside = inside & (column < IN)
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    peak = tl.max(tl.abs(x), axis=1)
    scale = tl.div_rn(tl.where(peak < SMALLEST_PEAK, SMALLEST_PEAK, peak), LARGEST)
    _store_quantized(q_ptr, x, scale[:, None], at, inside, LARGEST)
    place = unit
    if BY_GROUP:
        place = unit % GROUPS * stride + unit // GROUPS
    tl.store(s_ptr + place, scale, mask=unit < num_units)
    if PDL and IS_READY:
        _wait_for_those_before()


@triton.jit
def _quantize_rows_kernel(
    q_ptr, s_ptr, x_ptr, given_ptr, bound,
    IN: tl.constexpr, IS_STATIC: tl.constexpr, HAS_BOUND: tl.constexpr, BLOCK: tl.constexpr,
    SLICE: tl.constexpr, LARGEST: tl.constexpr, SMALLEST_PEAK: tl.constexpr, PDL: tl.constexpr,
    IS_READY: tl.constexpr,
):  # fmt: skip
    """A row of one scale. By slices each of its programs reads it whole for its peak and quantises some."""
    if PDL:
        if not IS_READY:
            tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * IN + column, mask=column < IN, other=0.0).to(tl.float32)
    if IS_STATIC:
        scale = tl.load(given_ptr)
    else:
        peak = tl.max(tl.abs(x), axis=0)
        if HAS_BOUND:
            peak = tl.where(peak > bound, bound, peak)
        scale = tl.div_rn(tl.where(peak < SMALLEST_PEAK, SMALLEST_PEAK, peak), LARGEST)
    if SLICE == BLOCK:
        _store_quantized(q_ptr, x, scale, row * IN + column, column < IN, LARGEST)
    else:
        for begin in tl.range(tl.program_id(1) * SLICE, IN, tl.num_programs(1) * SLICE):
            part = begin + tl.arange(0, SLICE)
            again = tl.load(x_ptr + row * IN + part, mask=part < IN, other=0.0).to(tl.float32)
            _store_quantized(q_ptr, again, scale, row * IN + part, part < IN, LARGEST)
    if tl.program_id(1) == 0:
        tl.store(s_ptr + row, scale)
    if PDL and IS_READY:
        _wait_for_those_before()


def quantize_rows(
    x: torch.Tensor, scaling: ActivationScaling, *, by_group: bool = False, is_ready: bool = False
) -> QuantizedRows:
    """Quantise `x` [..., in], contiguous; with `by_group` scales of "group" lie a group after the other.

    On a CPU they lie a row after the other all the same. With `is_ready` x is quantised beside the launch
    before and those beside which that runs: it was complete when they began, and no memory that they use is
    free (the caller holds their results: this takes memory that may have been theirs).
    """
    if not x.is_contiguous() or x.shape[-1] == 0:
        raise ValueError(f"quantize_rows: x {tuple(x.shape)}, strides {x.stride()}: pass contiguous rows")
    if x.device.type == "cpu" or x.numel() == 0:
        return quantize_rows_reference(x, scaling)
    return launch_quantize(x, scaling, by_group=by_group and scaling.kind == "group", is_ready=is_ready)


def launch_quantize(
    x: torch.Tensor, scaling: ActivationScaling, *, by_group: bool = False, is_ready: bool = False
) -> QuantizedRows:
    """Launch, for at least one row; `quantize_rows` on a GPU, and what the interpreter tests."""
    in_features = x.shape[-1]
    rows, groups = x.numel() // in_features, num_groups(in_features, scaling)
    stride = -(-rows // ROW_TILE) * ROW_TILE if by_group else rows
    values = torch.empty((stride, in_features) if by_group else x.shape, dtype=E4M3, device=x.device)
    lying = (groups, stride) if by_group else (rows, groups)
    scales = torch.empty(lying, dtype=torch.float32, device=x.device)
    pdl = x.device.type == "cuda"
    dependent = {"launch_pdl": True} if pdl else {}
    if scaling.kind == "group":
        _quantize_groups_kernel[(triton.cdiv(rows * groups, _UNITS),)](
            values, scales, x, rows * groups, stride,
            IN=in_features, GROUPS=groups, GROUP=GROUP, UNITS=_UNITS, BY_GROUP=by_group,
            LARGEST=LARGEST, SMALLEST_PEAK=SMALLEST_PEAK, PDL=pdl, IS_READY=is_ready, num_warps=4,
            **dependent,
        )  # fmt: skip
        return QuantizedRows(values, scales.t() if by_group else scales)
    block = triton.next_power_of_2(in_features)
    part = SLICE if shares_rows(rows, in_features) and block > SLICE else block
    _quantize_rows_kernel[(rows, min(triton.cdiv(in_features, part), max(1, PROGRAMS // rows)))](
        values, scales, x, x if scaling.scale is None else scaling.scale, scaling.bound or 0.0,
        IN=in_features, IS_STATIC=scaling.kind == "static", HAS_BOUND=scaling.bound is not None,
        BLOCK=block, SLICE=part, LARGEST=LARGEST, SMALLEST_PEAK=SMALLEST_PEAK, PDL=pdl, IS_READY=is_ready,
        num_warps=min(32, max(4, block // 1024)), **dependent,
    )  # fmt: skip
    return QuantizedRows(values, scales)
