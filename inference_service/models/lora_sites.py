"""The LoRA schema of a declared model, and where each site stands in the kernels' tables."""

from collections.abc import Callable, Iterator

from inference_service.models.linear_spec import LinearSpec, Module
from inference_service.models.spec import ExpertsSpec, LayerSpec, ModelSpec
from lorikeet_contract.schema import LoraSchema, LoraSite, SiteKind, SiteSlice

StoredWeight = Callable[[str], tuple[str, str]]
"""From a tensor's name to its safetensors dtype name and the sha256 of its bytes."""


def lora_schema(spec: ModelSpec, stored: StoredWeight) -> LoraSchema:
    """Every site of the model: layers ascending, then the embedding and the head."""
    sites = [site for index, layer in enumerate(spec.layers) for site in _layer_sites(index, layer)]
    outside = (
        (spec.embed, SiteKind.EMBEDDING, spec.vocab_size, spec.embed_weight),
        (spec.lm_head, SiteKind.LINEAR, spec.hidden_size, spec.lm_head_weight),
    )
    for module, kind, in_features, weight in outside:
        dtype, sha256 = stored(weight)
        sites.append(
            LoraSite(
                key=module.name,
                layer=None,
                kind=kind,
                in_features=in_features,
                out_features=module.out_features,
                slices=(_slice(module),),
                fused_parameter=f"{module.path}.weight",
                base_weight_dtype=dtype,
                base_weight_sha256=sha256,
            )
        )
    return LoraSchema(num_layers=len(spec.layers), sites=tuple(sites))


def site_indices(schema: LoraSchema) -> dict[str, int]:
    """Index in the tables by LoraSite.name."""
    return {site.name: index for index, site in enumerate(schema.sites)}


def _layer_sites(index: int, layer: LayerSpec) -> Iterator[LoraSite]:
    for linear in layer.linears:
        yield from _linear_sites(index, linear)
    if layer.experts is not None:
        yield from _expert_sites(index, layer.experts)


def _linear_sites(layer: int, spec: LinearSpec) -> Iterator[LoraSite]:
    for site in spec.sites:
        yield LoraSite(
            key=site.key,
            layer=layer,
            kind=SiteKind.LINEAR,
            in_features=spec.in_features,
            out_features=site.out_features,
            slices=tuple(_slice(module) for module in site.modules),
            fused_parameter=f"{site.modules[0].path}.weight" if len(site.modules) == 1 else "",
        )


def _expert_sites(layer: int, spec: ExpertsSpec) -> Iterator[LoraSite]:
    for linear in (spec.gate_up, spec.down):
        yield LoraSite(
            key=linear.site.key,
            layer=layer,
            kind=SiteKind.EXPERTS,
            in_features=linear.in_features,
            out_features=linear.site.out_features,
            slices=tuple(_slice(module) for module in linear.site.modules),
            num_experts=spec.num_experts,
            row_order=spec.row_order,
            fused_parameter=linear.parameter,
            parameter_layout=linear.parameter_layout,
        )


def _slice(module: Module) -> SiteSlice:
    return SiteSlice(module.name, module.out_features, (module.path, *module.aliases))
