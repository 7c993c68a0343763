"""Sound adapters that mutations begin with: the fixtures, and tiny ones in every layout of experts."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save

from lorikeet_contract.schema import LoraSchema, ParameterLayout, RowOrder
from tests.support.adapter_directories import PREFIX, config_of
from tests.support.expert_layouts import LAYOUTS
from tests.support.lora_schemas import (
    FIXTURES,
    attention,
    embed_and_head,
    experts,
    linear,
    schema_of,
    two_slices,
)

_MANIFEST = json.loads((FIXTURES / "manifest.json").read_text())
_HIDDEN, _INNER, _EXPERTS, _VOCAB = 8, 6, 3, 20


@dataclass(frozen=True, slots=True)
class Source:
    """One adapter. `model` names its schema."""

    model: str
    name: str
    config: bytes
    weights: bytes


@cache
def schema_for(model: str) -> LoraSchema:
    """The schema of a fixture model or a tiny one."""
    if not model.startswith("tiny"):
        return schema_of(model)
    sites = []
    for layer in range(2):
        root = f"model.layers.{layer}.mlp"
        sites += [
            *attention(layer, _HIDDEN, 2 * _HIDDEN, 4),
            linear("router", layer, _HIDDEN, _EXPERTS, f"{root}.gate"),
        ]
        sites += experts(
            layer, _EXPERTS, _HIDDEN, _INNER, f"{root}.experts", f"{root}.experts",
            layout=ParameterLayout.IN_OUT if "transposed" in model else ParameterLayout.OUT_IN,
            row_order=RowOrder.INTERLEAVED if "interleaved" in model else RowOrder.CONCATENATED,
        )  # fmt: skip
        sites += [
            two_slices("shared_gate_up", layer, _HIDDEN, _INNER, f"{root}.shared_expert"),
            linear("shared_down", layer, _INNER, _HIDDEN, f"{root}.shared_expert.down_proj"),
        ]
    return LoraSchema(2, (*sites, *embed_and_head(_VOCAB, _HIDDEN, "none")))


@cache
def sources() -> tuple[Source, ...]:
    """All of them, in an order that never changes."""
    found = list[Source]()
    for adapter in sorted(
        (a for a in _MANIFEST["adapters"] if a["expect"] == "load"), key=lambda a: a["dir"]
    ):
        directory: Path = FIXTURES / adapter["dir"]
        config, weights = (
            (directory / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors")
        )
        found.append(Source(adapter["model"], adapter["dir"], config, weights))
    for layout in sorted(LAYOUTS):
        for model in ("tiny", "tiny-interleaved", "tiny-interleaved-transposed"):
            found += [_tiny(model, layout, is_whole=True), _tiny(model, layout, is_whole=False)]
    return tuple(found)


def _tiny(model: str, layout: str, *, is_whole: bool) -> Source:
    """Experts in the layout; attention, router, shared experts, embedding and head, too, if `is_whole`."""
    generator = torch.Generator().manual_seed(sum(layout.encode()) + is_whole)
    rank, tensors = 2, dict[str, torch.Tensor]()

    def draw(*shape: int) -> torch.Tensor:
        return torch.randint(-64, 64, shape, generator=generator) / 16

    for layer in range(2):
        root = f"model.layers.{layer}.mlp"
        gate_up = draw(_EXPERTS, rank, _HIDDEN), draw(_EXPERTS, 2 * _INNER, rank)
        down = draw(_EXPERTS, rank, _INNER), draw(_EXPERTS, _HIDDEN, rank)
        tensors |= LAYOUTS[layout](f"{root}.experts", gate_up, down)
        modules = {
            f"model.layers.{layer}.self_attn.q_proj": (_HIDDEN, 2 * _HIDDEN),
            f"model.layers.{layer}.self_attn.v_proj": (_HIDDEN, 4),
            f"{root}.gate": (_HIDDEN, _EXPERTS),
            f"{root}.shared_expert.up_proj": (_HIDDEN, _INNER),
            f"{root}.shared_expert.down_proj": (_INNER, _HIDDEN),
            "lm_head": (_HIDDEN, _VOCAB),
        }
        for module, (inner, out) in modules.items() if is_whole else ():
            tensors[f"{module}.lora_A.weight"], tensors[f"{module}.lora_B.weight"] = (
                draw(rank, inner),
                draw(out, rank),
            )
    if is_whole:
        tensors["model.embed_tokens.lora_embedding_A"] = draw(rank, _VOCAB)
        tensors["model.embed_tokens.lora_embedding_B"] = draw(_HIDDEN, rank)
    marker = {"lora_B_layout": "grouped_by_expert"} if layout.endswith("expert-major") else {}
    config = config_of(
        rank, 3, target_modules=["q_proj", "v_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], **marker,
    )  # fmt: skip
    weights = save({PREFIX + k: v.contiguous().clone() for k, v in tensors.items()}, {"format": "pt"})
    return Source(
        model, f"{model}/{layout}{'-and-all' if is_whole else ''}", json.dumps(config).encode(), weights
    )
