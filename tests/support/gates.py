"""Points at which a test holds another process: files in one directory, named by the environment.

`<point>.hold` holds whoever comes to the point until it is removed; `<point>.reached` says that one came.
"""

import asyncio
import os
import time
from pathlib import Path

VARIABLE = "LORIKEET_TEST_GATES"
_POLL_S = 0.005


class Gates:
    """The test's side."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory

    def hold(self, point: str) -> None:
        """Hold whoever comes to the point from now on."""
        self._reached(point).unlink(missing_ok=True)
        self._held(point).touch()

    def release(self, point: str) -> None:
        """Let it go on."""
        self._held(point).unlink(missing_ok=True)

    def release_all(self) -> None:
        """Let everybody go on."""
        for path in self.directory.glob("*.hold"):
            path.unlink()

    async def reached(self, point: str, timeout_s: float = 30.0) -> None:
        """Wait until somebody is held at the point."""
        end_s = time.monotonic() + timeout_s
        while not self._reached(point).exists():
            assert time.monotonic() < end_s, f"nobody came to {point!r} within {timeout_s} s"
            await asyncio.sleep(_POLL_S)

    def _held(self, point: str) -> Path:
        return self.directory / f"{point}.hold"

    def _reached(self, point: str) -> Path:
        return self.directory / f"{point}.reached"


def is_held(point: str) -> bool:
    """The process's side, without waiting: whether the point is held; says that it was reached."""
    directory = Path(os.environ[VARIABLE])
    if not (directory / f"{point}.hold").exists():
        return False
    (directory / f"{point}.reached").touch()
    return True


def wait_at(point: str) -> None:
    """The process's side: wait while the point is held."""
    while is_held(point):
        time.sleep(_POLL_S)
