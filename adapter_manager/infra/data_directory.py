"""The manager's data directory: its lock, its identity over restarts, and the bootstrap token's file."""

import fcntl
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from lorikeet_rpc.tokens import NewToken, hash_token, new_token, token_id_of


class DataDirectoryInUseError(Exception):
    """Another manager works in this data directory."""


@dataclass(frozen=True, slots=True)
class DataDirectory:
    """Paths below one directory, which only this user may enter."""

    root: Path

    @property
    def staging(self) -> Path:
        """Uploads that are not complete."""
        return self.root / "staging"

    @property
    def artifacts(self) -> Path:
        """The local artifact store."""
        return self.root / "artifacts"

    @property
    def valkey(self) -> Path:
        """The embedded registry."""
        return self.root / "valkey"

    @property
    def registry_epoch(self) -> Path:
        """Which registry is followed."""
        return self.root / "registry-epoch"

    def lock(self) -> IO[str]:
        """Keep other managers out until the returned file is closed, which the process's end does too.

        Raises:
            DataDirectoryInUseError: somebody is in.
        """
        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = (self.root / "manager.lock").open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            owner = lock.read(20).strip() or "unknown"
            lock.close()
            raise DataDirectoryInUseError(
                f"data directory {self.root} is in use by adapter manager process {owner}; stop that one, or "
                "give this one another --data-dir"
            ) from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        return lock

    def manager_id(self) -> str:
        """A random name that stays with this directory; made at first use."""
        path = self.root / "manager-id"
        if path.exists():
            return path.read_text().strip()
        return _write_private(path, secrets.token_hex(8))

    def bootstrap_token(self) -> NewToken:
        """The token in the bootstrap file; written first, so that a crash never leaves one nobody knows."""
        path = self.root / "bootstrap-token"
        if path.exists():
            token = path.read_text().strip()
            sha256 = hash_token(token)
            return NewToken(token, token_id_of(sha256), sha256)
        return self.fresh_bootstrap_token()

    def fresh_bootstrap_token(self) -> NewToken:
        """A new token in the bootstrap file, in place of one that was revoked."""
        fresh = new_token()
        _write_private(self.root / "bootstrap-token", fresh.token)
        return fresh


def _write_private(path: Path, text: str) -> str:
    part = path.with_suffix(".part")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(f"{text}\n")
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    return text
