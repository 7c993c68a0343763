"""How many weights a declared model has, known before any is loaded."""

from inference_service.models.spec import DenseMlpSpec, LayerSpec, LinearSpec, ModelSpec


def count_parameters(spec: ModelSpec) -> int:
    """Elements of the parameters that the device will hold (norms left out: they are thousandths)."""
    tables = 1 if spec.lm_head_weight == spec.embed_weight else 2
    return tables * spec.vocab_size * spec.hidden_size + sum(_layer(layer) for layer in spec.layers)


def _layer(layer: LayerSpec) -> int:
    attention = _linear(layer.attention.qkv) + _linear(layer.attention.o)
    if isinstance(layer.mlp, DenseMlpSpec):
        return attention + _linear(layer.mlp.gate_up) + _linear(layer.mlp.down)
    experts = layer.mlp.experts
    matrices = 3 * experts.num_experts * experts.hidden_size * experts.intermediate_size
    return attention + _linear(layer.mlp.router) + matrices


def _linear(spec: LinearSpec) -> int:
    rows = sum(site.out_features for site in spec.sites)
    return rows * (spec.in_features + spec.has_bias)
