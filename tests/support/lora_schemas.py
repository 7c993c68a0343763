"""LoRA schemas of the fixture models, written by hand: what their nodes declare, without loading a model."""

import hashlib
import json
import struct
from pathlib import Path

from inference_service.models import describe_model
from inference_service.models.lora_sites import lora_schema
from lorikeet_contract.schema import LoraSchema, LoraSite, ParameterLayout, RowOrder, SiteKind, SiteSlice

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"


def linear(key: str, layer: int | None, in_features: int, out: int, *modules: str) -> LoraSite:
    """A site of one slice."""
    return LoraSite(key, layer, SiteKind.LINEAR, in_features, out, (SiteSlice(key, out, modules),))


def two_slices(key: str, layer: int, in_features: int, half: int, prefix: str) -> LoraSite:
    """A dense gate and up under `prefix`."""
    slices = (
        SiteSlice("gate", half, (f"{prefix}.gate_proj",)),
        SiteSlice("up", half, (f"{prefix}.up_proj",)),
    )
    return LoraSite(key, layer, SiteKind.LINEAR, in_features, 2 * half, slices)


def experts(
    layer: int,
    num_experts: int,
    hidden: int,
    inner: int,
    fused_root: str,
    listed_root: str,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    *,
    layout: ParameterLayout = ParameterLayout.OUT_IN,
    row_order: RowOrder = RowOrder.CONCATENATED,
) -> list[LoraSite]:
    """Gate_up and down of one layer's experts."""
    gate, up, down = (f"{listed_root}.{{expert}}.{name}" for name in names)
    return [
        LoraSite(
            "gate_up", layer, SiteKind.EXPERTS, hidden, 2 * inner,
            (SiteSlice("gate", inner, (gate,)), SiteSlice("up", inner, (up,))),
            num_experts, row_order, f"{fused_root}.gate_up_proj", layout,
        ),
        LoraSite(
            "down", layer, SiteKind.EXPERTS, inner, hidden, (SiteSlice("down", hidden, (down,)),),
            num_experts, row_order, f"{fused_root}.down_proj", layout,
        ),
    ]  # fmt: skip


def attention(layer: int, hidden: int, q: int, kv: int) -> list[LoraSite]:
    """q, k, v and o."""
    prefix = f"model.layers.{layer}.self_attn"
    return [
        linear("q", layer, hidden, q, f"{prefix}.q_proj"),
        linear("k", layer, hidden, kv, f"{prefix}.k_proj"),
        linear("v", layer, hidden, kv, f"{prefix}.v_proj"),
        linear("o", layer, q, hidden, f"{prefix}.o_proj"),
    ]


def embed_and_head(vocab: int, hidden: int, model: str) -> list[LoraSite]:
    """The sites outside the layers, with the digests of the stored weights where the model is here."""
    embed, head = (stored_weight(model, name) for name in ("model.embed_tokens.weight", "lm_head.weight"))
    return [
        LoraSite(
            "embed", None, SiteKind.EMBEDDING, vocab, hidden,
            (SiteSlice("embed", hidden, ("model.embed_tokens",)),),
            base_weight_dtype=embed[0], base_weight_sha256=embed[1],
        ),
        LoraSite(
            "lm_head", None, SiteKind.LINEAR, hidden, vocab, (SiteSlice("lm_head", vocab, ("lm_head",)),),
            base_weight_dtype=head[0], base_weight_sha256=head[1],
        ),
    ]  # fmt: skip


def stored_weight(model: str, name: str) -> tuple[str, str]:
    """Dtype name and sha256 of a checkpoint's tensor; ("", "") where no file has it."""
    for path in sorted((FIXTURES / "models" / model).glob("*.safetensors")):
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        entry = json.loads(data[8 : 8 + length]).get(name)
        if entry:
            start, end = entry["data_offsets"]
            return entry["dtype"], hashlib.sha256(data[8 + length + start : 8 + length + end]).hexdigest()
    return "", ""


def qwen3_moe() -> LoraSchema:
    """3 layers, 8 experts, hidden 64, expert width 48."""
    sites = list[LoraSite]()
    for layer in range(3):
        mlp = f"model.layers.{layer}.mlp"
        sites += attention(layer, 64, 128, 64)
        sites.append(linear("router", layer, 64, 8, f"{mlp}.gate"))
        sites += experts(layer, 8, 64, 48, f"{mlp}.experts", f"{mlp}.experts")
    return LoraSchema(3, (*sites, *embed_and_head(528, 64, "qwen3_moe")))


def gpt_oss() -> LoraSchema:
    """4 layers, 8 experts, gate and up interleaved, down square."""
    sites = list[LoraSite]()
    for layer in range(4):
        mlp = f"model.layers.{layer}.mlp"
        sites += attention(layer, 64, 128, 32)
        sites.append(linear("router", layer, 64, 8, f"{mlp}.router"))
        sites += experts(
            layer, 8, 64, 64, f"{mlp}.experts", f"{mlp}.experts",
            layout=ParameterLayout.IN_OUT, row_order=RowOrder.INTERLEAVED,
        )  # fmt: skip
    return LoraSchema(4, (*sites, *embed_and_head(512, 64, "gpt_oss")))


def llama4() -> LoraSchema:
    """4 layers, dense and MoE in turn, parameters stored [E, in, out]."""
    sites = list[LoraSite]()
    for layer in range(4):
        mlp = f"model.layers.{layer}.feed_forward"
        sites += attention(layer, 64, 64, 32)
        if layer % 2:
            sites.append(linear("router", layer, 64, 4, f"{mlp}.router"))
            sites += experts(
                layer, 4, 64, 48, f"{mlp}.experts", f"{mlp}.experts", layout=ParameterLayout.IN_OUT
            )
            shared = f"{mlp}.shared_expert"
            sites.append(two_slices("shared_gate_up", layer, 64, 48, shared))
            sites.append(linear("shared_down", layer, 48, 64, f"{shared}.down_proj"))
        else:
            sites.append(two_slices("mlp_gate_up", layer, 64, 96, mlp))
            sites.append(linear("mlp_down", layer, 96, 64, f"{mlp}.down_proj"))
    return LoraSchema(4, (*sites, *embed_and_head(512, 64, "llama4")))


def mixtral() -> LoraSchema:
    """3 layers, 4 experts, named w1, w3 and w2 on disk and in old PEFT files."""
    sites = list[LoraSite]()
    for layer in range(3):
        mlp, old = f"model.layers.{layer}.mlp", f"model.layers.{layer}.block_sparse_moe"
        sites += attention(layer, 64, 64, 32)
        sites.append(linear("router", layer, 64, 4, f"{mlp}.gate", f"{old}.gate"))
        sites += experts(layer, 4, 64, 96, f"{mlp}.experts", f"{old}.experts", ("w1", "w3", "w2"))
    return LoraSchema(3, (*sites, *embed_and_head(512, 64, "mixtral")))


SCHEMAS = {"qwen3_moe": qwen3_moe, "gpt_oss": gpt_oss, "llama4": llama4, "mixtral": mixtral}


def schema_of(model: str) -> LoraSchema:
    """A fixture model's: written by hand where it is, else what its node declares."""
    if model in SCHEMAS:
        return SCHEMAS[model]()
    spec = describe_model(FIXTURES / "models" / model).spec
    return lora_schema(spec, lambda name: stored_weight(model, name))
