"""What must not be in the tree: notes to self, paths of one machine, registries, secrets."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.project.repository import carried_files, is_generated, read

# Written so that this file does not find itself.
NOTES = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X)\b|Not" r"ImplementedError")
MACHINE_PATHS = re.compile(r"(?<![\w.~}-])/(work|root|home|Users|farm)/\w")
REGISTRIES = re.compile(
    r"(py" r"pi\.org|pythonhosted\.org|registry\.npm" r"js\.org|registry\.yarn" r"pkg\.com)"
)
SECRETS = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----|\bAKIA[0-9A-Z]{16}\b|\blk_[A-Za-z0-9_-]{43}\b")
SKIPPED = {"LICENSE"}


def lines_matching(pattern: re.Pattern[str], *, suffixes: set[str] | None = None) -> Iterator[str]:
    """path:line of every hit in carried text files."""
    for path in carried_files():
        if path.name in SKIPPED or is_generated(path) or (suffixes and path.suffix not in suffixes):
            continue
        for number, line in enumerate((read(path) or "").splitlines(), 1):
            if pattern.search(line):
                yield f"{path}:{number}: {line.strip()[:100]}"


def test_no_notes_to_self() -> None:
    """Unfinished work is not left in code."""
    assert not list(lines_matching(NOTES, suffixes={".py", ".proto", ".mjs", ".toml", ".cc", ".h"}))


def test_no_paths_of_one_machine() -> None:
    """A clone must work anywhere. Fixtures of hostile uploads may name such paths."""
    found = [hit for hit in lines_matching(MACHINE_PATHS) if not hit.startswith("tests/fixtures/")]
    assert not found


def test_no_registry_is_named() -> None:
    """Packages come from wherever the user's package managers are set up to look."""
    assert not list(lines_matching(REGISTRIES))


def test_the_lockfile_names_no_place() -> None:
    """Npm writes a URL for each package unless told not to."""
    lock = read(Path("clients/node/package-lock.json"))
    assert lock is not None
    assert '"resolved"' not in lock
    assert '"integrity"' in lock


def test_no_secrets() -> None:
    """Private keys and tokens."""
    assert not list(lines_matching(SECRETS))


@pytest.mark.parametrize(
    ("pattern", "hit", "miss"),
    [
        (NOTES, "# TO" + "DO later", "the todo list"),
        (MACHINE_PATHS, 'open("/ro' + 'ot/x")', "https://host/work/x"),
        (REGISTRIES, "https://py" + "pi.org/simple", "pip install x"),
        (SECRETS, "lk_" + "a" * 43, "lk_test"),
    ],
)
def test_the_patterns_find_what_they_should(pattern: re.Pattern[str], hit: str, miss: str) -> None:
    """A pattern that never matches would keep every test above green."""
    assert pattern.search(hit)
    assert not pattern.search(miss)
