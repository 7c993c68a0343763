"""What a forward pass of a declared model takes beside its weights: upper bounds, from shapes alone."""

from collections.abc import Sequence

from inference_service.models.linear_spec import SiteSpec
from inference_service.models.spec import DenseMlpSpec, LayerSpec, ModelSpec

# The LoRA ops' decode launches keep partial rank vectors of so many pairs, for each split of the input and
# each choice of tiles; of these batches of all sizes use about two.
_LORA_PAIRS, _LORA_BLOCK_K, _LORA_TILES = 4096, 256, 2


def activation_bytes(spec: ModelSpec, num_tokens: int, itemsize: int, max_rank: int) -> int:
    """Of a pass over `num_tokens`: what is alive at once in its widest layer, adapters included."""
    per_token = max(max(_attention(layer), _mlp(layer)) for layer in spec.layers)
    # Residual, normed input, output and one more, through the whole pass.
    elements = itemsize * (4 * spec.hidden_size + per_token)
    # Float32 rank vectors of a token's experts, gate and up each with their own.
    rank_vectors = 4 * 2 * max_rank * max(_experts_of_a_token(layer) for layer in spec.layers)
    return num_tokens * (elements + rank_vectors)


def lora_workspace_bytes(spec: ModelSpec, max_rank: int) -> int:
    """Partial rank vectors of decode steps: a buffer for each kind of site, which all layers share."""
    launches: set[tuple[int, int]] = set()
    for layer in spec.layers:
        for linear in layer.linears:
            launches.add((linear.in_features, len(linear.sites)))
        if (experts := layer.experts) is not None:
            launches.add((experts.gate_up.in_features, 2))
            launches.add((experts.down.in_features, 1))
    vectors = sum(-(-in_features // _LORA_BLOCK_K) * count for in_features, count in launches)
    return 4 * _LORA_TILES * _LORA_PAIRS * vectors * max_rank


def _attention(layer: LayerSpec) -> int:
    """Elements a token: projections and their turned copies, heads' inputs and outputs."""
    attention = layer.attention
    projected = sum(_rows(linear.sites) for linear in attention.linears)
    return 2 * projected + 2 * attention.attended_elements


def _mlp(layer: LayerSpec) -> int:
    """Elements a token: rows of gate_up and their delta, activation, rows of down and theirs, each expert."""
    mlp = layer.mlp
    if isinstance(mlp, DenseMlpSpec):
        return 2 * sum(_rows(linear.sites) for linear in mlp.linears)
    inner, hidden = mlp.experts.down.in_features, mlp.experts.gate_up.in_features
    routed = mlp.routing.top_k * (2 * 2 * inner + inner + 2 * hidden)
    if mlp.experts.gate_up.fp8 is not None:  # their inputs quantised, a byte an element and the scales
        routed += mlp.routing.top_k * inner + hidden
    shared = 0 if mlp.shared is None else 2 * sum(_rows(linear.sites) for linear in mlp.shared.linears)
    return routed + shared + 2 * mlp.experts.num_experts


def _rows(sites: Sequence[SiteSpec]) -> int:
    return sum(site.out_features for site in sites)


def _experts_of_a_token(layer: LayerSpec) -> int:
    return 1 if isinstance(layer.mlp, DenseMlpSpec) else layer.mlp.routing.top_k
