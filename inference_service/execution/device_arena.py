"""Adapters on the device and the tables by which kernels find them. Implements ports.DeviceArena."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from inference_service.domain.errors import PayloadError
from inference_service.execution.adapter_layout import AdapterLayout
from inference_service.execution.allocation import lazy_zeros
from inference_service.execution.arena_allocator import ArenaAllocator
from inference_service.execution.arena_copy import ArenaCopy, CpuCopy, CudaCopy
from inference_service.execution.device_copy import to_device
from inference_service.execution.host_pool import PinnedHostPool
from lorikeet_contract.manifest import padded_rank
from lorikeet_kernels.lora.lora_tables import LoraTables

# Of an adapter that is moved within the arena, at a time: bounds what a move takes beside the arena.
_MOVE_BYTES = 16 << 20


@dataclass(slots=True)
class _Slot:
    layout: AdapterLayout
    begin: int
    copy: ArenaCopy | None  # None once the tables name it; holds the host's bytes until then


class TensorArena:
    """One contiguous arena tensor; an adapter takes exactly its bytes of it.

    Args:
        host_pool: where copies start from.
        site_indices: table index by (layer, site key).
        num_slots: adapters that can be active at once.
        max_rank: the largest rank that the host pool lets in.
        total_bytes: the arena's size.
        dtype: compute dtype.
        device: where the arena lives.
    """

    def __init__(
        self,
        host_pool: PinnedHostPool,
        site_indices: Mapping[tuple[int | None, str], int],
        *,
        num_slots: int,
        max_rank: int,
        total_bytes: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_slots = num_slots
        self.total_bytes = total_bytes
        self.used_bytes = 0  # of all slots, copying ones included
        self._host_pool = host_pool
        self._site_indices = site_indices
        self._allocator = ArenaAllocator(total_bytes)
        self._bytes = lazy_zeros((total_bytes,), torch.uint8, device)
        self._itemsize = dtype.itemsize
        self._slots: dict[int, _Slot] = {}
        self._cancelled: list[ArenaCopy] = []  # the device still reads what they hold
        # Of the lowest priority: where copies and steps' kernels meet, kernels go first.
        self._stream = torch.cuda.Stream(device, priority=0) if device.type == "cuda" else None

        def table(kind: torch.dtype) -> torch.Tensor:
            return torch.zeros((num_slots, len(site_indices)), dtype=kind, device=device)

        self.tables = LoraTables(
            arena=self._bytes.view(dtype),
            a_offset=table(torch.int64),
            b_offset=table(torch.int64),
            rank=table(torch.int32),
            num_a=table(torch.int32),
            max_rank=padded_rank(max_rank),
        )

    def begin_copy(self, digest: str, slot: int) -> bool:
        """See ports.DeviceArena. False: no gap is large enough, be it for fragmentation.

        Raises:
            PayloadError: the revision is not in the host pool.
        """
        assert slot not in self._slots, f"slot {slot} is taken"
        assert 0 <= slot < self.num_slots, f"slot {slot} does not exist"
        adapter = self._host_pool.get(digest)
        if adapter is None:
            raise PayloadError(f"revision {digest} is not in the host pool; read it first")
        num_bytes = adapter.layout.num_bytes
        begin = self._allocator.allocate(num_bytes)
        if begin is None:
            return False
        self.used_bytes = self._allocator.used_bytes
        destination = self._bytes[begin : begin + num_bytes]
        copy = (
            CpuCopy(adapter, destination)
            if self._stream is None
            else CudaCopy(adapter, destination, self._stream)
        )
        self._slots[slot] = _Slot(adapter.layout, begin, copy)
        return True

    def poll(self) -> Sequence[int]:
        """See ports.DeviceArena."""
        self._cancelled = [copy for copy in self._cancelled if not copy.advance()]
        done: list[int] = []
        for index, slot in self._slots.items():
            if slot.copy is not None and slot.copy.advance():
                slot.copy = None
                self._enter(index, slot)
                done.append(index)
        return done

    def release(self, slot: int) -> None:
        """See ports.DeviceArena; an empty slot is fine."""
        held = self._slots.pop(slot, None)
        if held is None:
            return
        self.tables.rank[slot] = 0
        if held.copy is not None and self._stream is not None:
            self._cancelled.append(held.copy)
        # Bytes still being copied may be handed out at once: later copies follow on the same stream.
        self._allocator.release(held.begin, held.layout.num_bytes)
        self.used_bytes = self._allocator.used_bytes

    def compact(self) -> bool:
        """See ports.DeviceArena. Copies in progress stay where they are.

        Everything is in the order of the compute stream: steps already enqueued read the old places, later
        ones the new.
        """
        if self._stream is not None:
            # A copy that was cancelled may still write into bytes that are free by our count.
            torch.cuda.current_stream(self._bytes.device).wait_stream(self._stream)
        end_of_last, has_moved = 0, False
        for index, slot in sorted(self._slots.items(), key=lambda item: item[1].begin):
            num_bytes = slot.layout.num_bytes
            if slot.copy is None and end_of_last < slot.begin and num_bytes:
                self._move(slot.begin, end_of_last, num_bytes)
                slot.begin, has_moved = end_of_last, True
                self._enter(index, slot)
            end_of_last = max(end_of_last, slot.begin + num_bytes)
        if has_moved:
            held = [(slot.begin, slot.layout.num_bytes) for slot in self._slots.values()]
            self._allocator.replace(range_ for range_ in held if range_[1])
        return has_moved

    def _move(self, source: int, destination: int, num_bytes: int) -> None:
        """Move bytes towards the start; the ranges may overlap, so pieces go over spare memory."""
        for offset in range(0, num_bytes, _MOVE_BYTES):
            count = min(_MOVE_BYTES, num_bytes - offset)
            piece = self._bytes[source + offset : source + offset + count].clone()
            self._bytes[destination + offset : destination + offset + count].copy_(piece)

    def _enter(self, index: int, slot: _Slot) -> None:
        """Point the tables' row at the adapter."""
        rows = np.zeros((4, len(self._site_indices)), np.int64)  # a_offset, b_offset, rank, num_a
        for layer in slot.layout.layers:
            for site in layer.sites:
                rows[:, self._site_indices[layer.payload.layer, site.key]] = (
                    (slot.begin + site.a.offset) // self._itemsize,
                    (slot.begin + site.b.offset) // self._itemsize,
                    padded_rank(site.rank),
                    site.num_a,
                )
        # In the order of the stream: steps already enqueued see the tables as they were.
        on_device = to_device(torch.from_numpy(rows), self._bytes.device)
        tables = self.tables
        for table, row in zip(
            (tables.a_offset, tables.b_offset, tables.rank, tables.num_a), on_device, strict=True
        ):
            table[index].copy_(row)
