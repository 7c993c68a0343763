"""How much memory a declared model's weights take, known before any is loaded."""

import torch

from inference_service.models.linear_spec import LinearSpec
from inference_service.models.spec import ExpertLinearSpec, LayerSpec, ModelSpec, Mxfp4Weights
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
        experts = of.num_experts * sum(_expert(linear, itemsize) for linear in (of.gate_up, of.down))
    return experts + itemsize * sum(_elements(linear) for linear in layer.linears)


def _elements(spec: LinearSpec) -> int:
    rows = sum(site.out_features for site in spec.sites)
    return rows * (spec.in_features + spec.has_bias)


def _expert(spec: ExpertLinearSpec, itemsize: int) -> int:
    rows = spec.site.out_features
    bias = 0 if spec.bias is None else rows * itemsize
    if isinstance(spec.storage, Mxfp4Weights):
        return bias + rows * spec.in_features // BLOCK * _PACKED_BLOCK_BYTES
    return bias + rows * spec.in_features * itemsize
