"""The files of one upload, open for reading at any place. Names are checked before anything is opened."""

import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from adapter_manager.domain.errors import InvalidAdapterError
from adapter_manager.domain.shown_text import shown
from lorikeet_contract.adapter_files import InvalidFileError, check_file_set, is_adapter_file


class AdapterFiles:
    """Open files by name; use as a context manager."""

    def __init__(self, descriptors: Mapping[str, int]) -> None:
        self._descriptors = dict(descriptors)
        self._sizes = {name: os.fstat(fd).st_size for name, fd in self._descriptors.items()}

    @classmethod
    def open(cls, directory: Path) -> "AdapterFiles":
        """Open the adapter files of a directory and nothing else in it.

        Raises:
            InvalidAdapterError: a file is missing, or it or the directory is a link or of a wrong kind.
        """
        try:
            directory_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError as error:
            raise _invalid(f"{shown(directory.name)} is not a directory: {error.strerror}") from None
        descriptors: dict[str, int] = {}
        try:
            names = sorted(path.name for path in directory.iterdir())
            _check_set([n for n in names if is_adapter_file(n)], names)
            for name in filter(is_adapter_file, names):
                descriptors[name] = _open_regular(name, directory_fd)
            return cls(descriptors)
        except BaseException:
            for fd in descriptors.values():
                os.close(fd)
            raise
        finally:
            os.close(directory_fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for fd in self._descriptors.values():
            os.close(fd)
        self._descriptors.clear()

    @property
    def names(self) -> tuple[str, ...]:
        """The files that are there."""
        return tuple(self._descriptors)

    def size(self, name: str) -> int:
        """Bytes of a file when it was opened."""
        return self._sizes[name]

    def read_at(self, name: str, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`."""
        buffer = bytearray(length)
        self.read_into(name, offset, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`."""
        fd, done = self._descriptors[name], 0
        while done < len(buffer):
            count = os.preadv(fd, [buffer[done:]], offset + done)
            if count == 0:
                raise _invalid(f"{name} became shorter while it was read")
            done += count


def _check_set(names: Iterable[str], beside: Iterable[str]) -> None:
    try:
        check_file_set(names, beside=beside)
    except InvalidFileError as error:
        raise _invalid(str(error)) from None


def _open_regular(name: str, directory_fd: int) -> int:
    try:
        # Not following links, and not waiting for a writer of a pipe.
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory_fd)
    except OSError:
        raise _invalid(f"{name} is a symbolic link, or cannot be opened: copy the file itself") from None
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
        return fd
    os.close(fd)
    if stat.S_ISREG(status.st_mode):
        raise _invalid(f"{name} has {status.st_nlink} hard links: copy the file itself")
    raise _invalid(f"{name} is not a regular file")


def _invalid(problem: str) -> InvalidAdapterError:
    return InvalidAdapterError(problem, metadata={"problem": "FILES"})
