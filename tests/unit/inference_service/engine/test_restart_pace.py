"""Pauses between the lives of an engine process."""

from inference_service.engine.restart_pace import RestartPace


def test_pauses_double_up_to_a_bound() -> None:
    """Starts that fail, and lives in which nobody was served, count alike."""
    pace = RestartPace()
    assert [pace.next_pause_s() for _ in range(8)] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


def test_an_engine_that_served_is_replaced_at_once() -> None:
    """A pause would only add to what its clients lost."""
    pace = RestartPace()
    for _ in range(5):
        pace.next_pause_s()
    pace.served()
    assert pace.next_pause_s() == 0.5
