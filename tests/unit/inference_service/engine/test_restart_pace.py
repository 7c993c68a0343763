"""Pauses between the lives of an engine process."""

from inference_service.engine.restart_pace import RestartPace


def test_pauses_double_up_to_a_bound() -> None:
    """Starts that fail, and lives that end soon, count alike."""
    pace = RestartPace()
    assert [pace.next_pause_s() for _ in range(3)] == [0.5, 1.0, 2.0]
    pace.lived(3.0)
    assert [pace.next_pause_s() for _ in range(5)] == [4.0, 8.0, 16.0, 30.0, 30.0]


def test_a_long_life_makes_the_next_start_quick() -> None:
    """What it died of then was not its start."""
    pace = RestartPace()
    for _ in range(5):
        pace.next_pause_s()
    pace.lived(60.0)
    assert pace.next_pause_s() == 0.5
