"""`lorikeet bench ingest` where it cannot begin, and what it prints; the run is an integration test."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lorikeet_admin.app import app
from lorikeet_admin.commands import bench_ingest
from lorikeet_bench.ingest import AdapterLayout, IngestResult, LayoutFigures, PushFigures
from lorikeet_bench.ingest.floors import Floors
from lorikeet_bench.machine import describe_machine


def result(build_s: float) -> IngestResult:
    """One push of 740 MB."""
    push = PushFigures(4.0, 0.5, 1.0, 0.0, build_s, 0.25, 2.0, 130_000_000, 150_000_000)
    figures = LayoutFigures(AdapterLayout.FUSED, 740_000_000, 740_000_000, 288, (push,))
    return IngestResult(describe_machine(), 32, Floors(1800.0, 9000.0, 2000.0, 1000.0), (figures,))


def test_a_place_for_the_result_that_is_not_there_is_wrong_usage(tmp_path: Path) -> None:
    """Told before anything begins."""
    file = tmp_path / "nowhere" / "result.json"
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["bench", "ingest", "--json", str(file)])
    assert done.exit_code == 2
    assert "is no directory" in done.stderr


@pytest.mark.parametrize(("build_s", "code"), [(1.0, 0), (2.0, 1)])
def test_the_verdict_is_printed_and_is_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build_s: float, code: int
) -> None:
    """740 MB in one second pass, in two they do not; the JSON document says the same."""
    monkeypatch.setattr(bench_ingest, "_measure", lambda *_: result(build_s))
    file = tmp_path / "result.json"
    done = CliRunner().invoke(
        app, ["bench", "ingest", "--json", str(file), "--data-dir", str(tmp_path), "--layout", "fused"]
    )
    assert done.exit_code == code
    assert f"{740 / build_s:.0f}" in done.stdout
    assert "sha256 of one core 1800" in done.stdout
    assert ("FAIL fused: ingest at 370 MB/s" in done.stdout) == bool(code)
    document = json.loads(file.read_text())
    assert document["passed"] == (code == 0)
    assert document["median_mb_s"]["fused"]["build"] == 740 / build_s
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
