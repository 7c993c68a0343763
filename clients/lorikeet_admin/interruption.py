"""Ctrl-C and SIGTERM as a request to come to an end in order."""

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """Remembers a signal that comes while it is entered; a second one ends the process as Ctrl-C does."""

    def __init__(self) -> None:
        self._signal: signal.Signals | None = None
        self._before: dict[signal.Signals, Callable[[int, FrameType | None], Any] | int | None] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __bool__(self) -> bool:
        return self._signal is not None

    @property
    def reason(self) -> str:
        """What to tell; empty if no signal came."""
        return f"interrupted by {self._signal.name}" if self._signal else ""

    @property
    def exit_code(self) -> int:
        """As shells have it; 0 if no signal came."""
        return 128 + self._signal if self._signal else 0

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._signal:
            raise KeyboardInterrupt
        self._signal = signal.Signals(number)
