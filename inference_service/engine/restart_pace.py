"""How fast a dying engine process is started again. Pure."""

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0


class RestartPace:
    """Pauses between starts: they double with each engine that did not come as far as to be of use."""

    def __init__(self) -> None:
        self._pause_s = _FIRST_PAUSE_S

    def served(self) -> None:
        """The engine computed something for a client: whatever ends it, another is worth having at once."""
        self._pause_s = _FIRST_PAUSE_S

    def next_pause_s(self) -> float:
        """The pause before the next start."""
        pause_s = self._pause_s
        self._pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
        return pause_s
