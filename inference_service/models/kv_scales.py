"""Scales of an FP8 key-value cache, which checkpoints keep beside a layer's projections."""

from collections.abc import Iterator

import torch

from inference_service.models.attention_spec import AttentionSpec
from inference_service.models.checkpoint import WeightSource
from inference_service.models.errors import CheckpointError
from inference_service.models.spec import ModelSpec
from lorikeet_kernels.attention.kv_scales import KvScales

# Below the attention module, as vLLM and compressed-tensors write them; of older tools below a projection.
_NAMES = ("{attention}.{kind}_scale", "{attention}.attn.{kind}_scale", "{projection}.{kind}_scale")
_OLDER = "{projection}.output_scale"
# Of queries and probabilities in FP8, which here keep the compute dtype.
_UNUSED = ("{attention}.q_scale", "{attention}.attn.q_scale", "{attention}.prob_output_scale")


def read_kv_scales(
    spec: ModelSpec, source: WeightSource, device: torch.device
) -> tuple[KvScales | None, ...]:
    """A pair for every layer of keys and values, 1 where the checkpoint has none; None for latent attention.

    Takes every tensor of these names, so that none is left over whatever the cache will hold.

    Raises:
        CheckpointError: one has neither one element nor one a key head, or is not above 0.
    """
    return tuple(
        _of_layer(layer.attention, source, device) if isinstance(layer.attention, AttentionSpec) else None
        for layer in spec.layers
    )


def _of_layer(spec: AttentionSpec, source: WeightSource, device: torch.device) -> KvScales:
    paths = [module.path for site in spec.qkv.sites for module in site.modules]
    attention = paths[0].rpartition(".")[0]
    for name in _UNUSED:
        _read(name.format(attention=attention), source, device)
    keys, values = (
        _one(list(_names(attention, path, kind)), spec.num_kv_heads, source, device)
        for kind, path in (("k", paths[1]), ("v", paths[2]))
    )
    return KvScales(keys, values)


def _names(attention: str, projection: str, kind: str) -> Iterator[str]:
    for name in (*_NAMES, _OLDER):
        yield name.format(attention=attention, projection=projection, kind=kind)


def _one(names: list[str], num_heads: int, source: WeightSource, device: torch.device) -> torch.Tensor:
    found = [(name, scale) for name in names if (scale := _read(name, source, device)) is not None]
    if not found:
        return torch.ones(num_heads, device=device)
    name, scale = found[0]
    if scale.numel() not in (1, num_heads):
        raise CheckpointError(
            f"{name} is {list(scale.shape)}; a scale of cached keys or values has one element, or one for "
            f"each of {num_heads} heads"
        )
    fits = (scale > 0) & scale.isfinite()
    if not bool(fits.all()):
        value = float(scale[~fits][0])
        raise CheckpointError(f"{name} holds a scale that is not above 0, or not a number: {value:g}")
    return scale.flatten().expand(num_heads).contiguous()


def _read(name: str, source: WeightSource, device: torch.device) -> torch.Tensor | None:
    shape = source.shape_of(name)
    if shape is None:
        return None
    # ones, so that one of another dtype is reported as that and not by what lay there
    scale = torch.ones(shape, dtype=torch.float32, device=device)
    source.read_into(scale, name)
    source.wait(name)
    return scale
