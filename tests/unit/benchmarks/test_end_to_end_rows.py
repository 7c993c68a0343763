"""Rows of results written by hand: each beside its floor, its peer and its targets."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import end_to_end
from benchmarks.end_to_end import STEPS, Step, step_command
from benchmarks.end_to_end_rows import PEER, make_rows, write_rows
from benchmarks.rows_file import Row, as_table, show_rows
from lorikeet_bench.engine.floors import FloorModel
from lorikeet_bench.load.generated_adapters import AdapterShape
from lorikeet_bench.model_shape import shape_config


def point(concurrency: int, adapters: int, tokens_per_s: float, **changes: Any) -> dict[str, Any]:
    """A point as a bench writes it, as far as rows read it."""
    median = {
        "tokens_per_s": tokens_per_s,
        "decode_tokens_per_s": {"mean": tokens_per_s / concurrency},
        "ttft_ms": {"mean": 40.0},
        "worst_ttft_over_bucket": 1.1,
    }
    made = {"concurrency": concurrency, "adapters": adapters, "median": median, "tokens_digest": "same"}
    return {**made, "routing": None, **changes}


def result(*points: dict[str, Any], startup_s: float = 20.0, **changes: Any) -> dict[str, Any]:
    """A step's result."""
    server = {"startup_s": startup_s, "compilations": 0, "adapter_load_s": 1.6, "slots": 8}
    return {
        "machine": {"commit": "c"},
        "failures": [],
        "servers": [server],
        "points": list(points),
        **changes,
    }


RESULTS = {
    "base": result(point(1, 0, 500.0), point(32, 0, 5000.0), startup_s=50.0),
    "eight": result(
        point(1, 0, 495.0),
        point(32, 0, 5000.0),
        point(1, 8, 400.0),
        point(32, 8, 4000.0, routing={"experts": 31.0, "expected_experts": 31.55}),
    ),
    "curve": result(point(1, 32, 390.0), point(32, 1, 4200.0), point(32, 32, 3900.0), point(32, 64, 3780.0)),
    "rule": result(point(32, 8, 3200.0)),
    "grpc": result(point(1, 8, 396.0), point(32, 8, 3800.0)),
    "lengths": result(point(1, 8, 10.0)),
    "adapter-load": {
        "adapter_mb": 740.0,
        "host_to_usable_ms": {"median": 16.0},
        "page_cache_to_usable_ms": {"median": 150.0},
    },
}


def _fails(*_: object) -> bool:
    """A step that leaves nothing."""
    return False


@pytest.fixture
def floors(tmp_path: Path) -> FloorModel:
    """Of gpt-oss-20b."""
    (tmp_path / "config.json").write_text(json.dumps(shape_config("gpt-oss-20b")))
    return FloorModel.read(tmp_path, torch.bfloat16, AdapterShape())


def test_rows_stand_beside_floor_peer_and_target(floors: FloorModel) -> None:
    """The main rows by name."""
    rows = {row.name: row for row in make_rows("gpt-oss-20b", RESULTS, floors)}
    total = rows["concurrency 32, 8 adapters: tokens/s"]
    assert (total.value, total.peer, total.peer_version) == (4000.0, 2115.0, PEER)
    assert (total.target, total.stretch) == (4000.0, 5400.0)
    assert total.floor == pytest.approx(7043, rel=0.001)
    decode = rows["concurrency 1, 8 adapters: decode tokens/s a request"]
    assert decode.floor == pytest.approx(1109, rel=0.001)
    ratio = rows["concurrency 32: tokens/s with 8 adapters over without"]
    assert ratio.value == pytest.approx(0.8)
    assert total.floor is not None
    without = rows["concurrency 32, 0 adapters: tokens/s"].floor
    assert ratio.floor == total.floor / (without or 0.0) == pytest.approx(0.867, abs=0.001)
    assert rows["concurrency 1: base requests on a LoRA server over one without"].value == 0.99
    assert rows["concurrency 1: base answers equal on both servers"].value == 1
    assert rows["concurrency 1, 8 adapters: through gRPC with text over in process"].value == 0.99
    assert rows["concurrency 32, 8 adapters: through gRPC with text over in process"].value == 0.95
    assert rows["concurrency 32: loss from 1 to 64 adapters"].value == pytest.approx(0.1)
    tuned = "concurrency 32, 8 adapters: {} with measured tiles over the rules'"
    assert rows[tuned.format("tokens/s")].value == 1.25
    assert rows[tuned.format("TTFT mean")].value == 1.0
    assert rows["concurrency 32, 32 adapters: tokens/s"].target == 3500.0
    assert rows["concurrency 1, 32 adapters: decode tokens/s a request"].peer == 169.7
    assert rows["concurrency 32, 8 adapters: experts read over even"].value == pytest.approx(31 / 31.55)
    assert rows["200 prompt lengths: worst TTFT over its bucket's median"].value == 1.1
    assert rows["start-up to READY, kernel cache cold"].value == 50.0
    assert rows["start-up to READY, kernel cache warm"].value == 20.0
    assert rows["one adapter of 740 MB: host memory to usable"].floor == pytest.approx(740 / 55)
    assert rows["one adapter of 740 MB: page cache to usable"].peer == 1025.0


def test_a_peer_that_compiled_meanwhile_is_marked(floors: FloorModel) -> None:
    """In its rows and in the table; the other points' are not."""
    results = {"base": result(point(16, 0, 3000.0), point(32, 0, 5000.0))}
    rows = {row.name: row for row in make_rows("gpt-oss-20b", results, floors)}
    marked = rows["concurrency 16, 0 adapters: tokens/s"]
    assert (marked.peer, marked.peer_version) == (1531.0, f"{PEER}, compiling meanwhile")
    assert rows["concurrency 32, 0 adapters: tokens/s"].peer_version == PEER
    assert as_table(list(rows.values())).count("(compiling meanwhile)") == 3


def test_another_model_has_no_peer(floors: FloorModel) -> None:
    """Nobody measured it."""
    rows = list(make_rows("qwen3-30b-a3b", RESULTS, floors))
    assert rows
    assert not [row for row in rows if row.peer is not None or row.peer_version]


def test_steps_that_were_not_run_give_no_rows(floors: FloorModel) -> None:
    """And nothing breaks."""
    assert list(make_rows("gpt-oss-20b", {}, floors)) == []
    only = make_rows("gpt-oss-20b", {"lengths": RESULTS["lengths"]}, floors)
    assert {row.name.partition(":")[0] for row in only} == {
        "200 prompt lengths",
        "compilations and graph captures after READY",
        "loading adapters from the page cache, several at once",
    }


def test_a_void_step_gives_no_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its reasons are in the document and on the screen."""
    (tmp_path / "mixtral-8x7b-base.json").write_text(json.dumps(RESULTS["base"]))
    void = result(point(1, 8, 9.0), failures=["concurrency 1: VOID"])
    (tmp_path / "mixtral-8x7b-eight.json").write_text(json.dumps(void))
    write_rows("mixtral-8x7b", tmp_path, tmp_path / "rows.json")
    show_rows(tmp_path / "rows.json")
    document = json.loads((tmp_path / "rows.json").read_text())
    assert document["failures"] == {"eight": ["concurrency 1: VOID"]}
    assert [Row(**row) for row in document["rows"]]
    assert not [row for row in document["rows"] if "8 adapters" in row["name"]]
    assert "eight failed: concurrency 1: VOID" in capsys.readouterr().out


def test_a_toys_rows_are_figures_alone(tmp_path: Path) -> None:
    """No floor, peer or target of the real model stands beside them."""
    for name in ("base", "eight", "adapter-load"):
        (tmp_path / f"gpt-oss-20b-{name}.json").write_text(json.dumps(RESULTS[name]))
    write_rows("gpt-oss-20b", tmp_path, tmp_path / "rows.json", is_toy=True)
    rows = [Row(**row) for row in json.loads((tmp_path / "rows.json").read_text())["rows"]]
    assert len(rows) > 20
    assert all(row == Row(row.name, row.value, row.unit, commit=row.commit) for row in rows)


def test_the_quick_form_is_a_part_of_the_whole() -> None:
    """With loads of its own where it has any."""
    arguments = argparse.Namespace(quick=True, tiny=False, device="cuda")
    quick = [step for step in STEPS if step.is_quick]
    assert [step.name for step in quick] == ["base", "eight", "lengths"]
    commands = [step_command(step, "gpt-oss-20b", arguments, Path("w")) for step in quick]
    assert all("--repeats" not in command for command in commands)
    arguments.quick = False
    assert "--repeats" in step_command(quick[0], "gpt-oss-20b", arguments, Path("w"))


def test_steps_run_in_the_order_in_which_they_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """What matters most comes first in a run that may be cut; another model's step is left out."""
    assert end_to_end.main(("qwen3-30b-a3b", "--only", "profile,curve,base", "--list")) == 0
    commands = capsys.readouterr().out.splitlines()
    assert [command.split("bench ")[1].split()[0] for command in commands] == ["profile", "engine"]


def test_rows_are_written_after_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is cut keeps those of the steps before; one that fails does not stop the others."""
    ran: list[str] = []

    def run_step(step: Step, model: str, arguments: argparse.Namespace, work: Path) -> bool:
        ran.append(step.name)
        if step.name == "lengths":
            raise KeyboardInterrupt
        (work / f"{model}-{step.name}.json").write_text(json.dumps(RESULTS[step.name]))
        return step.name != "base"

    monkeypatch.setattr(end_to_end, "run_step", run_step)
    output = tmp_path / "rows.json"
    line = ("gpt-oss-20b", "--tiny", "--quick", "--work", str(tmp_path), "--output", str(output))
    with pytest.raises(KeyboardInterrupt):
        end_to_end.main(line)
    assert ran == ["base", "eight", "lengths"]
    names = {row["name"] for row in json.loads(output.read_text())["rows"]}
    assert "concurrency 32: tokens/s with 8 adapters over without" in names


def test_what_a_run_did_not_measure_stays(tmp_path: Path) -> None:
    """Rows, machines, profiles and notes of other sessions, in a work directory that has none of them."""
    whole, work, output = tmp_path / "whole", tmp_path / "work", tmp_path / "rows.json"
    for directory, steps in ((whole, RESULTS), (work, ("eight", "lengths"))):
        directory.mkdir()
        for name in steps:
            (directory / f"gpt-oss-20b-{name}.json").write_text(json.dumps(RESULTS[name]))
    write_rows("gpt-oss-20b", whole, output)
    before = json.loads(output.read_text()) | {"profiles": [1], "note": "by hand"}
    before["rows"][0]["commit"] = "put right"
    output.write_text(json.dumps(before))
    write_rows("gpt-oss-20b", work, output)
    assert json.loads(output.read_text()) == before
    changed = result(point(1, 8, 10.0), machine={"commit": "newer"})
    changed["points"][0]["median"]["worst_ttft_over_bucket"] = 1.3
    (work / "gpt-oss-20b-lengths.json").write_text(json.dumps(changed))
    write_rows("gpt-oss-20b", work, output)
    after = json.loads(output.read_text())
    assert (after["profiles"], after["note"]) == ([1], "by hand")
    differ = [new for old, new in zip(before["rows"], after["rows"], strict=True) if old != new]
    assert [(row["name"], row["value"], row["commit"]) for row in differ] == [
        ("200 prompt lengths: worst TTFT over its bucket's median", 1.3, "newer")
    ]


def test_a_row_names_the_commits_of_its_steps(tmp_path: Path) -> None:
    """Both where it holds one against the other."""
    for name, commit in (("base", "a"), ("eight", "b")):
        made = RESULTS[name] | {"machine": {"commit": commit}}
        (tmp_path / f"gpt-oss-20b-{name}.json").write_text(json.dumps(made))
    write_rows("gpt-oss-20b", tmp_path, tmp_path / "rows.json")
    commits = {row["name"]: row["commit"] for row in json.loads((tmp_path / "rows.json").read_text())["rows"]}
    assert commits["concurrency 32, 0 adapters: tokens/s"] == "a"
    assert commits["concurrency 32, 8 adapters: tokens/s"] == "b"
    assert commits["concurrency 32: tokens/s with 8 adapters over without"] == "a, b"


def test_the_server_with_adapters_stands_for_a_base_that_was_not_run(tmp_path: Path) -> None:
    """Its requests without adapters give the rows of none, and nothing is said of two servers."""
    both = result(point(1, 0, 300.0), point(1, 8, 240.0), machine={"commit": "b"})
    (tmp_path / "qwen3-30b-a3b-eight.json").write_text(json.dumps(both))
    write_rows("qwen3-30b-a3b", tmp_path, tmp_path / "rows.json")
    rows = {row["name"]: row for row in json.loads((tmp_path / "rows.json").read_text())["rows"]}
    assert rows["concurrency 1, 0 adapters: tokens/s"]["value"] == 300.0
    assert rows["concurrency 1: tokens/s with 8 adapters over without"]["value"] == 0.8
    assert not any("LoRA server" in name for name in rows)


def test_a_run_without_success_leaves_the_rows_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """To the byte, though results of an earlier session lie in the work directory."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "gpt-oss-20b-eight.json").write_text(json.dumps(RESULTS["eight"]))
    output = tmp_path / "rows.json"
    output.write_text("as it was")
    monkeypatch.setattr(end_to_end, "run_step", _fails)
    assert (
        end_to_end.main(
            ("gpt-oss-20b", "--tiny", "--only", "base", "--work", str(tmp_path), "--output", str(output))
        )
        == 1
    )
    assert output.read_text() == "as it was"
    assert "FAILED: base" in capsys.readouterr().out


def test_no_gpu_is_said_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, and nothing is written."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    work = tmp_path / "work"
    with pytest.raises(SystemExit) as ended:
        end_to_end.main(("gpt-oss-20b", "--work", str(work), "--output", str(tmp_path / "rows.json")))
    assert ended.value.code == 2
    assert "no NVIDIA GPU here" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
