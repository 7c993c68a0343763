"""Where payload bytes go: hashed by layer and written on a thread, while the next are assembled."""

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from io import RawIOBase
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

# Hashed, then written while still in the cache.
_PIECE_BYTES = 1 << 20
_NUM_BUFFERS = 2


class PayloadSink:
    """Takes buffers in order; use as a context manager, which waits for the thread.

    Buffers are lent by `borrow`, filled by the caller, and taken back by `append`: memory stays bounded by
    the few that there are. What goes wrong while writing is raised by `borrow` or `flush`.
    """

    def __init__(self, file: RawIOBase) -> None:
        self._file = file
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="payload-sink")
        self._sha256 = hashlib.sha256()
        self._buffers = [np.empty(0, np.uint8) for _ in range(_NUM_BUFFERS)]
        self._written: list[Future[None] | None] = [None] * _NUM_BUFFERS
        self._turn = 0
        self.offset = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(wait=True, cancel_futures=kind is not None)

    def borrow(self, num_bytes: int) -> Bytes:
        """A buffer of zeros, the caller's until `append`; waits until one is free."""
        self._turn = (self._turn + 1) % _NUM_BUFFERS
        if (written := self._written[self._turn]) is not None:
            written.result()
        if len(self._buffers[self._turn]) < num_bytes:
            self._buffers[self._turn] = np.empty(num_bytes, np.uint8)
        buffer = self._buffers[self._turn][:num_bytes]
        buffer.fill(0)
        return buffer

    def append(self, buffer: Bytes) -> None:
        """Hash and write the buffer that was borrowed last."""
        self._written[self._turn] = self._thread.submit(self._write, buffer.data)
        self.offset += len(buffer)

    def pad(self, end: int) -> None:
        """Append zeros up to offset `end`."""
        if end > self.offset:
            self.append(self.borrow(end - self.offset))

    def flush(self) -> None:
        """Wait until all is written."""
        for written in self._written:
            if written is not None:
                written.result()

    def end_layer(self) -> "Future[str]":
        """The sha256 of everything since the last layer's end, once it is written."""
        return self._thread.submit(self._digest)

    def _write(self, data: memoryview) -> None:
        for start in range(0, len(data), _PIECE_BYTES):
            piece = data[start : start + _PIECE_BYTES]
            self._sha256.update(piece)
            while piece:
                # An unbuffered file may take less than it was given.
                piece = piece[self._file.write(piece) or 0 :]

    def _digest(self) -> str:
        digest = self._sha256.hexdigest()
        self._sha256 = hashlib.sha256()
        return digest
