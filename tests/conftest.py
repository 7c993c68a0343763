"""Markers by folder, and the reason GPU tests are skipped where there is no GPU."""

import functools
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
KINDS = ("unit", "integration", "faults", "gpu")


@functools.cache
def _gpu_absence() -> str:
    """Why GPU tests cannot run here; empty where they can."""
    try:
        import torch
    except ImportError as error:
        return f"needs a GPU: torch is not installed ({error})"
    if not torch.cuda.is_available():
        return "needs a GPU: torch.cuda.is_available() is False on this machine"
    return ""


def kind_of(path: Path) -> str:
    """The marker named by the first folder below tests/; raises for a test outside these folders."""
    top = path.relative_to(TESTS).parts[0]
    if top not in KINDS:
        raise pytest.UsageError(
            f"{path} must lie under tests/ in one of {', '.join(KINDS)}, which name its marker"
        )
    return top


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test with its folder's kind."""
    for item in items:
        if item.path.is_relative_to(TESTS):
            kind = kind_of(item.path)
            item.add_marker(kind)
            if kind == "faults":  # they take minutes, each of them
                item.add_marker("long")


# First, so that no fixture touches a GPU that is not there.
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip GPU tests, with the reason, where there is no GPU."""
    if item.get_closest_marker("gpu") and (reason := _gpu_absence()):
        pytest.skip(reason)
