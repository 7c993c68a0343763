"""The experts' matrices out of a checkpoint, whichever way it stores them. For `build.py`."""

from dataclasses import dataclass

import torch

from inference_service.layers.moe import ExpertLinear
from inference_service.models.checkpoint import WeightSource
from inference_service.models.errors import CheckpointError
from inference_service.models.fp8_weights import Allocate, Fp8Reader, Fp8Shape, read_modules
from inference_service.models.linear_spec import Fp8Format
from inference_service.models.spec import ExpertLinearSpec, ExpertsSpec, FusedWeights, Mxfp4Weights
from lorikeet_contract.schema import RowOrder
from lorikeet_kernels.dense.row_order import RowOrder as RowOrderName
from lorikeet_kernels.dense.row_order import slice_columns
from lorikeet_kernels.experts.moe_experts import device_expert_weight
from lorikeet_kernels.experts.mxfp4 import BLOCK, NAN_SCALE, Mxfp4Weight

# MXFP4 values reach 6 times 2 ** (scale - 127), float32 reaches almost 2 ** 128.
_MAX_SCALE = 252


@dataclass(frozen=True, slots=True)
class Fp8Experts:
    """A projection in FP8 that is being read."""

    reader: Fp8Reader
    bias: torch.Tensor | None


StoredExperts = ExpertLinear | Fp8Experts
"""A projection whose reading has begun."""


def row_order_name(spec: ExpertsSpec) -> RowOrderName:
    """The kernels' word for the spec's order of rows."""
    return "interleaved" if spec.row_order is RowOrder.INTERLEAVED else "concatenated"


def read_expert_linear(
    spec: ExpertsSpec, linear: ExpertLinearSpec, source: WeightSource, allocate: Allocate
) -> StoredExperts:
    """Begin to read one projection of all experts, [E, out, in], packed or quantised, with its bias.

    What is missing or misshaped is the source's to report.
    """
    shape = (spec.num_experts, linear.site.out_features, linear.in_features)
    bias = None
    if linear.bias is not None:
        bias = allocate(*shape[:2])
        source.read_into(bias, linear.bias)
    storage = linear.storage
    if linear.fp8 is not None:
        return Fp8Experts(_read_fp8(spec, linear, linear.fp8, source, allocate), bias)
    if isinstance(storage, Mxfp4Weights):
        return ExpertLinear(_read_packed(storage, shape, source, allocate), bias)
    weight = allocate(*shape)
    if isinstance(storage, FusedWeights):
        source.read_into(weight, storage.name, transpose=storage.is_transposed)
    else:
        _read_one_by_one(weight, spec, linear, source)
    return ExpertLinear(weight, bias)


def laid_out(
    stored: StoredExperts,
    linear: ExpertLinearSpec,
    source: WeightSource,
    dtype: torch.dtype,
    row_order: RowOrderName | None,
) -> ExpertLinear:
    """The projection as its device's kernels read it; `row_order` is gate_up's, None for down.

    Waits for packed weights, which are laid out anew on a GPU, for those that are to be quantised or whose
    scales are to be spread, and for nothing else.

    Raises:
        CheckpointError: a packed matrix holds a scale that is not a number.
    """
    if isinstance(stored, Fp8Experts):
        return ExpertLinear(stored.reader.weight(), stored.bias)
    weight, storage = stored.weight, linear.storage
    if not isinstance(weight, Mxfp4Weight) or not isinstance(storage, Mxfp4Weights) or weight.blocks.is_meta:
        return stored
    source.wait(storage.blocks, storage.scales)
    _check_scales(weight.scales, storage.scales)
    if weight.blocks.device.type == "cpu":
        return stored
    return ExpertLinear(device_expert_weight(weight, dtype, row_order), stored.bias)


def _read_fp8(
    spec: ExpertsSpec, linear: ExpertLinearSpec, form: Fp8Format, source: WeightSource, allocate: Allocate
) -> Fp8Reader:
    modules, storage = linear.site.modules, linear.storage
    heights = tuple(module.out_features for module in modules)
    shape = Fp8Shape(
        spec.num_experts,
        heights,
        linear.in_features,
        is_interleaved=len(modules) > 1 and row_order_name(spec) == "interleaved",
    )
    reader = Fp8Reader(form, shape, source, allocate)
    # Llama 4 is released both ways: fused, and by tools that take fused experts apart.
    if isinstance(storage, FusedWeights) and (
        not form.is_stored or source.shape_of(storage.name) is not None
    ):
        reader.read_fused(storage.name, is_transposed=storage.is_transposed)
        return reader
    for expert in range(spec.num_experts):
        read_modules(reader, [module.path.format(expert=expert) for module in modules], expert)
    return reader


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
