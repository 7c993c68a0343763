"""The experts' matrices out of a checkpoint, whichever way it stores them. For `build.py`."""

from collections.abc import Callable

import torch

from inference_service.layers.moe import ExpertLinear
from inference_service.models.checkpoint import WeightSource
from inference_service.models.errors import CheckpointError
from inference_service.models.spec import ExpertLinearSpec, ExpertsSpec, FusedWeights, Mxfp4Weights
from lorikeet_contract.schema import RowOrder
from lorikeet_kernels.dense.row_order import RowOrder as RowOrderName
from lorikeet_kernels.dense.row_order import slice_columns
from lorikeet_kernels.experts.moe_experts import device_expert_weight
from lorikeet_kernels.experts.mxfp4 import BLOCK, NAN_SCALE, Mxfp4Weight

# MXFP4 values reach 6 times 2 ** (scale - 127), float32 reaches almost 2 ** 128.
_MAX_SCALE = 252

Allocate = Callable[..., torch.Tensor]
"""A parameter of the given shape, on the device, in the compute dtype unless `dtype` is given."""


def row_order_name(spec: ExpertsSpec) -> RowOrderName:
    """The kernels' word for the spec's order of rows."""
    return "interleaved" if spec.row_order is RowOrder.INTERLEAVED else "concatenated"


def read_expert_linear(
    spec: ExpertsSpec, linear: ExpertLinearSpec, source: WeightSource, allocate: Allocate
) -> ExpertLinear:
    """Begin to read one projection of all experts, [E, out, in] or packed, with its bias.

    What is missing or misshaped is the source's to report.
    """
    shape = (spec.num_experts, linear.site.out_features, linear.in_features)
    bias = None
    if linear.bias is not None:
        bias = allocate(*shape[:2])
        source.read_into(bias, linear.bias)
    storage = linear.storage
    if isinstance(storage, Mxfp4Weights):
        return ExpertLinear(_read_packed(storage, shape, source, allocate), bias)
    weight = allocate(*shape)
    if isinstance(storage, FusedWeights):
        source.read_into(weight, storage.name, transpose=storage.is_transposed)
    else:
        _read_one_by_one(weight, spec, linear, source)
    return ExpertLinear(weight, bias)


def laid_out(
    stored: ExpertLinear,
    linear: ExpertLinearSpec,
    source: WeightSource,
    dtype: torch.dtype,
    row_order: RowOrderName | None,
) -> ExpertLinear:
    """The projection as its device's kernels read it; `row_order` is gate_up's, None for down.

    Waits for packed weights, which are laid out anew on a GPU, and for nothing else.

    Raises:
        CheckpointError: a packed matrix holds a scale that is not a number.
    """
    weight, storage = stored.weight, linear.storage
    if not isinstance(weight, Mxfp4Weight) or not isinstance(storage, Mxfp4Weights) or weight.blocks.is_meta:
        return stored
    source.wait(storage.blocks, storage.scales)
    _check_scales(weight.scales, storage.scales)
    if weight.blocks.device.type == "cpu":
        return stored
    return ExpertLinear(device_expert_weight(weight, dtype, row_order), stored.bias)


def _read_one_by_one(
    weight: torch.Tensor, spec: ExpertsSpec, linear: ExpertLinearSpec, source: WeightSource
) -> None:
    modules = linear.site.modules
    num_rows = weight.shape[1]
    for expert in range(spec.num_experts):
        for index, module in enumerate(modules):
            rows = slice(None) if len(modules) == 1 else slice_columns(row_order_name(spec), num_rows, index)
            source.read_into(weight[expert, rows], f"{module.path.format(expert=expert)}.weight")


def _read_packed(
    storage: Mxfp4Weights, shape: tuple[int, int, int], source: WeightSource, allocate: Allocate
) -> Mxfp4Weight:
    num_blocks = shape[2] // BLOCK
    blocks = allocate(*shape[:2], num_blocks, BLOCK // 2, dtype=torch.uint8)
    # Zeros, so that a tensor that is not there is reported as missing and not as full of odd scales.
    scales = allocate(*shape[:2], num_blocks, dtype=torch.uint8).zero_()
    source.read_into(blocks, storage.blocks)
    source.read_into(scales, storage.scales)
    return Mxfp4Weight(blocks, scales)


def _check_scales(scales: torch.Tensor, name: str) -> None:
    largest = int(scales.max())
    if largest == NAN_SCALE:
        raise CheckpointError(f"{name} holds the scale {NAN_SCALE}, which is not a number in MXFP4")
    if largest > _MAX_SCALE:
        raise CheckpointError(f"{name} holds the scale {largest}, which takes values beyond float32's range")
