"""Files that say the same thing twice are refused; lone parameters are found by their shape."""

from pathlib import Path

import pytest
import torch

from adapter_manager.domain.errors import InvalidAdapterError, UnsupportedAdapterError
from lorikeet_contract.schema import LoraSchema
from tests.support.adapter_directories import PREFIX, config_of, ingest, linear_pair, write_adapter
from tests.support.expert_layouts import Tensors, Weights, packed, pair, stacked, unsloth_projs
from tests.support.lora_deltas import assert_same, deltas_of
from tests.support.lora_schemas import embed_and_head, experts, linear, two_slices

ROOT = "model.layers.0.mlp.experts"
SCHEMA = LoraSchema(
    1,
    (
        linear("q", 0, 32, 32, "model.layers.0.self_attn.q_proj"),
        *experts(0, 4, 32, 24, ROOT, ROOT),
        *embed_and_head(16, 32, "none"),
    ),
)


def weights(in_features: int, out: int) -> Weights:
    """Ones are enough here."""
    return torch.ones(4, 2, in_features), torch.ones(4, out, 2)


GATE_UP, DOWN = weights(32, 48), weights(24, 32)
GATE, UP = linear_pair(f"{ROOT}.1.gate_proj", 32, 24), linear_pair(f"{ROOT}.1.up_proj", 32, 24)


def prefixed(tensors: Tensors) -> Tensors:
    """With PEFT's prefix."""
    return {PREFIX + k: v for k, v in tensors.items()}


CONFLICTS: dict[str, tuple[Tensors, str]] = {
    "two names of one projection": (GATE | linear_pair(f"{ROOT}.1.w1", 32, 24), "given twice"),
    "stacked and listed, whole": (
        prefixed(stacked(ROOT, GATE_UP, DOWN) | unsloth_projs(ROOT, GATE_UP, DOWN)),
        "mixed",
    ),
    "fused and separate slices": (GATE | prefixed(unsloth_projs(ROOT, GATE_UP, DOWN)), "mixed"),
    "with and without prefix": (
        GATE | {k.removeprefix(PREFIX): v for k, v in GATE.items()},
        "given twice",
    ),
    "two adapters": (
        {k.replace(".weight", ".one.weight"): v for k, v in GATE.items()}
        | {k.replace(".weight", ".two.weight"): v for k, v in UP.items()},
        "several adapters",
    ),
    "expert listed twice": (prefixed(unsloth_projs(ROOT, GATE_UP, DOWN)) | GATE | UP, "mixed"),
}


@pytest.mark.parametrize("case", CONFLICTS)
def test_conflict_is_refused(tmp_path: Path, case: str) -> None:
    """No tensor wins silently over another."""
    tensors, words = CONFLICTS[case]
    with pytest.raises(InvalidAdapterError, match=words):
        ingest(write_adapter(tmp_path / "a", tensors), SCHEMA, tmp_path)


@pytest.mark.parametrize("key", ["gate_up", "down"])
def test_lone_parameter_without_target_parameters_is_found_by_its_shape(tmp_path: Path, key: str) -> None:
    """It fits one parameter only; one that fits none is refused."""
    lone = prefixed(pair(ROOT, *packed(*(GATE_UP if key == "gate_up" else DOWN))))
    built, _ = ingest(write_adapter(tmp_path / "a", lone), SCHEMA, tmp_path)
    assert [s.site for s in built.report.sites] == [f"layers.0.{key}"]
    with pytest.raises(InvalidAdapterError, match="fit none of"):
        ingest(write_adapter(tmp_path / "a", prefixed(pair(ROOT, *packed(*weights(7, 9))))), SCHEMA, tmp_path)


def test_nested_parameter_of_wrong_width_is_refused(tmp_path: Path) -> None:
    """Expected widths are named, in either orientation."""
    tensors = prefixed(pair(f"{ROOT}.base_layer", *packed(*weights(32, 50))) | pair(ROOT, *packed(*DOWN)))
    with pytest.raises(InvalidAdapterError, match="takes 32 and 48, or the reverse"):
        ingest(write_adapter(tmp_path / "a", tensors), SCHEMA, tmp_path)


def test_inner_parameter_alone_is_the_first_of_its_module(tmp_path: Path) -> None:
    """`base_layer` says that there were two; the second may be missing like any module."""
    tensors = prefixed(pair(f"{ROOT}.base_layer", *packed(*GATE_UP)))
    built, _ = ingest(write_adapter(tmp_path / "a", tensors), SCHEMA, tmp_path)
    assert [s.site for s in built.report.sites] == ["layers.0.gate_up"]


def test_slices_of_different_alpha_have_a_scale_each(tmp_path: Path) -> None:
    """A dense gate and up, and all experts alike: as many scales as slices, not more."""
    schema = LoraSchema(1, (two_slices("mlp_gate_up", 0, 32, 24, "model.layers.0.mlp"),))
    tensors = linear_pair("model.layers.0.mlp.gate_proj", 32, 24, seed=1)
    tensors |= linear_pair("model.layers.0.mlp.up_proj", 32, 24, seed=2)
    config = config_of(alpha_pattern={"up_proj": 6})
    built, deltas = ingest(write_adapter(tmp_path / "a", tensors, config), schema, tmp_path)
    assert built.manifest.layers[0].sites[0].scales == (2.0, 3.0)
    assert_same(deltas, deltas_of(config, tensors, schema))


def test_weight_tying_is_refused_where_it_matters(tmp_path: Path) -> None:
    """Only the embedding and the head can be tied."""
    config = config_of(ensure_weight_tying=True)
    attention = linear_pair("model.layers.0.self_attn.q_proj", 32, 32)
    ingest(write_adapter(tmp_path / "a", attention, config), SCHEMA, tmp_path)
    with pytest.raises(UnsupportedAdapterError, match="ensure_weight_tying"):
        ingest(write_adapter(tmp_path / "a", linear_pair("lm_head", 32, 16), config), SCHEMA, tmp_path)


def test_head_under_another_trainers_name(tmp_path: Path) -> None:
    """Tinker calls lm_head unembed_tokens."""
    tensors = linear_pair("model.unembed_tokens", 32, 16)
    built, _ = ingest(write_adapter(tmp_path / "a", tensors), SCHEMA, tmp_path)
    assert [s.site for s in built.report.sites] == ["lm_head"]


def test_unscaled_factor_beyond_the_computed_range_is_refused(tmp_path: Path) -> None:
    """Lora_A takes no scale, but must be a number of the computed type as well."""
    tensors = linear_pair("model.layers.0.self_attn.q_proj", 32, 32)
    tensors[f"{PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight"][0, 0] = 1e5
    with pytest.raises(InvalidAdapterError, match="float16"):
        ingest(write_adapter(tmp_path / "a", tensors), SCHEMA, tmp_path, compute_dtype="float16")
