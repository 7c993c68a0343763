"""The fault table's fixture, and the hook that prints it when the session ends."""

from collections.abc import Iterator

import pytest

from tests.support.fault_table import FaultTable

_TABLE = FaultTable()


@pytest.fixture
def faults() -> Iterator[FaultTable]:
    """The session's table; a test that takes it must add a row."""
    before = len(_TABLE.cases)
    yield _TABLE
    assert len(_TABLE.cases) > before, "the test recorded no row in the fault table"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table: fault, stage, lost, wrong, time to recover."""
    if lines := _TABLE.lines():
        terminalreporter.write_sep("=", "faults")
        for line in lines:
            terminalreporter.write_line(line)
