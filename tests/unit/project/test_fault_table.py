"""The fault table fails what lost or mixed something up, and shows every row however its test ended."""

import pytest

from tests.support.fault_table import FaultTable


def test_a_good_case_is_a_row_with_its_figures() -> None:
    """Lost 0, wrong 0, the time to recover."""
    table = FaultTable()
    with table.case("store killed", "delete") as case:
        case.recovered(0.25)
        case.recovered(0.1)
    head, row, total = table.lines()
    assert head.split() == ["fault", "stage", "lost", "wrong", "recover", "s"]
    assert row.split() == ["store", "killed", "delete", "0", "0", "0.2"]
    assert total == "1 rows: lost 0, wrong 0, not finished 0, slowest recovery 0.2 s"


@pytest.mark.parametrize("kind", ["lost", "wrong", "never"])
def test_a_bad_case_fails_and_stays_in_the_table(kind: str) -> None:
    """Anything lost, anything wrong, or no word about recovery."""
    table = FaultTable()
    with (
        pytest.raises(AssertionError, match="store killed / delete"),
        table.case("store killed", "delete") as case,
    ):
        if kind != "never":
            case.recovered(1)
            getattr(case, kind).append("demo/a")
    assert "FAILED" in table.lines()[1]
    assert "not finished 1" in table.lines()[-1]


def test_a_case_that_raises_stays_in_the_table() -> None:
    """Its own error is what the test fails with."""
    table = FaultTable()
    with pytest.raises(ZeroDivisionError), table.case("store killed", "delete"):
        _ = 1 / 0
    assert "FAILED" in table.lines()[1]
    assert not FaultTable().lines()
