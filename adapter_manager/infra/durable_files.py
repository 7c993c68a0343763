"""Files that are on the disk when a call returns, for the local artifact store."""

import contextlib
import os
import secrets
import shutil
from pathlib import Path


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


def remove_folder(path: Path) -> None:
    """Remove a directory and what is in it; nothing happens to anything else."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
