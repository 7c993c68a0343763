"""Expert matrices in MXFP4, packed as released: four-bit floats in blocks of 32 that share a power of two.

    w[e, o, 32 b + 2 j]     = value(blocks[e, o, b, j] & 15) * 2 ** (scales[e, o, b] - 127)
    w[e, o, 32 b + 2 j + 1] = value(blocks[e, o, b, j] >> 4) * 2 ** (scales[e, o, b] - 127)

A four-bit float is E2M1: bit 3 is the sign, the rest picks 0, 0.5, 1, 1.5, 2, 3, 4 or 6.
"""

from dataclasses import dataclass

import torch

BLOCK = 32
"""Elements that share a scale."""
NAN_SCALE = 255
"""The one scale that is not a number; the loader refuses it."""
_BIAS = 127
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = (*_MAGNITUDES, *(-m for m in _MAGNITUDES))


@dataclass(frozen=True, slots=True, eq=False)
class Mxfp4Weight:
    """Packed matrices of E experts, each [out, in]; reads like a weight [E, out, in] as far as shapes go."""

    blocks: torch.Tensor  # [E, out, in / 32, 16] uint8, the low four bits the even element
    scales: torch.Tensor  # [E, out, in / 32] uint8

    def __post_init__(self) -> None:
        blocks, scales = self.blocks, self.scales
        if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
            raise ValueError(f"MXFP4 blocks {blocks.dtype} and scales {scales.dtype} must be uint8")
        if scales.dim() != 3 or blocks.shape != (*scales.shape, BLOCK // 2):
            raise ValueError(f"MXFP4 blocks {tuple(blocks.shape)} do not fit scales {tuple(scales.shape)}")

    @property
    def num_experts(self) -> int:
        """E."""
        return self.scales.shape[0]

    @property
    def out_features(self) -> int:
        """Rows of an expert's matrix."""
        return self.scales.shape[1]

    @property
    def in_features(self) -> int:
        """Columns of an expert's matrix."""
        return self.scales.shape[2] * BLOCK

    @property
    def shape(self) -> torch.Size:
        """[E, out, in], as of the matrices unpacked."""
        return torch.Size((self.num_experts, self.out_features, self.in_features))

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return self.blocks.numel() + self.scales.numel()


def dequantize_mxfp4(weight: Mxfp4Weight, dtype: torch.dtype) -> torch.Tensor:
    """The matrices [E, out, in]; exact in float32, and in bfloat16 where no value leaves its range."""
    return _unpack(weight.blocks, weight.scales).to(dtype)


def dequantize_mxfp4_expert(weight: Mxfp4Weight, expert: int, dtype: torch.dtype) -> torch.Tensor:
    """One expert's matrix [out, in]."""
    return _unpack(weight.blocks[expert], weight.scales[expert]).to(dtype)


def _unpack(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    values = torch.tensor(_VALUES, dtype=torch.float32, device=blocks.device)
    nibbles = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)  # [..., in / 32, 32]
    exponents = scales.to(torch.int32).unsqueeze(-1) - _BIAS
    return torch.ldexp(values[nibbles.to(torch.int64)], exponents).flatten(-2)
