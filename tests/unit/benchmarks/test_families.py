"""Rows of the families' benches: floors of each form of weights, ratios beside their musts."""

import argparse
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import families
from benchmarks.families import (
    ADAPTERS,
    MODELS,
    RANK,
    Model,
    command,
    main,
    make_rows,
    result_file,
    write_rows,
)
from lorikeet_bench.engine.floors import FloorModel
from lorikeet_bench.load.generated_adapters import AdapterShape
from lorikeet_bench.model_shape import shape_config, shape_names


def result(ratio: float, **changes: Any) -> dict[str, Any]:
    """A bench's result as far as rows read it."""
    points = [
        {
            "concurrency": concurrency,
            "adapters": adapters,
            "median": {
                "tokens_per_s": 100.0 * concurrency * (ratio if adapters else 1.0),
                "decode_tokens_per_s": {"mean": 100.0},
                "ttft_ms": {"mean": 40.0},
            },
        }
        for adapters in (0, ADAPTERS)
        for concurrency in (1, 32)
    ]
    return {"points": points, "servers": [{"startup_s": 30.0, "compilations": 0}], **changes}


def floors(model: Model, path: Path) -> FloorModel:
    """Of the released sizes."""
    (path / "config.json").write_text(json.dumps(shape_config(model.shape)))
    return FloorModel.read(path, torch.bfloat16, replace(AdapterShape(), rank=RANK, sites=model.sites))


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.shape)
def test_every_figure_has_its_floor_or_must(model: Model, tmp_path: Path) -> None:
    """Three figures at four points, two ratios, start-up and compilations; adapters cost something."""
    assert model.shape in shape_names()
    rows = list(make_rows(model, result(0.8), floors(model, tmp_path)))
    assert len(rows) == 16
    ratios = [row for row in rows if row.unit == "ratio"]
    assert [row.value for row in ratios] == pytest.approx([0.8, 0.8])
    assert [row.target for row in ratios] == [0.85, 0.78]
    assert all(row.floor is not None and 0.5 < row.floor < 1.0 for row in ratios)
    assert all(row.floor for row in rows if row.unit in ("tokens/s", "ms"))


def test_fp8_halves_what_a_step_reads_of_weights(tmp_path: Path) -> None:
    """The head stays in bfloat16, and so do Llama 4's attention and router."""
    by_name = {model.shape: model for model in MODELS}
    whole, half = (
        floors(by_name[name], tmp_path).decode(1, 0, 600) for name in ("qwen3-30b-a3b", "qwen3-30b-a3b-fp8")
    )
    assert half.experts == pytest.approx(whole.experts / 2, rel=0.01)
    assert half.dense == pytest.approx(whole.dense / 2, rel=0.02)
    assert half.lm_head == whole.lm_head


def test_a_models_result_becomes_rows(tmp_path: Path) -> None:
    """What was not run gives none, what is void its failures."""
    good, void = MODELS[:2]
    result_file(tmp_path, good).write_text(json.dumps(result(0.9)))
    result_file(tmp_path, void).write_text(json.dumps(result(0.9, failures=["routing"])))
    write_rows(tmp_path, tmp_path / "rows.json")
    document = json.loads((tmp_path / "rows.json").read_text())
    assert len(document["rows"]) == 16
    assert document["failures"] == {void.shape: ["routing"]}


def test_other_settings_have_files_and_rows_of_their_own(tmp_path: Path) -> None:
    """Named after them, in any order; those of the default stay as they were."""
    model, settings = MODELS[0], ["kv_cache_dtype=fp8", 'note="a/b"']
    file = result_file(tmp_path, model, settings)
    assert file == result_file(tmp_path, model, settings[::-1])
    assert file.name == f"families-{model.shape}-kv_cache_dtype=fp8-note=_a_b_.json"
    file.write_text(json.dumps(result(0.9)))
    write_rows(tmp_path, tmp_path / "rows.json")
    assert json.loads((tmp_path / "rows.json").read_text())["rows"] == []
    write_rows(tmp_path, tmp_path / "rows.json", settings)
    document = json.loads((tmp_path / "rows.json").read_text())
    assert document["engine_settings"] == settings
    assert len(document["rows"]) == 16
    start = f'{model.shape}, kv_cache_dtype=fp8, note="a/b"'
    assert all(row["name"].startswith(start) for row in document["rows"])


def test_a_toys_rows_are_figures_alone(tmp_path: Path) -> None:
    """Floors and musts are the real models'."""
    result_file(tmp_path, MODELS[0]).write_text(json.dumps(result(0.9)))
    write_rows(tmp_path, tmp_path / "rows.json", is_toy=True)
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert len(rows) == 16
    assert all(row["floor"] is row["target"] is row["stretch"] is None for row in rows)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ([], "families_h200.json"),
        (["--engine-set", "kv_cache_dtype=fp8"], "families_h200-kv_cache_dtype=fp8.json"),
        (["--tiny", "--device", "cuda"], "work/tiny/families_tiny.json"),
    ],
)
def test_a_run_leaves_others_files_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], name: str
) -> None:
    """Results and rows lie where their settings say; a model's old result goes before its run."""
    monkeypatch.setattr(families, "RESULTS", tmp_path)
    work = tmp_path / "work"

    def bench(line: list[str], *, check: bool) -> subprocess.CompletedProcess[bytes]:
        assert not check
        Path(line[line.index("--json") + 1]).write_text(json.dumps(result(0.9)))
        return subprocess.CompletedProcess(line, 0)

    monkeypatch.setattr(subprocess, "run", bench)
    plain = result_file(work, MODELS[0])
    work.mkdir()
    plain.write_text(json.dumps(result(0.7)))
    assert main([*arguments, "--only", MODELS[0].shape, "--work", str(work)]) == 0
    assert len(json.loads((tmp_path / name).read_text())["rows"]) == 16
    assert (json.loads(plain.read_text()) == result(0.7)) is bool(arguments)


def test_commands_name_shape_sites_and_settings(tmp_path: Path) -> None:
    """A toy changes the shape's sizes."""
    arguments = argparse.Namespace(tiny=True, device="cpu", engine_set=["kv_cache_dtype=fp8"])
    line = command(MODELS[0], arguments, tmp_path)
    assert line[line.index("--shape") + 1] == MODELS[0].shape
    assert line[line.index("--engine-set") + 1] == "kv_cache_dtype=fp8"
    assert line[line.index("--json") + 1].endswith("-kv_cache_dtype=fp8.json")
    assert "num_hidden_layers=2" in line
