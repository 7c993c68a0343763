"""Matrices in e4m3 as released: eight-bit floats with float32 scales for blocks or for output channels.

    w[..., o, i] = values[..., o, i] * scales[..., block of row o, i // 128]         (blocks of 128 x 128)
    w[..., o, i] = values[..., o, i] * scales[..., o]                                (channels)

A scale for a whole matrix is the same one for all its channels: so are the matrices of one projection kept
whose scales differ (q, k and v; gate and up; each expert), without rounding anything anew.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from lorikeet_kernels.dense.quantize_rows import E4M3, GROUP, LARGEST, ActivationScaling, scales_of

WeightScaling = Literal["block", "channel"]


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Weight:
    """Quantised matrices [out, in], or of E experts [E, out, in]; reads like such a weight as to shapes.

    `block_of_row` [out] int32 says which row of block scales a row has, where that is not row // 128: of
    matrices side by side whose heights are no multiples of 128, or row by row in turn. `activations` says how
    the input is quantised.
    """

    values: torch.Tensor  # [..., out, in] float8_e4m3fn
    scales: torch.Tensor  # float32 [..., row blocks, column blocks], or [..., out]
    activations: ActivationScaling
    block_of_row: torch.Tensor | None = None

    def __post_init__(self) -> None:
        values, scales = self.values, self.scales
        if values.dtype != E4M3 or scales.dtype != torch.float32 or values.dim() not in (2, 3):
            raise ValueError(f"FP8 values {values.dtype} {tuple(values.shape)}, scales {scales.dtype}")
        leading = values.shape[:-2]
        if self.kind == "block":
            rows, columns = (-(-size // GROUP) for size in values.shape[-2:])
            has_map = self.block_of_row is not None
            fits = scales.shape[:-2] == leading and scales.shape[-1] == columns
            fits = fits and (has_map or scales.shape[-2] == rows)
        else:
            fits = scales.shape == values.shape[:-1] and self.block_of_row is None
        if not fits:
            raise ValueError(f"FP8 scales {tuple(scales.shape)} do not fit values {tuple(values.shape)}")
        if (self.kind == "block") != (self.activations.kind == "group"):
            raise ValueError(f"FP8 weights by {self.kind} take no activations by {self.activations.kind}")

    @property
    def kind(self) -> WeightScaling:
        """What shares a scale."""
        return "block" if self.scales.dim() == self.values.dim() else "channel"

    @property
    def shape(self) -> torch.Size:
        """[out, in] or [E, out, in]."""
        return self.values.shape

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.values.device

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        mapped = 0 if self.block_of_row is None else 4 * self.block_of_row.numel()
        return self.values.numel() + 4 * self.scales.numel() + mapped

    def expert(self, index: int) -> "Fp8Weight":
        """One expert's matrix."""
        return Fp8Weight(self.values[index], self.scales[index], self.activations, self.block_of_row)


def row_blocks(heights: Sequence[int], *, is_interleaved: bool = False) -> torch.Tensor | None:
    """`block_of_row` of matrices of these heights, one below the other or row by row in turn.

    None where it is row // 128. Their block scales lie one below the other either way.
    """
    first, parts = 0, list[torch.Tensor]()
    for height in heights:
        parts.append(first + torch.arange(height, dtype=torch.int32) // GROUP)
        first += -(-height // GROUP)
    rows = torch.stack(parts, dim=1).flatten() if is_interleaved else torch.cat(parts)
    plain = torch.arange(rows.numel(), dtype=torch.int32) // GROUP
    return None if torch.equal(rows, plain) else rows


def dequantize_fp8(weight: Fp8Weight, dtype: torch.dtype) -> torch.Tensor:
    """The matrices; each value is one product, rounded to `dtype`."""
    scales = weight.scales
    if weight.kind == "channel":
        factors = scales.unsqueeze(-1)
    else:
        out_features, in_features = weight.shape[-2:]
        row = weight.block_of_row
        if row is None:
            row = torch.arange(out_features, device=scales.device) // GROUP
        column = torch.arange(in_features, device=scales.device) // GROUP
        factors = scales.index_select(-2, row).index_select(-1, column)
    wide = torch.promote_types(dtype, torch.float32)
    return (weight.values.to(wide) * factors.to(wide)).to(dtype)


def quantize_channels(matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Matrices [..., out, in] of any float dtype to e4m3 values and a scale for each row, [..., out]."""
    wide = matrices.float()
    scales = scales_of(wide.abs().amax(dim=-1))
    return (wide / scales.unsqueeze(-1)).clamp(-LARGEST, LARGEST).to(E4M3), scales
