"""Pairs of one token that nobody cut into blocks: only the plain weights' GEMM reads them."""

import pytest
import torch

from lorikeet_kernels.dense.quantize_rows import quantize_rows_reference
from lorikeet_kernels.experts.expert_blocks import lone_blocks
from lorikeet_kernels.experts.fp8_gemm import fp8_gemm
from lorikeet_kernels.experts.mxfp4_layout import lay_out_mxfp4
from lorikeet_kernels.experts.mxfp4_linear import mxfp4_linear
from lorikeet_kernels.testing import random_fp8_weight, random_mxfp4_weight
from lorikeet_kernels.tiling.expert_tiles import ExpertTiles

IDS = torch.tensor([[1, 3]], dtype=torch.int32)


def test_fp8_refuses_them() -> None:
    """Its kernel would read blocks that are not there."""
    weight = random_fp8_weight(4, (128,), 128, "block", torch.Generator())
    rows = quantize_rows_reference(torch.randn(1, 2, 128), weight.activations)
    tiles = ExpertTiles("decode", 16, 64, 128, 2, 4)
    with pytest.raises(ValueError, match="cut into blocks"):
        fp8_gemm(rows, weight, lone_blocks(IDS, 4, 16), torch.empty(1, 2, 128), tiles)


def test_mxfp4_refuses_them() -> None:
    """As FP8."""
    weight = lay_out_mxfp4(random_mxfp4_weight(4, 64, 64, torch.Generator()))
    x, out = (torch.empty(1, 2, 64, dtype=torch.bfloat16) for _ in range(2))
    with pytest.raises(ValueError, match="cut into blocks"):
        mxfp4_linear(x, weight, lone_blocks(IDS, 4, 8), out, ExpertTiles("decode", 8, 64, 1, 2, 4))
