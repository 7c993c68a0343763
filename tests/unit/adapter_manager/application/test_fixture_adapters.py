"""The fixture adapters: their payloads have exactly the deltas that PEFT's formulas give, site by site."""

from pathlib import Path

import pytest

from adapter_manager.domain.errors import UnsupportedAdapterError
from adapter_manager.domain.layout_options import ExpertOrientation, LayoutOptions
from tests.support.adapter_directories import ingest
from tests.support.lora_deltas import assert_same, peft_deltas
from tests.support.lora_schemas import FIXTURES, SCHEMAS, schema_of

ADAPTERS = FIXTURES / "adapters"
ALL = sorted(f"{path.parent.name}/{path.name}" for path in ADAPTERS.glob("*/*"))
REFUSED = {
    "qwen3_moe/dora-r4": "use_dora",
    "gpt_oss/bias-all-r4": "bias",
    "gpt_oss/lora-bias-r4": "lora_bias",
    "llama/dora-r4": "use_dora",
    "llama/modules-to-save-r4": "modules_to_save",
}
LAYOUTS = {
    "qwen3_moe/experts-r4": "peft-fused",
    "qwen3_moe/experts-r4.fused-reversed": "peft-fused-exchanged",
    "qwen3_moe/experts-r4.per-expert": "per-expert",
    "qwen3_moe/experts-r4.stacked-3d": "stacked-3d",
    "gpt_oss/experts-r4.unsloth-projs": "per-expert-fused",
    "llama4/experts-r4": "peft-fused-exchanged",
    "llama4/experts-r4.fused-standard": "peft-fused",
    "mixtral/legacy-w123-r4": "per-expert",
    "olmoe/experts-r4": "peft-fused",
    "olmoe/experts-r4.fused-reversed": "peft-fused-exchanged",
    "granitemoe/experts-r4": "peft-fused",
    "qwen2_moe/experts-r4.per-expert": "per-expert",
    "deepseek_v3/legacy-all-linear-r4": "per-expert",
}


def is_exchanged(name: str) -> bool:
    """What the fixtures' README says of their orientation."""
    return name.endswith("fused-reversed") or (name.startswith("llama4/") and not name.endswith("standard"))


@pytest.mark.parametrize("name", [n for n in ALL if n not in REFUSED])
def test_payload_equals_pefts_formulas(name: str, tmp_path: Path) -> None:
    """Float64 deltas of every site and expert agree, and the report counts every tensor once."""
    schema = schema_of(name.partition("/")[0])
    built, deltas = ingest(ADAPTERS / name, schema, tmp_path)
    assert_same(deltas, peft_deltas(ADAPTERS / name, schema, is_exchanged=is_exchanged(name)))
    report = built.report
    assert report.tensors_used + report.tensors_neutral == report.tensors_total
    assert report.tensors_used == sum(s.tensors for s in report.sites)
    assert sum(s.bytes for s in report.sites) == built.manifest.payload_bytes
    assert built.payload_path.stat().st_size == built.manifest.payload_bytes


@pytest.mark.parametrize("name", REFUSED)
def test_feature_that_is_not_served_is_refused_by_name(name: str, tmp_path: Path) -> None:
    """Refused with the field that asks for it, and no payload is left."""
    with pytest.raises(UnsupportedAdapterError) as caught:
        ingest(ADAPTERS / name, schema_of(name.partition("/")[0]), tmp_path)
    assert caught.value.metadata["field"] == REFUSED[name]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", LAYOUTS)
def test_report_names_the_layout(name: str, tmp_path: Path) -> None:
    """Each layout of the experts is recognised for what it is."""
    built, _ = ingest(ADAPTERS / name, schema_of(name.partition("/")[0]), tmp_path)
    assert {s.layout for s in built.report.sites if s.site.endswith(("gate_up", "down"))} >= {LAYOUTS[name]}


def test_copies_of_one_function_have_the_same_weights(tmp_path: Path) -> None:
    """Layouts that only rename and reorder give the same payload, and so the same revision."""
    schema = SCHEMAS["qwen3_moe"]()
    digests = {
        ingest(ADAPTERS / "qwen3_moe" / name, schema, tmp_path)[0].digest
        for name in ("experts-r4", "experts-r4.fused-reversed", "experts-r4.stacked-3d")
    }
    assert len(digests) == 1


def test_lone_square_parameter_warns_and_obeys_the_option(tmp_path: Path) -> None:
    """Gpt-oss down_proj alone does not tell its orientation: the default is said, the option decides."""
    schema, directory = SCHEMAS["gpt_oss"](), ADAPTERS / "gpt_oss" / "down-only-r4"
    built, _ = ingest(directory, schema, tmp_path)
    assert "orientation" in built.report.warnings[0]
    options = LayoutOptions(orientation=ExpertOrientation.EXCHANGED)
    built, deltas = ingest(directory, schema, tmp_path, options)
    assert not built.report.warnings
    assert_same(deltas, peft_deltas(directory, schema, is_exchanged=True))


def test_head_and_embedding_copies_are_neutral(tmp_path: Path) -> None:
    """PEFT's copies of the base weights are proven equal by their sha256, not used."""
    built, _ = ingest(ADAPTERS / "qwen3_moe" / "head-embed-r8", SCHEMAS["qwen3_moe"](), tmp_path)
    assert (built.report.tensors_used, built.report.tensors_neutral) == (4, 2)
    assert [(s.site, s.layout) for s in built.report.sites] == [("embed", "embedding"), ("lm_head", "linear")]
