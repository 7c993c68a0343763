"""Whether a result can be written where it is wanted, to be asked before anything is measured."""

import os
import tempfile
from pathlib import Path


def unwritable_reason(path: Path) -> str:
    """Why the file cannot be written, or nothing; makes directories that are missing."""
    place = path.absolute().parent
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        return f"cannot write to {place}: {error.strerror}"
    if path.is_dir():
        return f"cannot write to {path}: it is a directory"
    if path.exists() and not os.access(path, os.W_OK):
        return f"cannot write to {path}"
    return ""
