"""Files that are on the disk when a call returns, for the local artifact store."""

import contextlib
import hashlib
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

_READ_BYTES = 1 << 20


def place_file(source: Path, target: Path) -> bool:
    """Make `target` hold what `source` does, by a hard link where both are on one file system.

    The link costs no copy; nobody writes to `source` any more. Returns False where a link is not possible.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    link = target.with_name(f"{target.name}.{secrets.token_hex(8)}")
    try:
        os.link(source, link)
    except OSError:
        return False
    try:
        link.replace(target)
    finally:
        # Replacing a link by another one to the same file leaves both names.
        link.unlink(missing_ok=True)
    return True


def has_ranges(path: Path, ranges: Iterable[tuple[int, int, str]]) -> bool:
    """Whether each (offset, length, sha256) of the file is what its digest says; False where it is cut."""
    with path.open("rb") as file:
        for offset, length, expected in ranges:
            file.seek(offset)
            sha256, left = hashlib.sha256(), length
            while left:
                data = file.read(min(left, _READ_BYTES))
                if not data:
                    return False
                sha256.update(data)
                left -= len(data)
            if sha256.hexdigest() != expected:
                return False
    return True


def sync_file(path: Path, root: Path) -> None:
    """Flush a file, and the directories that name it up to `root`, to the disk."""
    _sync(path)
    for directory in (path.parent, *path.parent.parents):
        _sync(directory)
        if directory == root:
            return


def remove_directory(path: Path) -> None:
    """Remove an empty directory and flush its parent; nothing happens where it is not there or not empty."""
    with contextlib.suppress(OSError):
        path.rmdir()
    with contextlib.suppress(FileNotFoundError):
        _sync(path.parent)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
