"""The report names every tensor of the files: shapes as safetensors has them, ranks and scales as PEFT."""

import itertools
import json
import math
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from adapter_manager.api import convert
from adapter_manager.application.ingest import IngestTarget, ingest_directory
from adapter_manager.domain.number_ranges import products, ranges
from adapter_manager.domain.report import ReportedRole, TensorGroup, UploadReport
from adapter_manager.domain.tensor_report import MAX_TENSORS_BYTES
from lorikeet_contract.schema import LoraSchema
from tests.support.adapter_directories import PREFIX, config_of, ingest, linear_pair, write_adapter
from tests.support.lora_schemas import FIXTURES, attention, experts, linear, qwen3_moe, schema_of

ADAPTERS = FIXTURES / "adapters"
LOADED = [
    f"{a['model']}/{a['name']}"
    for a in json.loads((FIXTURES / "manifest.json").read_text())["adapters"]
    if a["expect"] == "load"
]
ROOT = "model.layers.{}.mlp.experts"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def numbers(text: str) -> list[int]:
    """What a text of ranges stands for."""
    found: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def names_of(group: TensorGroup) -> list[str]:
    """Every name that a group stands for."""
    pieces = group.key.split("*")
    if not group.indices:
        return [group.key]
    assert len(pieces) == len(group.indices) + 1
    return [
        pieces[0] + "".join(f"{n}{rest}" for n, rest in zip(combination, pieces[1:], strict=True))
        for combination in itertools.product(*(numbers(text) for text in group.indices))
    ]


@pytest.mark.parametrize("name", LOADED)
def test_every_tensor_of_every_fixture_is_named(name: str, tmp_path: Path) -> None:
    """Each exactly once, with its own shape, dtype and role; bytes add up."""
    model = name.partition("/")[0]
    report = ingest(ADAPTERS / name, schema_of(model), tmp_path)[0].report
    named = {key: group for group in report.tensors for key in names_of(group)}
    with safe_open(ADAPTERS / name / "adapter_model.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (it is no mapping)
    assert named.keys() == tensors.keys()
    assert sum(group.count for group in report.tensors) == len(tensors) == report.tensors_total
    assert report.tensors_not_listed == 0
    assert report.file_bytes == sum(t.nbytes for t in tensors.values())
    assert report.file_bytes == sum(group.bytes for group in report.tensors)
    for key, tensor in tensors.items():
        group = named[key]
        assert (group.shape, DTYPES[group.dtype]) == (tuple(tensor.shape), tensor.dtype)
        is_base = ".lora_" not in key
        side = ReportedRole.LORA_A if re.search(r"lora_(embedding_)?A", key) else ReportedRole.LORA_B
        assert group.role is (ReportedRole.BASE_WEIGHT if is_base else side)
        assert bool(group.site) == (not is_base)
        assert ("own weight" in group.neutral) == is_base


@pytest.mark.parametrize("name", LOADED)
def test_rank_and_scale_are_those_of_pefts_rules(name: str, tmp_path: Path) -> None:
    """Rank and alpha by the first pattern that matches, alpha / r or alpha / sqrt(r)."""
    config = json.loads((ADAPTERS / name / "adapter_config.json").read_text())
    report = ingest(ADAPTERS / name, schema_of(name.partition("/")[0]), tmp_path)[0].report
    checked = 0
    for group in report.tensors:
        key = names_of(group)[0].removeprefix(PREFIX)
        if not group.site or ".experts" in key:  # what patterns call experts, other tests know
            continue
        module = re.sub(r"\.lora_.*", "", key)
        names = [module, f"{module}.weight"] if config.get("target_parameters") else [module]
        rank = next((v for n in names if (v := _pattern(config, "rank_pattern", n))), config["r"])
        alpha = next((v for n in names if (v := _pattern(config, "alpha_pattern", n))), config["lora_alpha"])
        assert group.rank == rank
        assert group.scale == pytest.approx(alpha / (math.sqrt(rank) if config["use_rslora"] else rank))
        numerator, _, divisor = group.scaling.partition(" by ")[0].partition("/")
        assert float(numerator) == pytest.approx(alpha, rel=1e-5)
        assert divisor == (f"sqrt({rank})" if config["use_rslora"] else str(rank))
        assert ("rank_pattern" in group.scaling) == (rank != config["r"])
        checked += 1
    assert checked or all(".experts" in g.key for g in report.tensors if g.site)


def _pattern(config: dict[str, dict[str, float]], field: str, name: str) -> float | None:
    for key, value in (config.get(field) or {}).items():
        if re.match(rf"(.*\.)?({key})$", name):
            return value
    return None


def test_a_report_line_by_line(tmp_path: Path) -> None:
    """Layers and experts in ranges, the slice, the layout, how the scale came about, what is zero and why."""
    sites = [*attention(0, 32, 64, 32), *experts(0, 4, 32, 24, ROOT.format(0), ROOT.format(0))]
    more = [*attention(1, 32, 64, 32), *experts(1, 4, 32, 24, ROOT.format(1), ROOT.format(1))]
    schema = LoraSchema(2, (*sites, *more))
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(2):
        tensors |= linear_pair(f"model.layers.{layer}.self_attn.q_proj", 32, 64, 2)
    for expert in (0, 1, 3):
        tensors |= linear_pair(f"{ROOT.format(1)}.{expert}.gate_proj", 32, 24, 4)
    tensors |= linear_pair("model.layers.0.self_attn.v_proj", 32, 32, 2)
    tensors[f"{PREFIX}model.layers.0.self_attn.v_proj.lora_B.weight"].zero_()
    tensors |= linear_pair("model.layers.7.self_attn.q_proj", 32, 64, 2)
    tensors[f"{PREFIX}model.layers.7.self_attn.q_proj.lora_B.weight"].zero_()
    config = config_of(2, 4, use_rslora=True, rank_pattern={"gate_proj": 4}, alpha_pattern={"gate_proj": 8})
    report = ingest(write_adapter(tmp_path / "a", tensors, config), schema, tmp_path)[0].report
    by_key = {(g.key, g.indices): g for g in report.tensors}
    assert len(by_key) == 8
    q = by_key[PREFIX + "model.layers.*.self_attn.q_proj.lora_A.weight", ("0-1",)]
    assert (q.count, q.shape, q.dtype, q.bytes) == (2, (2, 32), "F32", 2 * 2 * 32 * 4)
    assert (q.site, q.slice, q.layout, q.rank, q.neutral) == ("q", "", "linear", 2, "")
    assert (q.scale, q.scaling) == (pytest.approx(4 / math.sqrt(2)), "4/sqrt(2)")
    gate = by_key[PREFIX + "model.layers.*.mlp.experts.*.gate_proj.lora_B.weight", ("1", "0-1,3")]
    assert (gate.count, gate.shape, gate.site, gate.slice) == (3, (24, 4), "gate_up", "gate")
    assert (gate.layout, gate.scale) == ("per-expert", 4.0)
    assert gate.scaling == "8/sqrt(4) by rank_pattern and alpha_pattern"
    v = by_key[PREFIX + "model.layers.*.self_attn.v_proj.lora_A.weight", ("0",)]
    assert (v.site, v.neutral) == ("v", "lora_B is zero")
    stray = by_key[PREFIX + "model.layers.*.self_attn.q_proj.lora_A.weight", ("7",)]
    assert (stray.site, stray.neutral) == ("", "lora_B is zero; the base model has no such module")
    coverage = {kind.site: kind for kind in report.coverage}
    assert list(coverage) == ["q", "k", "v", "o", "gate_up", "down"]
    assert (coverage["q"].layers, coverage["q"].layers_without, coverage["q"].tensors) == ("0-1", "", 4)
    assert (coverage["v"].layers, coverage["v"].layers_without) == ("0", "1")
    gate_up = coverage["gate_up"]
    assert (gate_up.layers, gate_up.layers_without, gate_up.slices) == ("1", "0", ("gate",))
    assert (gate_up.min_experts, gate_up.max_experts, gate_up.num_experts) == (3, 3, 4)
    assert (gate_up.ranks, gate_up.scales, gate_up.layouts) == ((4,), (4.0,), ("per-expert",))
    assert (coverage["down"].tensors, coverage["down"].layers_without) == (0, "0-1")
    assert sum(kind.bytes for kind in report.coverage) == sum(site.bytes for site in report.sites)


def test_orientation_of_exchanged_pairs_is_told_by_layout_and_shape(tmp_path: Path) -> None:
    """The role is the file's own: lora_A stands on the output side there."""
    report = ingest(ADAPTERS / "qwen3_moe/experts-r4.fused-reversed", qwen3_moe(), tmp_path)[0].report
    inner = {g.role: g for g in report.tensors if ".base_layer." in g.key}
    assert {g.layout for g in inner.values()} == {"peft-fused-exchanged"}
    gate_up = next(s for s in qwen3_moe().sites if s.key == "gate_up")
    assert inner[ReportedRole.LORA_A].shape == (4 * gate_up.num_experts, gate_up.out_features)
    assert inner[ReportedRole.LORA_B].shape == (gate_up.in_features, 4 * gate_up.num_experts)


def report_of(directory: Path, schema: LoraSchema) -> UploadReport:
    """Of an ingest alone."""
    return ingest_directory(directory, IngestTarget(schema, "b" * 64), directory / "payload").report


def message_bytes(report: UploadReport) -> int:
    """What the report takes on the wire."""
    return convert.upload_report(report).ByteSize()


def test_an_adapter_of_thousands_of_tensors_has_a_small_report(tmp_path: Path) -> None:
    """Names that differ in numbers alone share their lines."""
    layers, num_experts = 12, 100
    schema = LoraSchema(
        layers,
        tuple(
            s for i in range(layers) for s in experts(i, num_experts, 1, 1, ROOT.format(i), ROOT.format(i))
        ),
    )
    one = torch.ones(1, 1)
    tensors = {
        f"{ROOT.format(layer)}.{expert}.{name}.lora_{side}.weight": one
        for layer in range(layers)
        for expert in range(num_experts)
        for name in ("gate_proj", "up_proj", "down_proj")
        for side in "AB"
    }
    report = report_of(write_adapter(tmp_path / "a", tensors, config_of(1, 1)), schema)
    assert report.tensors_total == len(tensors) == 7_200
    assert [g.indices for g in report.tensors] == [("0-11", "0-99")] * 6
    assert message_bytes(report) < 10_000


def test_names_that_have_nothing_in_common_are_cut_off_and_counted(tmp_path: Path) -> None:
    """However many zero pairs for unknown modules a file holds, the report stays below a message's limit."""
    schema = LoraSchema(0, (linear("lm_head", None, 2, 3, "lm_head"),))
    tensors = linear_pair("lm_head", 2, 3, 1)
    for index in range(4_000):
        name = "".join(chr(ord("a") + int(d)) for d in str(index))
        tensors[f"{name}.{'x' * 60}.lora_A.weight"] = torch.zeros(1, 1)
        tensors[f"{name}.{'x' * 60}.lora_B.weight"] = torch.zeros(1, 1)
    report = report_of(write_adapter(tmp_path / "a", tensors, config_of(1, 1)), schema)
    assert report.tensors_not_listed > 0
    assert sum(g.count for g in report.tensors) + report.tensors_not_listed == report.tensors_total == 8_002
    assert {g.site for g in report.tensors[:2]} == {"lm_head"}  # what is used comes first
    assert message_bytes(report) < MAX_TENSORS_BYTES + 100_000 < 1 << 20


@given(st.sets(st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 3)), max_size=60))
def test_products_are_disjoint_and_together_the_set(members: set[tuple[int, ...]]) -> None:
    """Whatever the set."""
    found = [combination for texts, size in products(members) for combination in _expanded(texts, size)]
    assert len(found) == len(set(found))
    assert set(found) == members


def _expanded(texts: tuple[str, ...], size: int) -> list[tuple[int, ...]]:
    combinations = list(itertools.product(*(numbers(text) for text in texts)))
    assert len(combinations) == size
    return combinations


def test_ranges_are_short() -> None:
    """Runs joined, in order."""
    assert ranges([]) == ""
    assert ranges([5, 0, 1, 2, 2, 7, 8]) == "0-2,5,7-8"
    assert list(products([(layer, expert) for layer in range(9) for expert in range(64)])) == [
        (("0-8", "0-63"), 576)
    ]
