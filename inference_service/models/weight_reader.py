"""Tensors out of files into parameters, in parallel and while the model is still being built.

Each thread reads one piece at a time, with one large read. A piece whose bytes are the parameter's own goes
straight into it where that is in host memory; any other goes through a staging buffer, which is pinned where
the parameter is on a GPU: from there it is copied on a stream of its own, so that disk, bus and device work
at the same time. The buffers are few and fixed; nothing ever holds a second copy of the model.
"""

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from inference_service.models.errors import CheckpointError

# One read, and one staging buffer; 16 MiB is where NVMe disks and page-cache copies reach their full speed.
PIECE_BYTES = 16 << 20
# A disk gives its best with several reads in flight; above eight, copies out of the page cache gain nothing.
_MAX_THREADS = 8
# While one buffer of a thread is on its way to the device the other is filled.
_BUFFERS_PER_THREAD = 2


@dataclass(frozen=True, slots=True)
class FilePart:
    """Bytes [begin, end) of an open file, holding elements of `dtype`."""

    path: Path
    fd: int
    begin: int
    end: int
    dtype: torch.dtype


@dataclass(slots=True)
class TensorRead:
    """A tensor on its way; `futures` has one entry for each piece."""

    futures: list[Future[None]] = field(default_factory=list[Future[None]])

    def wait(self) -> None:
        """Return once every piece was read, and copied or enqueued for it; raises what a piece raised."""
        for future in self.futures:
            future.result()


@dataclass(slots=True)
class _Buffer:
    data: torch.Tensor  # [PIECE_BYTES] uint8
    copied: torch.cuda.Event | None = None


class WeightReader:
    """Reads into parameters of one device. Used by one thread, the builder's.

    Args:
        device: where parameters live.
        num_threads: readers; default: by the machine.
    """

    def __init__(self, device: torch.device, num_threads: int | None = None) -> None:
        count = num_threads or min(_MAX_THREADS, len(os.sched_getaffinity(0)))
        self._device = device
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="weight-read")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # Made when needed: a small model takes few.
        self._num_unmade = count * (_BUFFERS_PER_THREAD if self._stream else 1)
        self._making = threading.Lock()
        self._free: queue.SimpleQueue[_Buffer] = queue.SimpleQueue()

    def read(
        self, source: FilePart, destination: torch.Tensor, check: Callable[[torch.Tensor], None]
    ) -> TensorRead:
        """Begin to fill `destination`, whose row-major elements the file's are, converting the dtype.

        `check` sees each part of a destination in host memory once it is filled, on a reader's thread.
        """
        # What the memory held before may still be read by work enqueued up to now.
        after = _recorded(torch.cuda.current_stream(self._device)) if self._stream else None
        read = TensorRead()
        begin = source.begin
        for part in pieces(destination, PIECE_BYTES // source.dtype.itemsize):
            end = begin + part.numel() * source.dtype.itemsize
            piece = FilePart(source.path, source.fd, begin, end, source.dtype)
            read.futures.append(self._threads.submit(self._read_piece, piece, part, after, check))
            begin = end
        assert begin == source.end, f"{source.end - begin} bytes are left over"
        return read

    def join_stream(self) -> None:
        """Let work enqueued from now on see all that reads which were waited for have copied."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def close(self) -> None:
        """End the threads and free the buffers; reads that have not begun are given up."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        if self._stream is not None:
            self._stream.synchronize()

    def _read_piece(
        self,
        piece: FilePart,
        part: torch.Tensor,
        after: torch.cuda.Event | None,
        check: Callable[[torch.Tensor], None],
    ) -> None:
        if self._stream is None and part.dtype == piece.dtype and part.is_contiguous():
            read_exactly(piece, part.view(-1).view(torch.uint8))
        else:
            self._read_staged(piece, part, after)
        if self._stream is None:
            check(part)

    def _read_staged(self, piece: FilePart, part: torch.Tensor, after: torch.cuda.Event | None) -> None:
        buffer = self._take_buffer()
        try:
            if buffer.copied is not None:
                buffer.copied.synchronize()
            staged = buffer.data[: piece.end - piece.begin]
            read_exactly(piece, staged)
            if self._stream is None:
                part.copy_(staged.view(piece.dtype).view(part.shape))
                return
            assert after is not None
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(after)
                if part.dtype == piece.dtype and part.is_contiguous():
                    part.view(-1).view(torch.uint8).copy_(staged, non_blocking=True)
                else:
                    # Converted and turned round on the device: on the host it would be slower than the disk.
                    moved = staged.to(self._device, non_blocking=True)
                    part.copy_(moved.view(piece.dtype).view(part.shape))
                buffer.copied = _recorded(self._stream)
        finally:
            self._free.put(buffer)

    def _take_buffer(self) -> _Buffer:
        with self._making:
            may_make = self._num_unmade > 0
            self._num_unmade -= may_make
        if not may_make:
            return self._free.get()
        return _Buffer(torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=self._stream is not None))


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(stream)
    return event


def pieces(tensor: torch.Tensor, max_elements: int) -> list[torch.Tensor]:
    """Views that make up `tensor` in row-major order, of at most `max_elements` each where a row allows it.

    A tensor that is not contiguous, a transposed one above all, is cut between rows, so that each piece is a
    view too.
    """
    if tensor.numel() == 0:
        return []
    if tensor.is_contiguous():
        return list(tensor.view(-1).split(max_elements))
    if tensor.numel() <= max_elements or tensor.dim() == 0:
        return [tensor]
    row = tensor[0].numel()
    if row > max_elements and tensor.dim() > 1:
        return [piece for index in range(tensor.shape[0]) for piece in pieces(tensor[index], max_elements)]
    return list(tensor.split(max(1, max_elements // row)))


def read_exactly(piece: FilePart, destination: torch.Tensor) -> None:
    """Fill `destination` [N] uint8, in host memory.

    Raises:
        CheckpointError: the file ends early or cannot be read.
    """
    view = memoryview(destination.numpy().data)
    offset = piece.begin
    # All of it is asked of the disk at once: by itself the kernel reads 128 KiB ahead.
    os.posix_fadvise(piece.fd, offset, len(view), os.POSIX_FADV_WILLNEED)
    while view:
        try:
            count = os.preadv(piece.fd, [view], offset)
        except OSError as error:
            raise CheckpointError(f"{piece.path} cannot be read: {error}") from error
        if count == 0:
            raise CheckpointError(f"{piece.path} was cut short while it was read: it ends at byte {offset}")
        view = view[count:]
        offset += count
