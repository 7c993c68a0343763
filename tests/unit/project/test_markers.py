"""conftest gives each test its folder's marker and skips GPU tests, with a reason, where there is no GPU."""

from pathlib import Path

import pytest

from tests.unit.project.repository import ROOT, carried_files

pytest_plugins = ["pytester"]


def _project(pytester: pytest.Pytester) -> None:
    tests = pytester.mkdir("tests")
    (tests / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text())
    for kind in ("unit", "integration", "faults", "gpu"):
        (tests / kind).mkdir()
        (tests / kind / f"test_{kind}.py").write_text(
            "import pytest\n\ndef test_plain(): pass\n\n@pytest.mark.long\ndef test_slow(): pass\n"
        )
    pytester.makeini(
        "[pytest]\naddopts = --import-mode=importlib --strict-markers\n"
        "markers =\n  unit\n  integration\n  faults\n  gpu\n  long\n"
    )


def _run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    # A process of its own: here `tests.conftest` is imported already, from the real tree. Without the
    # installed plugins it starts in a second.
    return pytester.runpytest_subprocess(*arguments)


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


@pytest.mark.parametrize(
    ("selection", "selected"), [("not long and not gpu", 2), ("long and unit", 1), ("long and faults", 2)]
)
def test_markers_select(pytester: pytest.Pytester, selection: str, selected: int) -> None:
    """What `make test` selects, and that a folder's marker and a test's own go together."""
    _project(pytester)
    _run(pytester, "-m", selection).assert_outcomes(passed=selected, deselected=8 - selected)


def test_gpu_tests_say_why_they_are_skipped(pytester: pytest.Pytester) -> None:
    """Where CUDA is absent: skipped, with a reason."""
    _project(pytester)
    pytester.makepyfile(torch="class cuda:\n    is_available = staticmethod(lambda: False)\n")
    result = _run(pytester, "-m", "gpu", "-rs")
    result.assert_outcomes(skipped=2, deselected=6)
    result.stdout.fnmatch_lines(["*needs a GPU: torch.cuda.is_available() is False*"])


def test_a_test_outside_the_folders_is_an_error(pytester: pytest.Pytester) -> None:
    """It would have no marker and so run in no suite."""
    _project(pytester)
    (pytester.path / "tests" / "test_lost.py").write_text("def test_x(): pass\n")
    result = _run(pytester)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "must lie under tests/ in one of unit, integration, faults, gpu" in "\n".join(
        result.errlines + result.outlines
    )


def test_every_test_file_here_lies_in_one_of_them() -> None:
    """The same, for this repository, without collecting it."""
    lost = [
        p
        for p in carried_files()
        if p.name.startswith("test_") and p.suffix == ".py" and p.parts[0] == "tests"
    ]
    assert lost
    assert not [str(p) for p in lost if p.parts[1] not in {"unit", "integration", "faults", "gpu"}]


def test_fixture_files_are_whole() -> None:
    """A pointer of git's large file storage in place of a fixture would fail far from its cause."""
    for path in carried_files():
        if path.suffix == ".safetensors" and not any("bad" in part for part in path.parts):
            assert not (ROOT / path).read_bytes().startswith(b"version https://git-lfs"), path
    assert Path("tests/fixtures/manifest.json") in carried_files()
