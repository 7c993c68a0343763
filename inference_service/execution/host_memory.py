"""The bytes of the host pool: page-locked once at start-up where a GPU copies from them.

Page-locking takes a good part of a second a GB, each time. One range of it also lets the pool be as full as
it says, while torch's own pinned allocator rounds a request up to a power of two.
"""

import mmap
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Protocol

import numpy as np
import torch

from inference_service.execution.arena_allocator import ArenaAllocator
from inference_service.models import ModelError

_TOUCH_BYTES = 256 << 20
_MAX_TOUCHING = 8
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context


class HostMemory(Protocol):
    """Hands out memory for revisions; any thread, one at a time."""

    def take(self, sizes: Sequence[int]) -> list[torch.Tensor] | None:
        """Ranges [n] uint8 of these sizes; None where there is no room."""
        ...

    def give_back(self, ranges: Sequence[torch.Tensor]) -> None:
        """Let the ranges be handed out again."""
        ...

    def give_back_with(self, owner: object, ranges: Sequence[torch.Tensor]) -> None:
        """The same once `owner` is gone."""
        ...


class PageableMemory:
    """For a CPU: from the system and back to it."""

    def take(self, sizes: Sequence[int]) -> list[torch.Tensor] | None:
        """See HostMemory; there always is room, the pool counts."""
        return list(torch.empty(sum(sizes), dtype=torch.uint8).split(list(sizes)))

    def give_back(self, ranges: Sequence[torch.Tensor]) -> None:
        """See HostMemory: they go with their last tensor."""

    def give_back_with(self, owner: object, ranges: Sequence[torch.Tensor]) -> None:
        """See HostMemory."""


class RangeMemory:
    """Hands out ranges of one tensor [N] uint8; sizes are multiples of the payload's alignment."""

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data
        self._allocator = ArenaAllocator(data.numel())
        # Owners go on any thread, and in the middle of anything: what they held is only noted then.
        self._released: SimpleQueue[tuple[int, int]] = SimpleQueue()

    def take(self, sizes: Sequence[int]) -> list[torch.Tensor] | None:
        """See HostMemory."""
        self._take_in_released()
        begins: list[int] = []
        for size in sizes:
            begin = self._allocator.allocate(size)
            if begin is None:
                for taken, num_bytes in zip(begins, sizes, strict=False):
                    self._allocator.release(taken, num_bytes)
                return None
            begins.append(begin)
        return [self._data[begin : begin + size] for begin, size in zip(begins, sizes, strict=True)]

    def give_back(self, ranges: Sequence[torch.Tensor]) -> None:
        """See HostMemory."""
        for part in ranges:
            self._released.put((int(part.storage_offset()), part.numel()))

    def give_back_with(self, owner: object, ranges: Sequence[torch.Tensor]) -> None:
        """See HostMemory."""
        weakref.finalize(owner, self.give_back, ranges).atexit = False

    def _take_in_released(self) -> None:
        while True:
            try:
                begin, num_bytes = self._released.get_nowait()
            except Empty:
                return
            self._allocator.release(begin, num_bytes)


def pinned_memory(num_bytes: int) -> RangeMemory:
    """`num_bytes` of page-locked memory, on huge pages where the system has them.

    Raises:
        ModelError: the system does not let so much be page-locked.
    """
    if num_bytes == 0:
        return RangeMemory(torch.empty(0, dtype=torch.uint8))
    region = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a system without huge pages
        region.madvise(mmap.MADV_HUGEPAGE)
    pages = np.frombuffer(region, np.uint8)
    _touch(pages)
    data = torch.from_numpy(pages)
    cuda = torch.cuda.cudart()
    assert cuda is not None, "torch has no CUDA"
    address = data.data_ptr()
    status = int(cuda.cudaHostRegister(address, num_bytes, _PORTABLE))
    if status:
        raise ModelError(
            f"host_pool_bytes {num_bytes} cannot be page-locked (CUDA error {status}); lower it, "
            "or give this machine more memory"
        )
    memory = RangeMemory(data)
    weakref.finalize(memory, cuda.cudaHostUnregister, address)
    return memory


def _touch(pages: np.ndarray) -> None:
    """Have the system hand out every page, on several threads: page-locking would ask for them one by one."""

    def touch(begin: int) -> None:
        pages[begin : begin + _TOUCH_BYTES] = 0

    with ThreadPoolExecutor(_MAX_TOUCHING) as threads:
        list(threads.map(touch, range(0, len(pages), _TOUCH_BYTES)))
