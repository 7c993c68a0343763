"""An adapter with the shapes of gpt-oss-20b, made on the spot in any of the layouts that people upload.

Rank 32 on q, k, v, o and both expert parameters of all 24 layers is 740 MB of bfloat16. The values are random
and finite; no model is needed.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np

from lorikeet_contract.schema import LoraSchema, LoraSite, ParameterLayout, RowOrder, SiteKind, SiteSlice

_PREFIX = "base_model.model."
_WRITE_BYTES = 8 << 20


class AdapterLayout(StrEnum):
    """How the experts' pairs lie in the file.

    FUSED: PEFT's `target_parameters`, lora_A [E*r, in] and lora_B [out, r*E]. STACKED: [E, r, in] and
    [E, out, r]. PER_EXPERT: a pair for each expert's gate_up and down. PER_EXPERT_SPLIT: gate and up have
    pairs of their own, which makes the file a fifth larger.
    """

    FUSED = "fused"
    STACKED = "stacked"
    PER_EXPERT = "per-expert"
    PER_EXPERT_SPLIT = "per-expert-split"


@dataclass(frozen=True, slots=True)
class GptOssShape:
    """Sizes of a gpt-oss model; gpt-oss-20b's by default (config.json of openai/gpt-oss-20b)."""

    layers: int = 24
    hidden: int = 2880
    intermediate: int = 2880
    experts: int = 32
    query: int = 64 * 64
    key_value: int = 8 * 64
    vocab: int = 201_088


GPT_OSS_20B = GptOssShape()


def gpt_oss_schema(shape: GptOssShape = GPT_OSS_20B) -> LoraSchema:
    """What a node that serves the model tells the manager of it; without digests of base weights."""
    h, i, n = shape.hidden, shape.intermediate, shape.experts
    sites = list[LoraSite]()
    for layer in range(shape.layers):
        root = f"model.layers.{layer}"
        for key, inner, out in _attention(shape):
            sites.append(_linear(key, layer, inner, out, f"{root}.self_attn.{key}_proj"))
        sites.append(_linear("router", layer, h, n, f"{root}.mlp.router"))
        experts = f"{root}.mlp.experts"
        for key, inner, slices in (
            ("gate_up", h, (("gate", i), ("up", i))),
            ("down", i, (("down", h),)),
        ):
            sites.append(
                LoraSite(
                    key=key,
                    layer=layer,
                    kind=SiteKind.EXPERTS,
                    in_features=inner,
                    out_features=sum(rows for _, rows in slices),
                    slices=tuple(
                        SiteSlice(name, rows, (f"{experts}.{{expert}}.{name}_proj",)) for name, rows in slices
                    ),
                    num_experts=n,
                    row_order=RowOrder.INTERLEAVED,
                    fused_parameter=f"{experts}.{key}_proj",
                    parameter_layout=ParameterLayout.IN_OUT,
                )
            )
    embed = (SiteSlice("embed", h, ("model.embed_tokens",)),)
    sites.append(LoraSite("embed", None, SiteKind.EMBEDDING, shape.vocab, h, embed))
    sites.append(_linear("lm_head", None, h, shape.vocab, "lm_head"))
    return LoraSchema(shape.layers, tuple(sites))


def write_gpt_oss_adapter(
    directory: Path,
    layout: AdapterLayout,
    *,
    rank: int = 32,
    shape: GptOssShape = GPT_OSS_20B,
    seed: int = 0,
) -> int:
    """Write the adapter as PEFT would; returns the bytes of its weights.

    It needs little memory and leaves the file in the page cache.
    """
    directory.mkdir(parents=True, exist_ok=True)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dims in _tensors(layout, rank, shape):
        end = offset + 2 * math.prod(dims)
        header[_PREFIX + name] = {"dtype": "BF16", "shape": dims, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (directory / "adapter_model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for block in _random_bfloat16(offset, seed):
            file.write(block.data)
    (directory / "adapter_config.json").write_text(json.dumps(_config(layout, rank), indent=1))
    return 8 + len(text) + offset


def _attention(shape: GptOssShape) -> tuple[tuple[str, int, int], ...]:
    """Name, input and output width of each projection."""
    h, q, kv = shape.hidden, shape.query, shape.key_value
    return ("q", h, q), ("k", h, kv), ("v", h, kv), ("o", q, h)


def _linear(key: str, layer: int | None, inner: int, out: int, module: str) -> LoraSite:
    return LoraSite(key, layer, SiteKind.LINEAR, inner, out, (SiteSlice(key, out, (module,)),))


def _tensors(layout: AdapterLayout, rank: int, shape: GptOssShape) -> Iterator[tuple[str, list[int]]]:
    for layer in range(shape.layers):
        root = f"model.layers.{layer}"
        for key, inner, out in _attention(shape):
            yield from _pair(f"{root}.self_attn.{key}_proj", [rank, inner], [out, rank])
        yield from _expert_tensors(f"{root}.mlp.experts", layout, rank, shape)


def _expert_tensors(
    root: str, layout: AdapterLayout, r: int, shape: GptOssShape
) -> Iterator[tuple[str, list[int]]]:
    h, i, n = shape.hidden, shape.intermediate, shape.experts
    match layout:
        case AdapterLayout.FUSED:
            yield from _pair(f"{root}.base_layer", [n * r, h], [2 * i, r * n])
            yield from _pair(root, [n * r, i], [h, r * n])
        case AdapterLayout.STACKED:
            yield from _pair(f"{root}.gate_up_proj", [n, r, h], [n, 2 * i, r])
            yield from _pair(f"{root}.down_proj", [n, r, i], [n, h, r])
        case AdapterLayout.PER_EXPERT:
            for expert in range(n):
                yield from _pair(f"{root}.gate_up_projs.{expert}", [r, h], [2 * i, r])
                yield from _pair(f"{root}.down_projs.{expert}", [r, i], [h, r])
        case AdapterLayout.PER_EXPERT_SPLIT:
            for expert in range(n):
                yield from _pair(f"{root}.{expert}.gate_proj", [r, h], [i, r])
                yield from _pair(f"{root}.{expert}.up_proj", [r, h], [i, r])
                yield from _pair(f"{root}.{expert}.down_proj", [r, i], [h, r])


def _pair(module: str, a: list[int], b: list[int]) -> Iterator[tuple[str, list[int]]]:
    yield f"{module}.lora_A.weight", a
    yield f"{module}.lora_B.weight", b


def _random_bfloat16(num_bytes: int, seed: int) -> Iterator[np.ndarray]:
    """Values of either sign with magnitudes from 2**-7 to 2**-6."""
    generator = np.random.default_rng(seed)
    for start in range(0, num_bytes, _WRITE_BYTES):
        size = min(_WRITE_BYTES, num_bytes - start)
        bits = np.frombuffer(bytearray(generator.bytes(size)), np.uint16)
        bits &= 0x807F
        bits |= 0x3C00
        yield bits


def _config(layout: AdapterLayout, rank: int) -> dict[str, object]:
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "openai/gpt-oss-20b",
        "peft_version": "0.21.2",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
        "target_parameters": parameters if layout is AdapterLayout.FUSED else None,
    }
