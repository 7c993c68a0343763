"""One service process of the local stack, with its log file."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class ChildPlan:
    """How to start it. Secrets travel by environment, which `ps` does not show."""

    name: str
    module: str
    arguments: Sequence[str]
    secrets: dict[str, str]
    address: str
    log: Path


class Child:
    """A started process in a session of its own: Ctrl-C reaches only us, and we stop it in order."""

    def __init__(self, plan: ChildPlan) -> None:
        self.plan = plan
        with plan.log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 (our own interpreter and modules)
                [sys.executable, "-m", plan.module, *plan.arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **plan.secrets, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509 (no threads yet)
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def exit_status(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def stop(self, grace_s: float) -> bool:
        """SIGTERM, then after `grace_s` SIGKILL; False if it had to be killed."""
        if self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.kill()
            return False
        return True

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.wait()

    def log_tail(self, num_lines: int = 15) -> str:
        """The end of its log."""
        return "\n".join(self.plan.log.read_text(errors="replace").splitlines()[-num_lines:])


def _die_with_parent() -> None:
    # Even a killed `lorikeet up` leaves no service behind. PDEATHSIG needs no library but libc.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
