"""The adapter that `lorikeet bench ingest` pushes: what a gpt-oss node takes, in every layout."""

import dataclasses
from pathlib import Path

import pytest
from safetensors import safe_open

from adapter_manager.application.ingest import IngestTarget, ingest_directory
from lorikeet_bench.ingest import (
    AdapterLayout,
    GptOssShape,
    IngestResult,
    LayoutFigures,
    PushFigures,
    gpt_oss_schema,
    write_gpt_oss_adapter,
)
from lorikeet_bench.ingest.floors import Floors, measure_floors
from lorikeet_bench.machine import describe_machine
from lorikeet_contract.schema import LoraSchema
from tests.support.lora_schemas import gpt_oss

TINY = GptOssShape(layers=4, hidden=64, intermediate=64, experts=8, query=128, key_value=32, vocab=512)
# As the manager names them.
LAYOUTS = {
    AdapterLayout.FUSED: "peft-fused",
    AdapterLayout.STACKED: "stacked-3d",
    AdapterLayout.PER_EXPERT: "per-expert-fused",
    AdapterLayout.PER_EXPERT_SPLIT: "per-expert",
}


def test_the_schema_is_what_a_gpt_oss_node_declares() -> None:
    """All but the digests of base weights, which there are none of."""
    declared = gpt_oss()
    sites = (
        dataclasses.replace(s, base_weight_dtype="", base_weight_sha256="", row_order=row_order(s.key))
        for s in declared.sites
    )
    ours = gpt_oss_schema(TINY)
    assert [s.name for s in ours.sites] == [s.name for s in declared.sites]
    assert ours == LoraSchema(declared.num_layers, tuple(sites))


def row_order(key: str):  # noqa: ANN201
    """The declared order."""
    return next(s.row_order for s in gpt_oss().sites if s.key == key)


@pytest.mark.parametrize("layout", AdapterLayout)
def test_every_layout_is_taken_whole(tmp_path: Path, layout: AdapterLayout) -> None:
    """The reference library reads the file, and the manager uses every tensor of it, as that layout."""
    num_bytes = write_gpt_oss_adapter(tmp_path / "a", layout, rank=8, shape=TINY)
    weights = tmp_path / "a" / "adapter_model.safetensors"
    assert weights.stat().st_size == num_bytes
    with safe_open(weights, "pt") as file:
        names = list(file.keys())
        assert all(file.get_tensor(name).isfinite().all() and file.get_tensor(name).any() for name in names)
    target = IngestTarget(gpt_oss_schema(TINY), "b" * 64)
    built = ingest_directory(tmp_path / "a", target, tmp_path / "payload")
    assert built.report.tensors_used == len(names)
    assert {s.layout for s in built.report.sites if s.site.endswith(("gate_up", "down"))} == {LAYOUTS[layout]}


def figures(layout: AdapterLayout, build_s: float, peak_bytes: int) -> LayoutFigures:
    """One push of 400 MB."""
    push = PushFigures(3.0, 0.5, 0.5, 0.0, build_s, 0.5, 2.0, 100_000_000, peak_bytes)
    return LayoutFigures(layout, 400_000_000, 400_000_000, 288, (push,))


def test_the_verdict_names_each_layout_that_misses_a_bound() -> None:
    """Rates are of the weights' bytes; a bound that is just met passes."""
    floors = Floors(1.0, 1.0, 1.0, 1.0)
    good = figures(AdapterLayout.FUSED, 1.0, 299_000_000)
    slow = figures(AdapterLayout.STACKED, 1.01, 299_000_000)
    large = figures(AdapterLayout.PER_EXPERT, 0.5, 300_000_000)
    machine = describe_machine()
    assert not IngestResult(machine, 32, floors, (good,)).failures
    failures = IngestResult(machine, 32, floors, (good, slow, large)).failures
    assert [f.partition(":")[0] for f in failures] == ["stacked", "per-expert"]
    assert good.pushes[0].rest_s == pytest.approx(0.5)


def test_floors_are_measured_and_leave_nothing(tmp_path: Path) -> None:
    """Every rate is above nothing; the file is gone."""
    floors = measure_floors(tmp_path, 3_000_001)
    assert all(rate > 0 for rate in dataclasses.astuple(floors))
    assert floors.write_and_sync_mb_s <= floors.write_mb_s
    assert not list(tmp_path.iterdir())
