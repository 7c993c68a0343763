"""How much memory a declared model's weights take, known before any is loaded."""

from collections.abc import Sequence

import torch

from inference_service.models.linear_spec import Fp8Format, LinearSpec
from inference_service.models.spec import ExpertLinearSpec, LayerSpec, ModelSpec, Mxfp4Weights
from lorikeet_kernels.dense.quantize_rows import GROUP
from lorikeet_kernels.experts.mxfp4 import BLOCK

# A block of MXFP4 is 16 bytes of elements and one of scale.
_PACKED_BLOCK_BYTES = BLOCK // 2 + 1


def parameter_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes of the parameters that the device will hold (norms and sinks left out: they are thousandths)."""
    tables = 1 if spec.lm_head_weight == spec.embed_weight else 2
    outside = tables * spec.vocab_size * spec.hidden_size * dtype.itemsize
    return outside + sum(_layer(layer, dtype.itemsize) for layer in spec.layers)


def _layer(layer: LayerSpec, itemsize: int) -> int:
    experts = 0
    if (of := layer.experts) is not None:
        experts = of.num_experts * sum(expert_bytes(linear, itemsize) for linear in (of.gate_up, of.down))
    return experts + sum(linear_bytes(linear, itemsize) for linear in layer.linears)


def linear_bytes(spec: LinearSpec, itemsize: int) -> int:
    """Of a dense projection, its scales and bias included."""
    heights = [module.out_features for site in spec.sites for module in site.modules]
    bias = sum(heights) * itemsize if spec.has_bias else 0
    if spec.fp8 is not None and not spec.fp8.is_dequantized:
        return bias + _fp8_matrix(spec.fp8, heights, spec.in_features)
    return bias + sum(heights) * spec.in_features * itemsize


def _fp8_matrix(form: Fp8Format, heights: Sequence[int], in_features: int) -> int:
    """A byte a value, and the scales: of blocks, or one a row."""
    blocks = sum(-(-height // GROUP) for height in heights) * -(-in_features // GROUP)
    return sum(heights) * in_features + 4 * (blocks if form.weights == "block" else sum(heights))


def expert_bytes(spec: ExpertLinearSpec, itemsize: int) -> int:
    """Of one expert's projection, its scales and bias included."""
    rows = spec.site.out_features
    bias = 0 if spec.bias is None else rows * itemsize
    if spec.fp8 is not None:
        return bias + _fp8_matrix(spec.fp8, [m.out_features for m in spec.site.modules], spec.in_features)
    if isinstance(spec.storage, Mxfp4Weights):
        return bias + rows * spec.in_features // BLOCK * _PACKED_BLOCK_BYTES
    return bias + rows * spec.in_features * itemsize
