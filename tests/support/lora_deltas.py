"""Dense float64 deltas of an adapter, made twice: from PEFT's files by its formulas, from a payload by ours.

Neither shares code with ingest: names are read with a few regular expressions, patterns with `re`.
"""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from lorikeet_contract.manifest import Manifest, PayloadDtype, PayloadSite
from lorikeet_contract.schema import LoraSchema, LoraSite, RowOrder, SiteKind

# (site name, expert or -1) -> delta [out, in] of the base weight, rows in the site's order.
Deltas = dict[tuple[str, int], np.ndarray]

_KEY = re.compile(
    r"(?:base_model\.model\.)?(.+)\.lora_(A|B|embedding_A|embedding_B)(?:\.default)?(?:\.weight)?"
)
_SLICE = {
    "gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1, "down_proj": 0, "w2": 0,
}  # fmt: skip
_TORCH = {
    PayloadDtype.FLOAT32: torch.float32,
    PayloadDtype.FLOAT16: torch.float16,
    PayloadDtype.BFLOAT16: torch.bfloat16,
}


def peft_deltas(
    directory: Path, schema: LoraSchema, *, is_exchanged: bool = False, is_expert_major: bool = False
) -> Deltas:
    """What PEFT's documentation says the files mean.

    Args:
        directory: adapter_config.json and adapter_model.safetensors.
        schema: names and shapes of the base model.
        is_exchanged: fused expert tensors have A on the output side.
        is_expert_major: columns of a fused lora_B run expert by expert.
    """
    config = json.loads((directory / "adapter_config.json").read_text())
    tensors = load_file(directory / "adapter_model.safetensors")
    return deltas_of(config, tensors, schema, is_exchanged=is_exchanged, is_expert_major=is_expert_major)


def deltas_of(
    config: Mapping[str, object],
    tensors: Mapping[str, torch.Tensor],
    schema: LoraSchema,
    *,
    is_exchanged: bool = False,
    is_expert_major: bool = False,
) -> Deltas:
    """As `peft_deltas`, of values instead of files."""
    factors: dict[str, dict[str, np.ndarray]] = {}
    for key, tensor in tensors.items():
        if match := _KEY.fullmatch(key):
            side = match[2][-1]
            array = tensor.to(torch.float64).numpy()
            factors.setdefault(match[1], {})[side] = (
                array.T if "embedding" in match[2] and side == "A" else array
            )
    deltas: Deltas = {}
    for module, pair in factors.items():
        name = module.replace("language_model.model.", "model.")
        if re.search(r"\.experts(\.base_layer)?$", name):
            _add_fused(deltas, schema, config, name, pair, factors, is_exchanged, is_expert_major)
        elif match := re.fullmatch(r"(.+\.experts)\.(\d+)\.(\w+)", name):
            _add_expert(deltas, schema, config, name, match[1], int(match[2]), match[3], pair)
        elif match := re.fullmatch(r"(.+\.experts)\.(gate_up|down)_projs\.(\d+)", name):
            _add_expert(deltas, schema, config, name, match[1], int(match[3]), match[2], pair)
        elif match := re.fullmatch(r"(.+\.experts)\.(\w+)", name):
            _add_stacked(deltas, schema, config, name, match[1], match[2], pair)
        else:
            _add_linear(deltas, schema, config, name, pair)
    return deltas


def payload_deltas(manifest: Manifest, payload: bytes, schema: LoraSchema) -> Deltas:
    """What the canonical payload's definition says."""
    sites = {site.name: site for site in schema.sites}
    deltas: Deltas = {}
    for layer in manifest.layers:
        for placed in layer.sites:
            site = sites[placed.key if layer.layer is None else f"layers.{layer.layer}.{placed.key}"]
            a = _tensor(payload, placed.a.offset, placed.a.shape, manifest.dtype)
            b = _tensor(payload, placed.b.offset, placed.b.shape, manifest.dtype)
            if site.kind is SiteKind.EXPERTS:
                for expert in range(site.num_experts):
                    deltas[site.name, expert] = _site_delta(site, placed, a[expert], b[expert], expert)
            else:
                a = a.T if site.kind is SiteKind.EMBEDDING else a
                deltas[site.name, -1] = _site_delta(site, placed, a, b, 0)
    return deltas


def assert_same(ours: Deltas, reference: Deltas) -> None:
    """Equal to float64 rounding; a site or expert that one side lacks is zero on the other."""
    assert any(np.any(d) for d in reference.values()) == any(np.any(d) for d in ours.values())
    for key in ours.keys() | reference.keys():
        mine, theirs = ours.get(key), reference.get(key)
        if mine is None or theirs is None:
            present = theirs if mine is None else mine
            assert present is not None
            assert not np.any(present), f"{key} is on one side only"
            continue
        assert mine.shape == theirs.shape, key
        np.testing.assert_allclose(mine, theirs, rtol=1e-12, atol=1e-14, err_msg=str(key))


def _tensor(payload: bytes, offset: int, shape: tuple[int, ...], dtype: PayloadDtype) -> np.ndarray:
    data = bytearray(payload[offset : offset + math.prod(shape) * dtype.itemsize])
    return torch.frombuffer(data, dtype=_TORCH[dtype]).reshape(shape).to(torch.float64).numpy()


def _site_delta(site: LoraSite, placed: PayloadSite, a: np.ndarray, b: np.ndarray, expert: int) -> np.ndarray:
    num_slices = len(site.slices)
    scales = placed.scales
    if len(scales) == 1:
        row_scales = [scales[0]] * num_slices
    elif len(scales) == num_slices:
        row_scales = list(scales)
    else:
        row_scales = list(scales[expert * num_slices : (expert + 1) * num_slices])
    delta = np.zeros((site.out_features, site.in_features))
    padded = b.shape[1]
    for index in range(num_slices):
        rows = _rows(site, index)
        half = a[index * padded : (index + 1) * padded] if placed.num_a == 2 else a
        delta[rows] = row_scales[index] * b[rows] @ half
    return delta


def _rows(site: LoraSite, index: int) -> np.ndarray:
    width = site.slices[index].out_features
    if site.row_order is RowOrder.INTERLEAVED and len(site.slices) > 1:
        return np.arange(width) * len(site.slices) + index
    return np.arange(width) + sum(s.out_features for s in site.slices[:index])


def _scale(config: Mapping[str, object], name: str, rank: int) -> float:
    def looked_up(field: str, default: object) -> object:
        pattern = config.get(field) or {}
        assert isinstance(pattern, dict)
        return next((v for k, v in pattern.items() if re.match(rf"(.*\.)?({k})$", name)), default)

    expected, alpha = looked_up("rank_pattern", config["r"]), looked_up("alpha_pattern", config["lora_alpha"])
    assert expected == rank, f"{name}: rank {rank}, configuration {expected}"
    assert isinstance(alpha, int | float)
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def _layer(name: str) -> int:
    match = re.search(r"\.layers\.(\d+)\.", name)
    assert match is not None
    return int(match[1])


def _site(schema: LoraSchema, layer: int | None, key: str) -> LoraSite:
    return next(s for s in schema.sites if s.layer == layer and s.key == key)


def _add_fused(
    deltas: Deltas,
    schema: LoraSchema,
    config: Mapping[str, object],
    name: str,
    pair: dict[str, np.ndarray],
    factors: Mapping[str, object],
    is_exchanged: bool,
    is_expert_major: bool,
) -> None:
    root = name.removesuffix(".base_layer")
    if root != name:
        key = "gate_up"
    elif f"{name}.base_layer" in factors:
        key = "down"
    else:
        targets = config["target_parameters"]
        assert isinstance(targets, list)
        assert len(targets) == 1
        key = "gate_up" if str(targets[0]).endswith("gate_up_proj") else "down"
    site = _site(schema, _layer(name), key)
    num_experts = site.num_experts
    rank = pair["A"].shape[0] // num_experts
    scale = _scale(config, f"{root}.{key}_proj", rank)
    a = pair["A"].reshape(num_experts, rank, -1)
    if is_expert_major:
        b = pair["B"].reshape(-1, num_experts, rank).transpose(0, 2, 1)
    else:
        b = pair["B"].reshape(-1, rank, num_experts)
    for expert in range(num_experts):
        delta = scale * b[:, :, expert] @ a[expert]
        deltas[site.name, expert] = delta.T if is_exchanged else delta


def _add_expert(
    deltas: Deltas,
    schema: LoraSchema,
    config: Mapping[str, object],
    name: str,
    root: str,
    expert: int,
    projection: str,
    pair: dict[str, np.ndarray],
) -> None:
    key = "down" if projection in ("down", "down_proj", "w2") else "gate_up"
    site = _site(schema, _layer(root), key)
    delta = _scale(config, name, pair["A"].shape[0]) * pair["B"] @ pair["A"]
    whole = deltas.setdefault((site.name, expert), np.zeros((site.out_features, site.in_features)))
    if projection in ("gate_up", "down", "gate_up_proj"):
        whole[:] = delta
    else:
        whole[_rows(site, _SLICE[projection])] = delta


def _add_stacked(
    deltas: Deltas,
    schema: LoraSchema,
    config: Mapping[str, object],
    name: str,
    root: str,
    projection: str,
    pair: dict[str, np.ndarray],
) -> None:
    key = "down" if projection in ("down_proj", "w2") else "gate_up"
    site = _site(schema, _layer(root), key)
    scale = _scale(config, name, pair["A"].shape[1])
    for expert in range(site.num_experts):
        a = pair["A"][expert if pair["A"].shape[0] > 1 else 0]
        b = pair["B"][expert if pair["B"].shape[0] > 1 else 0]
        whole = deltas.setdefault((site.name, expert), np.zeros((site.out_features, site.in_features)))
        if projection == "gate_up_proj":
            whole[:] = scale * b @ a
        else:
            whole[_rows(site, _SLICE[projection])] = scale * b @ a


def _add_linear(
    deltas: Deltas,
    schema: LoraSchema,
    config: Mapping[str, object],
    name: str,
    pair: dict[str, np.ndarray],
) -> None:
    for site in schema.sites:
        for index, piece in enumerate(site.slices):
            if name in piece.modules:
                a = pair["A"].T if site.kind is SiteKind.EMBEDDING else pair["A"]
                delta = _scale(config, name, a.shape[0]) * pair["B"] @ a
                whole = deltas.setdefault((site.name, -1), np.zeros((site.out_features, site.in_features)))
                whole[_rows(site, index)] = delta
                return
    raise AssertionError(f"{name} is no linear module of the schema")
