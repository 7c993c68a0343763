"""The golden table's fixture, and the hook that prints it when the session ends."""

import pytest

from tests.support.golden_table import GoldenTable

_TABLE = GoldenTable()


@pytest.fixture
def table() -> GoldenTable:
    """The session's table."""
    return _TABLE


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table: model x adapter, worst relative error, greedy agreement."""
    if lines := _TABLE.lines():
        terminalreporter.write_sep("=", "golden outputs of transformers + peft, through the gRPC API")
        for line in lines:
            terminalreporter.write_line(line)
