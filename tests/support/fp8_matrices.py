"""Random FP8 weights on a GPU, whose products have about their input's size."""

import torch

from lorikeet_kernels.dense.fp8_weight import Fp8Weight, WeightScaling, quantize_channels, row_blocks
from lorikeet_kernels.dense.quantize_rows import ActivationScaling

GPU = torch.device("cuda")
TOKEN, GROUPS = ActivationScaling("token"), ActivationScaling("group")


def fp8_matrices(
    shape: tuple[int, ...], kind: WeightScaling, heights: tuple[int, ...], *, is_interleaved: bool = False
) -> Fp8Weight:
    """Random matrices one below the other, or row by row in turn."""
    values, scales = quantize_channels(torch.randn(shape, device=GPU))
    if kind == "channel":
        return Fp8Weight(values, scales * shape[-1] ** -0.5, TOKEN)
    count = sum(-(-height // 128) for height in heights)
    scales = torch.rand(*shape[:-2], count, -(-shape[-1] // 128), device=GPU) + 0.5
    blocks = row_blocks(heights, is_interleaved=is_interleaved)
    scales *= shape[-1] ** -0.5 / 100
    return Fp8Weight(values, scales, GROUPS, None if blocks is None else blocks.to(GPU))
