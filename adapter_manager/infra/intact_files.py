"""Whether a revision's local files are what its digest says, read from start to end."""

import asyncio
import hashlib
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from lorikeet_contract.manifest import Manifest

_READ_BYTES = 1 << 20
# More readers at a time only fight for the disk.
_READERS = 2
# A push asks twice within a moment: where to go on, and then for its result. Only a change on the medium
# itself leaves a file's times as they were, and that one is found a minute later.
_TRUSTED_S = 60.0
_MAX_REMEMBERED = 1024

_Signature = tuple[int, int, int, int, int]


class IntactFiles:
    """Checks revisions' directories on threads, a few at a time; remembers for a minute what was whole."""

    def __init__(self) -> None:
        self._whole: dict[str, tuple[_Signature, float]] = {}
        self._reading = asyncio.Semaphore(_READERS)

    async def are_whole(self, directory: Path, digest: str) -> bool:
        """Whether manifest and payload are there and right. False where they cannot be read, too."""
        async with self._reading:
            signature = await asyncio.to_thread(self._checked, directory, digest)
        self._whole.pop(digest, None)
        if signature is None:
            return False
        self._whole[digest] = signature
        if len(self._whole) > _MAX_REMEMBERED:
            del self._whole[next(iter(self._whole))]
        return True

    def _checked(self, directory: Path, digest: str) -> tuple[_Signature, float] | None:
        try:
            data = (directory / "manifest.json").read_bytes()
            if hashlib.sha256(data).hexdigest() != digest:
                return None
            manifest = Manifest.from_json(data)
            with (directory / "payload").open("rb") as file:
                signature = _signature(file)
                known = self._whole.get(digest)
                if known and known[0] == signature and time.monotonic() - known[1] < _TRUSTED_S:
                    return known
                if os.fstat(file.fileno()).st_size != manifest.payload_bytes:
                    return None
                layers = ((layer.offset, layer.num_bytes, layer.sha256) for layer in manifest.layers)
                return (signature, time.monotonic()) if _has_ranges(file, layers) else None
        except (OSError, KeyError, TypeError, ValueError):
            return None


def _signature(file: BinaryIO) -> _Signature:
    """Another file, or the same one written to since, has another."""
    stat = os.fstat(file.fileno())
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _has_ranges(file: BinaryIO, ranges: Iterable[tuple[int, int, str]]) -> bool:
    """Whether each (offset, length, sha256) of the file is what its digest says; False where it is cut."""
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
