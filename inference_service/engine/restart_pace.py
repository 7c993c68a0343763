"""How fast a dying engine process is started again. Pure."""

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
# An engine that lived this long did not die of what its start or its first requests bring.
_HEALTHY_LIFE_S = 60.0


class RestartPace:
    """Pauses between starts: they double with each life that was short or never began."""

    def __init__(self) -> None:
        self._pause_s = _FIRST_PAUSE_S

    def lived(self, life_s: float) -> None:
        """An engine that was ready ended after this long."""
        if life_s >= _HEALTHY_LIFE_S:
            self._pause_s = _FIRST_PAUSE_S

    def next_pause_s(self) -> float:
        """The pause before the next start."""
        pause_s = self._pause_s
        self._pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
        return pause_s
