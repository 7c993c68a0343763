"""Random projections of all experts in every storage, on the current GPU, for benches and tile searches."""

import torch

from lorikeet_kernels.benchmarking.bench_problem import MoeModel
from lorikeet_kernels.dense.fp8_weight import Fp8Weight, WeightScaling
from lorikeet_kernels.dense.quantize_rows import E4M3, GROUP, ActivationScaling
from lorikeet_kernels.experts.moe_experts import ExpertProjection
from lorikeet_kernels.experts.mxfp4 import Mxfp4Weight
from lorikeet_kernels.experts.mxfp4_layout import lay_out_mxfp4
from lorikeet_kernels.tiling.expert_tiles import Weights

WEIGHT_BYTES: dict[Weights, float] = {
    "bf16": 2.0,
    "fp32": 4.0,
    "mxfp4": 17 / 32,
    "fp8_block": 1.0,
    "fp8_channel": 1.0,
}
"""Of an element, scales included where they count."""


def expert_projection(model: MoeModel, storage: Weights, *, is_gate_up: bool) -> ExpertProjection:
    """gate_up or down of a layer, with biases where the model's gate and up share an A (gpt-oss)."""
    experts = model.num_experts
    rows, columns = (2 * model.inner, model.hidden) if is_gate_up else (model.hidden, model.inner)
    order = model.row_order if is_gate_up else None
    bias = torch.randn(experts, rows, device="cuda").to(torch.bfloat16) if model.num_a == 1 else None
    if storage == "mxfp4":
        shape = (experts, rows, columns // 32)
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, device="cuda")
        scales = torch.randint(115, 123, shape, dtype=torch.uint8, device="cuda")
        return ExpertProjection(lay_out_mxfp4(Mxfp4Weight(blocks, scales), pairing=order), bias, order)
    if storage in ("fp8_block", "fp8_channel"):
        kind = "block" if storage == "fp8_block" else "channel"
        return ExpertProjection(fp8_weight((experts, rows, columns), kind), bias, order)
    dtype = torch.float32 if storage == "fp32" else torch.bfloat16
    weight = torch.randn(experts, rows, columns, device="cuda", dtype=dtype) * columns**-0.5
    return ExpertProjection(weight, bias, order)


def fp8_weight(shape: tuple[int, ...], kind: WeightScaling) -> Fp8Weight:
    """Normal values whose products with normal rows are about as large as those."""
    values = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(std=64.0).to(E4M3)
    of_scales = (*shape[:-2], *(-(-size // GROUP) for size in shape[-2:])) if kind == "block" else shape[:-1]
    scales = (torch.rand(of_scales, device="cuda") + 0.5) * shape[-1] ** -0.5 / 64.0
    return Fp8Weight(values, scales, ActivationScaling("group" if kind == "block" else "token"))
