"""The private directory of one engine's sockets, and the removal of those that dead services left."""

import fcntl
import shutil
import tempfile
from pathlib import Path

_PREFIX = "lorikeet-engine-"
_LOCK = "owner"


class SocketDirectory:
    """A new directory, readable by this user only. Its lock is held until `remove` or this process's death.

    A lock and not a process id: services in several containers may share one temporary directory.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        unready = self.path / f".{_LOCK}"
        self._file = unready.open("w")
        fcntl.flock(self._file, fcntl.LOCK_EX)
        # The name appears with its lock taken: another service's sweep never finds it free.
        unready.rename(self.path / _LOCK)

    def remove(self) -> None:
        """Delete it. Safe to call twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._file.close()


def sweep_socket_directories() -> int:
    """Delete this user's directories whose owners are dead; returns how many."""
    removed = 0
    for lock in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        try:
            with lock.open("r") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
                removed += 1
        except OSError:  # held by its owner, another user's, or gone by now
            continue
    return removed
