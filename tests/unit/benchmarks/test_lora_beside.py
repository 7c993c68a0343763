"""The command line of the script that times LoRA's ways: what it refuses before it measures."""

from pathlib import Path

import pytest

from benchmarks import lora_beside
from benchmarks.lora_beside import main, row_counts, way_list


def _must_not_run(*_: object) -> None:
    pytest.fail("something was measured")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rows", "a,8"], "argument --rows: a: numbers of rows are integers"),
        (["--rows", "0"], "argument --rows: 0: numbers of rows are integers"),
        (["--rows", ""], "argument --rows: '' names nothing"),
        (["--rows", "600"], "argument --rows: a toy has 512 tokens"),
        (["--ways", ""], "argument --ways: '' names nothing"),
        (["--ways", "none and dense"], "argument --ways: none: a way names some of dense"),
        (["--json", "{file}/rows.json"], "argument --json: cannot write to {file}"),
        (["--json", "{directory}"], "argument --json: cannot write to {directory}: it is a directory"),
    ],
)
def test_wrong_usage_is_told_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    options: list[str],
    message: str,
) -> None:
    """By the option's name, in words that are no function's."""
    monkeypatch.setattr(lora_beside, "run", _must_not_run)
    places = {"file": tmp_path / "file", "directory": tmp_path}
    places["file"].touch()
    with pytest.raises(SystemExit) as ended:
        main(["--tiny", *(word.format_map(places) for word in options)])
    assert ended.value.code == 2
    assert message.format_map(places) in capsys.readouterr().err


def test_what_is_named_twice_runs_once() -> None:
    """In the order of the first; "none" and "in a row" are always there, named or not."""
    assert row_counts("8, 1,8,01") == [8, 1]
    assert list(way_list("dense,down, dense ,none,in a row")) == ["none", "in a row", "dense", "down"]
    assert list(way_list("none")) == ["none", "in a row"]
    assert way_list("none")["none"] is None
