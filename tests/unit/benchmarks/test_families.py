"""Rows of the families' benches: floors of each form of weights, ratios beside their musts."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import families
from benchmarks.families import command, compile_ahead, compile_command, main
from benchmarks.family_models import MODELS, RANK, Model
from benchmarks.family_rows import make_rows, model_of, result_file, write_rows
from inference_service.models.lora_sites import lora_schema
from lorikeet_bench.engine.floors import FloorModel
from lorikeet_bench.load.generated_adapters import AdapterShape
from lorikeet_bench.model_shape import shape_config, shape_names
from tests.support.family_results import good_bench, result


def floors(model: Model, path: Path) -> FloorModel:
    """Of the released sizes."""
    (path / "config.json").write_text(json.dumps(shape_config(model.shape)))
    return FloorModel.read(path, torch.bfloat16, replace(AdapterShape(), rank=RANK, sites=model.sites))


def _no_check(*_: object) -> None:
    """As on a machine with a GPU."""


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.shape)
def test_every_figure_has_its_floor_or_must(model: Model, tmp_path: Path) -> None:
    """Three figures at four points, two ratios, start-up and compilations; adapters cost something."""
    assert model.shape in shape_names()
    rows = list(make_rows(model, result(0.8), floors(model, tmp_path)))
    assert len(rows) == 16
    ratios = [row for row in rows if row.unit == "ratio"]
    assert [row.value for row in ratios] == pytest.approx([0.8, 0.8])
    assert [row.target for row in ratios] == [0.85, 0.78]
    most = {row.name: row.floor or 0.0 for row in rows if row.name.endswith("adapters: tokens/s")}
    for concurrency, row in zip((1, 32), ratios, strict=True):
        where = f"{model.shape}, concurrency {concurrency}"
        assert row.floor == most[f"{where}, 8 adapters: tokens/s"] / most[f"{where}, 0 adapters: tokens/s"]
        assert 0.5 < (row.floor or 0.0) < 1.0
    assert all(row.floor for row in rows if row.unit in ("tokens/s", "ms"))


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.shape)
def test_adapters_are_at_the_sites_that_a_bench_takes_by_itself(model: Model, tmp_path: Path) -> None:
    """All of attention, experts and MLPs."""
    schema = lora_schema(floors(model, tmp_path).spec, lambda _name: ("", ""))
    assert {site.key for site in AdapterShape().chosen(schema)} == set(model.sites)
    assert floors(model, tmp_path).decode(32, 8, 600) == replace(
        floors(model, tmp_path), adapters=AdapterShape(RANK)
    ).decode(32, 8, 600)


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
    monkeypatch.setattr(families, "check_device", _no_check)
    work = tmp_path / "work"

    monkeypatch.setattr(families, "run_within", good_bench)
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


def rows_by_model(output: Path) -> set[str]:
    """Whose rows a file has."""
    return {model_of(row["name"]) for row in json.loads(output.read_text())["rows"]}


def test_sessions_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another machine without the first one's results keeps their rows, and runs what is left."""
    ran: list[str] = []

    def bench(line: list[str], seconds: float) -> int:
        ran.append(line[line.index("--shape") + 1])
        return good_bench(line, seconds)

    monkeypatch.setattr(families, "run_within", bench)
    output = tmp_path / "rows.json"
    names = [model.shape for model in MODELS]
    first = ["--tiny", "--output", str(output), "--only", f"{names[0]},{names[2]}"]
    assert main([*first, "--work", str(tmp_path / "one")]) == 0
    assert rows_by_model(output) == {names[0], names[2]}
    assert main(["--tiny", "--output", str(output), "--work", str(tmp_path / "two"), "--resume"]) == 0
    assert rows_by_model(output) == set(names)
    assert sorted(ran) == sorted(names)
    assert len(json.loads(output.read_text())["rows"]) == 16 * len(names)


def test_rows_are_there_after_each_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that is cut has those of the models before."""
    output = tmp_path / "rows.json"

    def bench(line: list[str], seconds: float) -> int:
        if line[line.index("--shape") + 1] == MODELS[1].shape:
            raise KeyboardInterrupt
        return good_bench(line, seconds)

    monkeypatch.setattr(families, "run_within", bench)
    with pytest.raises(KeyboardInterrupt):
        main(["--tiny", "--output", str(output), "--work", str(tmp_path)])
    assert rows_by_model(output) == {MODELS[0].shape}


def test_no_model_starts_that_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others do; none failed."""
    monkeypatch.setattr(families, "run_within", good_bench)
    output = tmp_path / "rows.json"
    # Of the next longer one, which has begun to pass: seconds are left over for those that fit.
    seconds = str(sorted({model.expected_s for model in MODELS})[1])
    assert main(["--tiny", "--output", str(output), "--work", str(tmp_path), "--seconds", seconds]) == 0
    fitting = {model.shape for model in MODELS if model.expected_s < float(seconds)}
    assert rows_by_model(output) == fitting
    assert len(fitting) < len(MODELS)


def test_all_models_compile_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each says how it ended; what it prints lies beside the results."""

    def stand_in(model: Model, *_: object) -> Sequence[str]:
        return [sys.executable, "-c", f"print('{model.shape}'); raise SystemExit({model.kinds})"]

    monkeypatch.setattr(families, "compile_command", stand_in)
    compile_ahead(MODELS, argparse.Namespace(), tmp_path)
    shown = capsys.readouterr().out
    for model in MODELS:
        assert f"== {model.shape}: kernels, exit code {model.kinds} within" in shown
        assert (tmp_path / f"compile-{model.shape}.txt").read_text().strip() == model.shape


def test_compiling_takes_the_benchs_sizes_with_few_layers(tmp_path: Path) -> None:
    """What is captured and how long requests get decide which kernels there are, so they stay."""
    arguments = argparse.Namespace(tiny=False, device="cuda", engine_set=["kv_cache_dtype=fp8"])
    for model in MODELS:
        line = compile_command(model, arguments, tmp_path)
        assert f"num_hidden_layers={model.kinds}" in line
        assert "--json" not in line
        bench = command(model, arguments, tmp_path)
        for option in ("--output-tokens", "--concurrency", "--rank", "--sites"):
            assert line[line.index(option) + 1] == bench[bench.index(option) + 1]
        settings = [bench[i + 1] for i, word in enumerate(bench) if word == "--engine-set"]
        assert [line[i + 1] for i, word in enumerate(line) if word == "--engine-set"] == settings


def test_no_gpu_is_said_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, and nothing is written."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        main(["--work", str(tmp_path / "work"), "--output", str(tmp_path / "rows.json")])
    assert ended.value.code == 2
    assert "no NVIDIA GPU here" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
