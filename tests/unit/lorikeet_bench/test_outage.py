"""A service that is gone is told from one that is slow to answer."""

from dataclasses import dataclass

from lorikeet_bench.soak.outage import Outage


@dataclass
class Clock:
    """A clock that stands until it is set."""

    now_s: float = 100.0

    def __call__(self) -> float:
        """The time."""
        return self.now_s


def test_silence_for_long_is_an_outage() -> None:
    """Not one failure, however long ago, and not failures with an answer between them."""
    clock = Clock()
    outage = Outage("the inference service", "127.0.0.1:1", clock)
    outage.unavailable()
    clock.now_s += 60
    assert not outage.reason
    outage.answered()
    outage.unavailable()
    clock.now_s += 14
    outage.unavailable()
    assert not outage.reason
    clock.now_s += 1
    outage.unavailable()
    assert "went away: the inference service at 127.0.0.1:1" in outage.reason


def test_pauses_grow_and_stay_short() -> None:
    """None while it answers; a gone service is not asked thousands of times."""
    clock = Clock()
    outage = Outage("the inference service", "127.0.0.1:1", clock)
    assert outage.pause_s == 0
    pauses: list[float] = []
    for _ in range(6):
        outage.unavailable()
        pauses.append(outage.pause_s)
        clock.now_s += 1
    assert pauses == sorted(pauses)
    assert pauses[0] > 0
    assert pauses[-1] == 1
    outage.answered()
    assert outage.pause_s == 0
