"""Who may answer when, by the journal."""

import pytest

from lorikeet_bench.soak.journal import Journal


@pytest.mark.parametrize(
    ("from_s", "until_s", "possible"),
    [
        (0.0, 0.5, {None}),
        (0.0, 1.5, {None, "one"}),
        (1.5, 1.6, {None, "one"}),
        (3.0, 4.0, {"one"}),
        (3.0, 5.5, {"one", "two"}),
        (5.5, 9.0, {"one", "two", None}),
        (6.5, 6.6, {"two"}),
        (6.5, 7.5, {"two", None}),
        (9.0, 9.5, {None}),
    ],
)
def test_what_a_name_may_mean(from_s: float, until_s: float, possible: set[str | None]) -> None:
    """Pushed at 1-2, replaced at 5-6, deleted at 7-8."""
    journal = Journal()
    for digest, begin_s, settled_s in (("one", 1.0, 2.0), ("two", 5.0, 6.0), (None, 7.0, 8.0)):
        journal.begin("demo/a", digest, begin_s).settled_s = settled_s
    assert journal.possible("demo/a", from_s, until_s) == possible
    assert journal.ever("demo/a") == {"one", "two"}


def test_a_write_in_doubt_leaves_both_until_the_next_one_is_settled() -> None:
    """A call that failed without saying whether it was done may have been."""
    journal = Journal()
    journal.begin("demo/a", "one", 1.0).settled_s = 2.0
    journal.begin("demo/a", "two", 3.0)
    assert journal.possible("demo/a", 100.0, 101.0) == {"one", "two"}
    journal.begin("demo/a", "three", 102.0).settled_s = 103.0
    assert journal.possible("demo/a", 104.0, 105.0) == {"three"}


def test_a_refused_write_never_meant_anything() -> None:
    """As if it had not been sent."""
    journal = Journal()
    journal.begin("demo/a", "one", 1.0).settled_s = 2.0
    journal.refused("demo/a", journal.begin("demo/a", "two", 3.0))
    assert journal.possible("demo/a", 3.0, 4.0) == {"one"}
    assert [str(write) for write in journal.history("demo/a")] == ["one (sent 1.000, settled 2.000)"]


def test_old_writes_are_forgotten_but_never_the_last_ones() -> None:
    """The journal of a long soak stays small."""
    journal = Journal()
    for number in range(1000):
        journal.begin("demo/a", str(number), number).settled_s = number + 0.5
    assert len(journal.history("demo/a")) < 300
    assert journal.possible("demo/a", 999.6, 1000.0) == {"999"}
