"""Profiles of the families' decode steps: whose, of which commit, and what fails of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import families
from benchmarks.families import main
from benchmarks.family_models import ADAPTERS, MODELS
from benchmarks.family_rows import profile_file, result_file, write_rows
from tests.support.family_results import good_bench, profiled, result

NAMES = [model.shape for model in MODELS]


class Benches:
    """Stands in for what is run: notes verbs and shapes, fails those that it is told to."""

    def __init__(self, *failing: str, code: int = 1) -> None:
        self.ran: list[tuple[str, str]] = []
        self._failing = failing
        self._code = code

    def __call__(self, line: list[str], seconds: float) -> int:
        """As `run_within`."""
        verb = line[line.index("bench") + 1]
        self.ran.append((verb, line[line.index("--shape") + 1]))
        return self._code if verb in self._failing else good_bench(line, seconds)


def run(monkeypatch: pytest.MonkeyPatch, benches: Benches, path: Path, *options: str) -> int:
    """The exit code of a session on toys, whose rows go to rows.json."""
    monkeypatch.setattr(families, "run_within", benches)
    return main(["--tiny", "--work", str(path), "--output", str(path / "rows.json"), *options])


def written(path: Path) -> dict[str, Any]:
    """What the sessions left."""
    return json.loads((path / "rows.json").read_text())


def test_a_models_profiles_stand_beside_its_rows(tmp_path: Path) -> None:
    """Steps and parts whole, of the kernels the longest; one without a bench's rows has no profile either."""
    good, other = MODELS[:2]
    result_file(tmp_path, good).write_text(json.dumps(result(0.9)))
    for model in (good, other):
        profiles = {"profiles": [profiled(1, 0, 3), profiled(32, ADAPTERS, 30)]}
        profile_file(tmp_path, model).write_text(json.dumps(profiles))
    write_rows(tmp_path, tmp_path / "rows.json")
    kept = json.loads((tmp_path / "rows.json").read_text())["profiles"]
    assert list(kept) == [good.shape]
    few, many = kept[good.shape]
    assert [kernel["us"] for kernel in few["kernels"]] == [2.0, 1.0, 0.0]
    assert [kernel["us"] for kernel in many["kernels"]] == [float(us) for us in range(29, 9, -1)]
    assert many["parts"][0]["floor_us"] == 200.0
    assert "gaps" not in many


@pytest.mark.parametrize("failing", ["", "profile", "engine"])
def test_a_profile_follows_its_models_bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], failing: str
) -> None:
    """If that succeeded; one that fails is told of and leaves the rows what they are."""
    benches = Benches(failing)
    code = run(monkeypatch, benches, tmp_path, "--profiles", "--only", NAMES[0])
    assert code == (1 if failing else 0)
    assert [verb for verb, _ in benches.ran] == ["engine", "profile"][: 1 if failing == "engine" else 2]
    document = written(tmp_path)
    assert len(document["rows"]) == (0 if failing == "engine" else 16)
    name = f"{NAMES[0]}, profile" if failing == "profile" else NAMES[0]
    assert document["failures"] == ({name: ["exit code 1"]} if failing else {})
    assert (f"FAILED: {name}: exit code 1" in capsys.readouterr().out) is bool(failing)


def test_resuming_makes_the_profiles_that_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone where there are rows, on a machine without the results too; what failed before is forgotten."""
    assert run(monkeypatch, Benches("profile"), tmp_path, "--profiles", "--only", NAMES[0]) == 1
    assert run(monkeypatch, Benches(), tmp_path, "--profiles", "--only", NAMES[1]) == 0
    later = Benches()
    elsewhere = ("--work", str(tmp_path / "elsewhere"))
    wanted = ("--only", ",".join(NAMES[:3]), "--profiles", "--resume")
    assert run(monkeypatch, later, tmp_path, *wanted, *elsewhere) == 0
    assert later.ran == [("profile", NAMES[0]), ("engine", NAMES[2]), ("profile", NAMES[2])]
    assert sorted(written(tmp_path)["profiles"]) == sorted(NAMES[:3])
    assert written(tmp_path)["failures"] == {}


def test_a_profile_keeps_the_commit_that_it_was_made_at(tmp_path: Path) -> None:
    """Whatever its model's bench was run at since."""
    file, output = result_file(tmp_path, MODELS[0]), tmp_path / "rows.json"
    profiles = {"profiles": [profiled(1, 0)], "machine": {"commit": "old", "date": "then"}}
    profile_file(tmp_path, MODELS[0]).write_text(json.dumps(profiles))
    for ratio, commit in ((0.8, "old"), (0.9, "new")):
        file.write_text(json.dumps(result(ratio, machine={"commit": commit, "date": "now"})))
        write_rows(tmp_path, output)
    (profile,) = written(tmp_path)["profiles"][NAMES[0]]
    assert (profile["commit"], profile["date"]) == ("old", "then")
    assert written(tmp_path)["machines"][NAMES[0]]["commit"] == "new"


def test_a_bench_alone_leaves_the_profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the document and in the work directory."""
    only = ("--only", NAMES[0])
    run(monkeypatch, Benches(), tmp_path, *only, "--profiles")
    before = written(tmp_path)["profiles"]
    assert run(monkeypatch, Benches(), tmp_path, *only) == 0
    assert written(tmp_path)["profiles"] == before


@pytest.mark.parametrize(("code", "reason"), [(1, "exit code 1"), (124, "ended after 7 s")])
def test_what_ends_early_leaves_its_reason_and_the_old_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, reason: str
) -> None:
    """Until a run of it succeeds."""
    options = ("--only", NAMES[0], "--model-seconds", "7")
    run(monkeypatch, Benches(), tmp_path, *options)
    before = written(tmp_path)
    assert run(monkeypatch, Benches("engine", code=code), tmp_path, *options) == 1
    assert written(tmp_path) == {**before, "failures": {NAMES[0]: [reason]}}
    assert run(monkeypatch, Benches(), tmp_path, *options) == 0
    assert written(tmp_path) == before


def test_profiles_commands_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Behind each bench's; nothing is run or made."""
    assert run(monkeypatch, Benches(), tmp_path / "none", "--list", "--profiles", "--only", NAMES[0]) == 0
    bench, profile = capsys.readouterr().out.splitlines()
    assert " bench engine " in bench
    assert " bench profile " in profile
    assert not (tmp_path / "none").exists()
