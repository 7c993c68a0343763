"""The most memory that a process held for a while, as the kernel counted it."""

import os
from pathlib import Path
from typing import Self


class PeakMemoryError(Exception):
    """The kernel does not tell; the message says why."""


class PeakMemory:
    """Resident bytes of a process at the start, and the highest since; shared pages of libraries included.

    The kernel keeps the peak itself, so none is missed between two looks. Linux only.
    """

    def __init__(self, pid: int) -> None:
        """Forget the peaks before now.

        Raises:
            PeakMemoryError: there is no /proc, or the process is another user's or gone.
        """
        self._proc = Path("/proc") / str(pid)
        try:
            (self._proc / "clear_refs").write_text("5")
        except OSError as error:
            raise PeakMemoryError(
                f"the peak memory of process {pid} cannot be measured: {error.strerror} (it takes Linux and "
                "a process of one's own)"
            ) from error
        self.start_bytes = self._status("VmRSS")

    @classmethod
    def of_this_process(cls) -> Self:
        """Its own."""
        return cls(os.getpid())

    def highest_bytes(self) -> int:
        """The peak since the start."""
        return self._status("VmHWM")

    def _status(self, field: str) -> int:
        try:
            lines = (self._proc / "status").read_text().splitlines()
        except OSError as error:
            raise PeakMemoryError(f"{self._proc} cannot be read: {error.strerror}") from error
        return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:")), 0)
