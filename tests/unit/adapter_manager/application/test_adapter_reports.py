"""Faults other servers had, at the level of weights: scales, names, ranks, dtypes."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from adapter_manager.domain.errors import InvalidAdapterError, LimitExceededError, UnsupportedAdapterError
from lorikeet_contract.manifest import PayloadDtype
from lorikeet_contract.schema import LoraSchema
from tests.support.adapter_directories import (
    PREFIX,
    config_of,
    ingest,
    linear_pair,
    safetensors_bytes,
    write_adapter,
)
from tests.support.expert_layouts import LAYOUTS, Tensors
from tests.support.lora_deltas import assert_same, deltas_of
from tests.support.lora_schemas import attention, experts, linear, qwen3_moe, two_slices

ROOT = "model.layers.0.mlp.experts"
QWEN = qwen3_moe()
Q, V = "model.layers.{}.self_attn.q_proj", "model.layers.{}.self_attn.v_proj"
Rename = Callable[[str], str]


def q_and_v(layers: tuple[int, ...] = (0, 1, 2), rank: int = 2) -> Tensors:
    """Pairs for q_proj and v_proj of the fixture model."""
    tensors: Tensors = {}
    for layer in layers:
        tensors |= linear_pair(Q.format(layer), 64, 128, rank, layer)
        tensors |= linear_pair(V.format(layer), 64, 64, rank, 10 + layer)
    return tensors


def test_b22_rslora_on_attention_and_experts_with_patterns(tmp_path: Path) -> None:
    """r=16, alpha=16: 4.0 on every path; r=3, alpha=6 by patterns on gate_up: the root of that rank."""
    schema = LoraSchema(1, (*attention(0, 32, 64, 32), *experts(0, 4, 32, 24, ROOT, ROOT)))
    generator = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    gate_up, down = (rand(4, 3, 32), rand(4, 48, 3)), (rand(4, 16, 24), rand(4, 32, 16))
    tensors = {PREFIX + k: v for k, v in LAYOUTS["peft-fused"](ROOT, gate_up, down).items()}
    tensors |= linear_pair("model.layers.0.self_attn.q_proj", 32, 64, 16)
    config = config_of(
        16, 16, use_rslora=True, rank_pattern={"experts.gate_up_proj": 3}, alpha_pattern={"gate_up_proj": 6},
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )  # fmt: skip
    built, deltas = ingest(write_adapter(tmp_path / "a", tensors, config), schema, tmp_path)
    scales = {s.site: s.scales for s in built.report.sites}
    assert scales["layers.0.q"] == (4.0,)
    assert scales["layers.0.down"] == (4.0,)
    assert scales["layers.0.gate_up"] == (pytest.approx(3.4641016151377544, abs=1e-12),)
    assert_same(deltas, deltas_of(config, tensors, schema))


RENAMED: dict[str, Rename] = {
    "no prefix": lambda k: k.removeprefix(PREFIX),
    "language_model": lambda k: k.replace("model.model.layers", "model.model.language_model.layers"),
    "multimodal of transformers 4": lambda k: k.replace(PREFIX, f"{PREFIX}language_model."),
    "adapter name": lambda k: k.replace(".weight", ".default.weight"),
}
BROKEN: dict[str, Rename] = {
    "layer 99": lambda k: k.replace("layers.0", "layers.99"),
    "misspelt": lambda k: k.replace("q_proj", "q_porj"),
    "other class": lambda k: k.replace("self_attn", "attention"),
    "prefix of another wrapper": lambda k: k.replace(PREFIX, "module."),
    "model class without model": lambda k: k.replace("model.layers", "layers"),
    "layer with a zero before it": lambda k: k.replace("layers.0.", "layers.00."),
    "layer below zero": lambda k: k.replace("layers.0.", "layers.-1."),
}


@pytest.mark.parametrize("case", RENAMED)
def test_b23_known_prefixes_are_tolerated_and_mean_the_same(tmp_path: Path, case: str) -> None:
    """The same revision as with PEFT's own names."""
    expected, _ = ingest(write_adapter(tmp_path / "a", q_and_v()), QWEN, tmp_path)
    renamed = {RENAMED[case](k): v for k, v in q_and_v().items()}
    built, _ = ingest(write_adapter(tmp_path / "b", renamed), QWEN, tmp_path)
    assert built.digest == expected.digest


@pytest.mark.parametrize("case", BROKEN)
def test_b23_keys_that_match_nothing_are_refused_by_name(tmp_path: Path, case: str) -> None:
    """Also where only some of them match nothing; every offending key is listed."""
    renamed = {BROKEN[case](k): v for k, v in q_and_v().items()}
    wrong = sorted(renamed.keys() - q_and_v().keys())
    with pytest.raises(InvalidAdapterError) as caught:
        ingest(write_adapter(tmp_path / "a", renamed), QWEN, tmp_path)
    assert caught.value.metadata["problem"] == "UNMATCHED_TENSORS"
    assert caught.value.metadata["unmatched_tensors"] == str(len(wrong))
    assert all(name in caught.value.message for name in wrong[:8])


def test_b23_one_good_tensor_among_nine_bad(tmp_path: Path) -> None:
    """All that is wrong is told at once: shapes, halves, names."""
    tensors = linear_pair(Q.format(0), 64, 128)
    tensors |= linear_pair(Q.format(1), 4096, 4096)
    tensors |= linear_pair(Q.format(77), 64, 128)
    tensors[f"{PREFIX}{V.format(0)}.lora_A.weight"] = torch.ones(2, 64)
    with pytest.raises(InvalidAdapterError) as caught:
        ingest(write_adapter(tmp_path / "a", tensors), QWEN, tmp_path)
    message = caught.value.message
    assert "[2, 4096], expected [rank, 64]" in message
    assert "has no lora_B beside it" in message
    assert "layers.77" in message
    assert not (tmp_path / "payload").exists()


def test_b23_missing_lora_alpha_is_refused(tmp_path: Path) -> None:
    """PEFT's default for it changed between versions, so the scale would be a guess."""
    directory = write_adapter(tmp_path / "a", q_and_v(), config_of(lora_alpha=...))
    with pytest.raises(InvalidAdapterError, match="no lora_alpha"):
        ingest(directory, QWEN, tmp_path)


def test_b23_zero_b_is_fine_and_said(tmp_path: Path) -> None:
    """A fresh adapter changes nothing; its zero pairs for modules that we lack are neutral."""
    tensors = {k: torch.zeros_like(v) if "lora_B" in k else v for k, v in q_and_v().items()}
    tensors |= {
        k: torch.zeros_like(v) if "lora_B" in k else v
        for k, v in linear_pair("model.layers.0.other", 64, 8).items()
    }
    built, deltas = ingest(write_adapter(tmp_path / "a", tensors), QWEN, tmp_path)
    assert (built.report.tensors_used, built.report.tensors_neutral) == (12, 2)
    assert any("changes nothing" in w for w in built.report.warnings)
    assert not any(d.any() for d in deltas.values())


def test_b23_adapter_of_neutral_tensors_only_is_refused(tmp_path: Path) -> None:
    """Nothing for any place of the model: not an adapter of this model."""
    tensors = {k: v * ("lora_A" in k) for k, v in linear_pair("model.layers.0.other", 64, 8).items()}
    with pytest.raises(InvalidAdapterError, match="change nothing"):
        ingest(write_adapter(tmp_path / "a", tensors), QWEN, tmp_path)


@pytest.mark.parametrize(
    ("flag", "suffix", "has_tensor", "feature"),
    [
        ("use_dora", "lora_magnitude_vector", True, "use_dora"),
        ("use_dora", "lora_magnitude_vector", False, "use_dora"),
        ("", "lora_magnitude_vector", True, "DoRA"),
        ("lora_bias", "lora_B.bias", True, "lora_bias"),
        ("lora_bias", "lora_B.bias", False, "lora_bias"),
        ("", "lora_B.bias", True, "lora_bias"),
        ("", "modules_to_save.weight", True, "modules_to_save"),
        ("", "token_adapter.trainable_tokens_delta", True, "trainable tokens"),
        ("", "bias", True, "bias"),
    ],
)
def test_b24_flag_or_tensor_is_refused_by_name(
    tmp_path: Path, flag: str, suffix: str, has_tensor: bool, feature: str
) -> None:
    """The flag with its tensor, the flag alone, the tensor alone; without any of them it loads."""
    tensors = q_and_v()
    if has_tensor:
        tensors[f"{PREFIX}{Q.format(0)}.{suffix}"] = torch.ones(128)
    directory = write_adapter(tmp_path / "a", tensors, config_of(**({flag: True} if flag else {})))
    with pytest.raises(UnsupportedAdapterError, match=feature):
        ingest(directory, QWEN, tmp_path)
    ingest(write_adapter(directory, q_and_v(), config_of(**({flag: False} if flag else {}))), QWEN, tmp_path)


@pytest.mark.parametrize("rank", [1, 2, 4, 7, 8, 12, 16, 24, 33, 48, 64, 100])
def test_b31_every_rank_is_exact_and_padded_to_eight_only(tmp_path: Path, rank: int) -> None:
    """Hidden 96, width 40: odd ranks, ranks over the width, no padding to a server's maximum."""
    schema = LoraSchema(
        1, (linear("q", 0, 96, 40, "model.layers.0.self_attn.q_proj"), *experts(0, 3, 96, 40, ROOT, ROOT))
    )
    tensors = linear_pair("model.layers.0.self_attn.q_proj", 96, 40, rank)
    generator = torch.Generator().manual_seed(rank)
    gate_up = (torch.randn(3, rank, 96, generator=generator), torch.randn(3, 80, rank, generator=generator))
    down = (torch.randn(3, rank, 40, generator=generator), torch.randn(3, 96, rank, generator=generator))
    tensors |= {PREFIX + k: v for k, v in LAYOUTS["peft-fused"](ROOT, gate_up, down).items()}
    config = config_of(rank, 2 * rank, target_parameters=["gate_up_proj", "down_proj"])
    directory = write_adapter(tmp_path / "a", tensors, config)
    built, deltas = ingest(directory, schema, tmp_path, max_rank=rank)
    assert_same(deltas, deltas_of(config, tensors, schema))
    assert {s.b.shape[-1] for layer in built.manifest.layers for s in layer.sites} == {
        8 * math.ceil(rank / 8)
    }
    if rank > 1:
        with pytest.raises(LimitExceededError, match=rf"up to {rank - 1} \(a node's --max-rank\)"):
            ingest(directory, schema, tmp_path, max_rank=rank - 1)


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({"target_modules": "all-linear"}, (0, 1, 2)),
        ({"target_modules": ".*layers\\.1\\.self_attn\\.(q|v)_proj"}, (1,)),
        ({"target_modules": ["q_proj", "v_proj"]}, (1,)),
        ({"target_modules": [Q.format(0), V.format(0)]}, (0,)),
        ({"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1]}, (1,)),
        ({"target_modules": ["q_proj", "v_proj", "gate_proj"]}, (0, 1, 2)),
        ({"target_modules": None}, (2,)),
        ({}, (0, 2)),
    ],
)
def test_b47_coverage_is_what_the_tensors_cover(
    tmp_path: Path, fields: dict[str, object], layers: tuple[int, ...]
) -> None:
    """However target_modules is written; other layers stay untouched and take no bytes."""
    tensors, config = q_and_v(layers), config_of(**fields)  # type: ignore[arg-type]
    built, deltas = ingest(write_adapter(tmp_path / "a", tensors, config), QWEN, tmp_path)
    assert [layer.layer for layer in built.manifest.layers] == list(layers)
    assert_same(deltas, deltas_of(config, tensors, QWEN))


def test_dense_mlp_slices_with_their_own_a(tmp_path: Path) -> None:
    """Gate and up of a dense MLP become one site with two A; one slice alone leaves the other's rows zero."""
    schema = LoraSchema(1, (two_slices("mlp_gate_up", 0, 32, 24, "model.layers.0.mlp"),))
    gate, up = (
        linear_pair(f"model.layers.0.mlp.{n}_proj", 32, 24, 2, i) for i, n in enumerate(("gate", "up"))
    )
    for tensors, num_a in ((gate | up, 2), (up, 1)):
        built, deltas = ingest(write_adapter(tmp_path / "a", tensors), schema, tmp_path)
        assert built.manifest.layers[0].sites[0].num_a == num_a
        assert_same(deltas, deltas_of(config_of(), tensors, schema))


def test_vision_tower_beside_a_language_model_is_not_reached_by_text(tmp_path: Path) -> None:
    """Layout 11: q_proj targeted by its last name hits the vision tower, too."""
    tensors = {k.replace(PREFIX, f"{PREFIX}language_model."): v for k, v in q_and_v().items()}
    tensors |= linear_pair("vision_model.model.layers.0.self_attn.q_proj", 16, 16)
    built, deltas = ingest(write_adapter(tmp_path / "a", tensors), QWEN, tmp_path)
    assert built.report.tensors_neutral == 2
    assert "vision" in built.report.warnings[0]
    assert_same(deltas, deltas_of(config_of(), q_and_v(), QWEN))


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ((torch.float32, torch.float32), PayloadDtype.FLOAT32),
        ((torch.float16, torch.float16), PayloadDtype.FLOAT16),
        ((torch.bfloat16, torch.bfloat16), PayloadDtype.BFLOAT16),
        ((torch.float64, torch.float64), PayloadDtype.FLOAT32),
        ((torch.bfloat16, torch.float16), PayloadDtype.FLOAT32),
        ((torch.float32, torch.float64), PayloadDtype.FLOAT32),
    ],
)
def test_b52_every_float_dtype_loads_without_loss(
    tmp_path: Path, dtypes: tuple[torch.dtype, torch.dtype], expected: PayloadDtype
) -> None:
    """Alone and mixed; only float64 is rounded, and the report says so."""
    tensors = {k: v.to(dtypes["lora_B" in k]) for k, v in q_and_v().items()}
    built, deltas = ingest(write_adapter(tmp_path / "a", tensors), QWEN, tmp_path)
    assert built.manifest.dtype is expected
    kept = {k: v.float() if v.dtype is torch.float64 else v for k, v in tensors.items()}
    assert_same(deltas, deltas_of(config_of(), kept, QWEN))
    assert any("float64" in w for w in built.report.warnings) == (torch.float64 in dtypes)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.bool, torch.float8_e4m3fn])
def test_b52_integers_and_eight_bits_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    """They are quantized weights without their scales, or no weights."""
    tensors = {k: v.to(dtype) for k, v in q_and_v((0,)).items()}
    with pytest.raises(InvalidAdapterError, match="dtype"):
        ingest(write_adapter(tmp_path / "a", tensors), QWEN, tmp_path)


@pytest.mark.parametrize(
    ("value", "dtype", "compute_dtype", "is_refused"),
    [
        (1e5, torch.float32, "float16", True),
        (1e5, torch.float32, "bfloat16", False),
        (1e5, torch.bfloat16, "", False),
        (40_000.0, torch.float16, "float16", True),  # its scale is 2
        (1e300, torch.float64, "", True),
        (3e38, torch.float32, "float32", True),
    ],
)
def test_b52_values_beyond_the_computed_range_are_refused(
    tmp_path: Path, value: float, dtype: torch.dtype, compute_dtype: str, is_refused: bool
) -> None:
    """The scaled weight must be a number of the type in which the node computes."""
    tensors = {k: v.to(dtype) for k, v in q_and_v((0,)).items()}
    tensors[f"{PREFIX}{Q.format(0)}.lora_B.weight"][5, 1] = value
    directory = write_adapter(tmp_path / "a", tensors)
    if is_refused:
        with pytest.raises(InvalidAdapterError, match="beyond the range"):
            ingest(directory, QWEN, tmp_path, compute_dtype=compute_dtype)
    else:
        ingest(directory, QWEN, tmp_path, compute_dtype=compute_dtype)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("side", ["A", "B"])
def test_one_element_that_is_no_number_is_refused(
    tmp_path: Path, value: float, dtype: torch.dtype, side: str
) -> None:
    """Wherever it is; the tensor is named."""
    tensors = {k: v.to(dtype) for k, v in q_and_v((0,)).items()}
    name = f"{PREFIX}{Q.format(0)}.lora_{side}.weight"
    tensors[name].view(-1)[-1] = value
    with pytest.raises(InvalidAdapterError, match="NaN or infinity") as caught:
        ingest(write_adapter(tmp_path / "a", tensors), QWEN, tmp_path)
    assert caught.value.metadata["tensor"] == name


def test_replaced_base_weight_is_refused_and_a_converted_copy_is_not(tmp_path: Path) -> None:
    """A copy in float32 of the bfloat16 base is equal; one other bit is a replacement."""
    source = Path(__file__).parents[3] / "fixtures/adapters/qwen3_moe/head-embed-r8"
    config = json.loads((source / "adapter_config.json").read_text())
    tensors = load_file(source / "adapter_model.safetensors")
    name = f"{PREFIX}lm_head.base_layer.weight"
    wide = {**tensors, name: tensors[name].float()}
    built, _ = ingest(write_adapter(tmp_path / "a", wide, config), QWEN, tmp_path)
    assert built.report.tensors_neutral == 2
    wide[name][0, 0] += 1e-6
    with pytest.raises(UnsupportedAdapterError, match="lm_head"):
        ingest(write_adapter(tmp_path / "a", wide, config), QWEN, tmp_path)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.bool, torch.int32, torch.int64])
def test_copy_of_a_base_weight_in_whole_numbers_is_refused_by_name(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    """As factors are."""
    name = f"{PREFIX}lm_head.base_layer.weight"
    tensors = {**q_and_v((0,)), name: torch.ones(528, 64).to(dtype)}
    with pytest.raises(InvalidAdapterError, match=r"lm_head.base_layer.weight' has dtype"):
        ingest(write_adapter(tmp_path / "a", tensors), QWEN, tmp_path)


def test_shards_are_read_as_one_and_checked_against_their_index(tmp_path: Path) -> None:
    """Each tensor where the index says, no other shard, no path."""
    tensors = q_and_v()
    names = sorted(tensors)
    directory = write_adapter(tmp_path / "a", {n: tensors[n] for n in names[:6]})
    first = "adapter_model-00001-of-00002.safetensors"
    second = "adapter_model-00002-of-00002.safetensors"
    (directory / "adapter_model.safetensors").rename(directory / first)
    write_adapter(tmp_path / "b", {n: tensors[n] for n in names[6:]})
    (tmp_path / "b" / "adapter_model.safetensors").rename(directory / second)
    index = directory / "adapter_model.safetensors.index.json"
    weight_map = dict.fromkeys(names[:6], first) | dict.fromkeys(names[6:], second)
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    built, deltas = ingest(directory, QWEN, tmp_path)
    assert built.report.tensors_used == 12
    assert_same(deltas, deltas_of(config_of(), tensors, QWEN))
    for wrong in (
        weight_map | {names[0]: "../../../../etc/passwd"},
        weight_map | {names[0]: "adapter_model-00003-of-00002.safetensors"},
        weight_map | {names[0]: second},
        weight_map | {"more": first},
        {n: weight_map[n] for n in names[1:]},
        [],
    ):
        index.write_text(json.dumps({"weight_map": wrong}))
        with pytest.raises(InvalidAdapterError, match="index") as caught:
            ingest(directory, QWEN, tmp_path)
        assert "root:" not in caught.value.message


def test_same_weights_always_give_the_same_revision(tmp_path: Path) -> None:
    """Neither the order in the file nor the configuration's wording is part of the identity."""
    tensors = q_and_v()
    first, _ = ingest(write_adapter(tmp_path / "a", tensors, config_of(2, 4)), QWEN, tmp_path)
    turned = dict(reversed(tensors.items()))
    directory = write_adapter(tmp_path / "b", turned, config_of(2, 4, rank_pattern={"q_proj": 2}))
    offset, header, data = 0, {}, b""
    for name, tensor in turned.items():
        raw = tensor.numpy().tobytes()
        header[name] = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + len(raw)],
        }
        offset, data = offset + len(raw), data + raw
    (directory / "adapter_model.safetensors").write_bytes(safetensors_bytes(header, data))
    second, _ = ingest(directory, QWEN, tmp_path)
    assert first.digest == second.digest
    third, _ = ingest(write_adapter(tmp_path / "c", tensors, config_of(2, 8)), QWEN, tmp_path)
    assert third.digest != first.digest
    assert np.prod(third.manifest.layers[0].sites[0].scales) == 4.0
