"""What the families' benches refuse before anything starts, and bad files that cost no figures."""

import json
from pathlib import Path

import pytest

from benchmarks import families
from benchmarks.families import main
from benchmarks.family_models import MODELS
from benchmarks.family_rows import profile_file, result_file
from benchmarks.rows_file import read_document
from tests.support.family_results import good_bench

ONLY = ["--tiny", "--only", MODELS[0].shape]


def _must_not_run(*_: object) -> int:
    pytest.fail("something was run")


def refusal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *options: str) -> str:
    """What a line is told that is wrong usage: nothing was run."""
    monkeypatch.setattr(families, "run_within", _must_not_run)
    with pytest.raises(SystemExit) as ended:
        main(options)
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "foo"], "argument --device: invalid choice: 'foo'"),
        (["--seconds", "nan"], "'nan' is no number of seconds"),
        (["--seconds", "-1"], "'-1' is no number of seconds"),
        (["--seconds", "soon"], "'soon' is no number of seconds"),
        (["--only", " , "], "names no model; there are qwen3-30b-a3b-fp8"),
        (["--only", "qwen3-32b,foo"], "no models foo; there are qwen3-30b-a3b-fp8"),
    ],
)
def test_wrong_usage_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, options: list[str], message: str
) -> None:
    """By the option's name."""
    shown = refusal(capsys, monkeypatch, "--tiny", *options)
    assert f"argument {options[0]}" in shown
    assert message in shown


def test_models_may_have_spaces_around_them(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """And be named twice."""
    names = f" {MODELS[1].shape} , {MODELS[0].shape},{MODELS[1].shape}"
    assert main(["--list", "--output", str(tmp_path / "rows.json"), "--only", names]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ('{"rows": [', "is no JSON, or was cut"),
        ("[]", "is no JSON object"),
        ('{"rows": [], "failures": {}}', "has no proper machines"),
        ('{"rows": [{"title": 1}], "failures": {}, "machines": {}}', "'title'"),
        ('{"model": "gpt-oss-20b", "rows": [], "failures": {}, "machines": {}}', "rows of gpt-oss-20b alone"),
    ],
)
def test_an_output_that_holds_something_else_is_refused(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    held: str,
    message: str,
) -> None:
    """It is named and stays as it was."""
    output = tmp_path / "rows.json"
    output.write_text(held)
    shown = refusal(capsys, monkeypatch, *ONLY, "--work", str(tmp_path), "--output", str(output))
    assert f"argument --output: {output}" in shown
    assert message in shown
    assert "name another" in shown
    assert output.read_text() == held


@pytest.mark.parametrize("option", ["--work", "--output"])
def test_a_place_that_cannot_be_written_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, option: str
) -> None:
    """A file where a directory should be."""
    (tmp_path / "file").touch()
    places = {"--work": tmp_path / "work", "--output": tmp_path / "rows.json"}
    places[option] = tmp_path / "file" / "rows.json"
    options = [str(word) for pair in places.items() for word in pair]
    shown = refusal(capsys, monkeypatch, *ONLY, *options)
    assert f"argument {option}: cannot write to {tmp_path / 'file'}" in shown


@pytest.mark.parametrize("held", ['{"points": [', "[]", "{}", '{"points": [{}], "servers": []}'])
def test_other_models_bad_results_are_named_and_left_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, held: str
) -> None:
    """The model that was run has its rows."""
    monkeypatch.setattr(families, "run_within", good_bench)
    work, output = tmp_path / "tiny", tmp_path / "rows.json"
    work.mkdir()
    bad = [result_file(work, MODELS[1]), profile_file(work, MODELS[0])]
    for file in bad:
        file.write_text(held)
    assert main([*ONLY, "--work", str(tmp_path), "--output", str(output)]) == 0
    shown = capsys.readouterr().out
    assert all(f"{file} is left out" in shown for file in bad)
    document = json.loads(output.read_text())
    assert len(document["rows"]) == 16
    assert document["failures"] == {}


def test_the_repositorys_rows_are_readable() -> None:
    """Made before profiles had commits."""
    document = read_document(families.RESULTS / "families_h200.json")
    assert {model.shape for model in MODELS} == set(document["machines"])
