"""First tokens and gaps, each observed once."""

import time

from inference_service.api.token_clock import TokenClock


class Recorder:
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.first: list[float] = []
        self.gaps: list[tuple[float, int]] = []

    def first_token(self, seconds: float) -> None:
        """See ports.TokenObserver."""
        self.first.append(seconds)

    def next_tokens(self, gap_s: float, count: int) -> None:
        """See ports.TokenObserver."""
        self.gaps.append((gap_s, count))


def test_every_token_but_the_first_has_a_gap() -> None:
    """Tokens that came together share the time; none came, nothing is said."""
    recorder = Recorder()
    clock = TokenClock(time.perf_counter() - 10, recorder)
    clock.came(0)
    assert clock.first_token_ms is None
    clock.came(1)
    clock.came(0)
    clock.came(4)
    assert len(recorder.first) == 1
    assert 10 <= recorder.first[0] < 1000
    assert clock.first_token_ms == round(recorder.first[0] * 1000, 3)
    assert [count for _, count in recorder.gaps] == [4]
    assert recorder.gaps[0][0] >= 0


def test_a_first_step_of_several_tokens() -> None:
    """The others came at once after the first."""
    recorder = Recorder()
    TokenClock(time.perf_counter(), recorder).came(3)
    assert (len(recorder.first), recorder.gaps) == (1, [(0.0, 2)])
