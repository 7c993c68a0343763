"""Seconds of a start's parts."""

import pytest

from inference_service.domain.start_phases import StartPhases


def test_parts_are_told_in_the_order_of_their_ends() -> None:
    """A part within another ends first; what was timed elsewhere stands where it was noted."""
    phases = StartPhases()
    with phases.phase("outer"), phases.phase("inner"):
        pass
    phases.note("elsewhere", 1.23456)
    assert [name for name, _ in phases.all()] == ["inner", "outer", "elsewhere"]
    seconds = dict(phases.all())
    assert 0 <= seconds["inner"] <= seconds["outer"]
    assert seconds["elsewhere"] == 1.235


def test_a_part_that_fails_is_not_told() -> None:
    """Its seconds would say nothing of a start that succeeds."""
    phases = StartPhases()
    with pytest.raises(ValueError, match="no"), phases.phase("weights"):
        raise ValueError("no")
    assert phases.all() == ()
