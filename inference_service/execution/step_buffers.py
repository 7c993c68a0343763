"""The arrays of a step, packed into one buffer: filled on the host, brought to the device by one copy.

The device's buffer never moves, so that captured graphs read it; each step overwrites it in the order of the
device's work. The host's buffers take turns: one is written while the copy from another may still run.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

# Kernels are compiled for pointers at multiples of 16 bytes, and once more for a field that begins elsewhere.
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class StepShape:
    """T rows of R requests, block tables W wide, N rows to sample from. With `pads` rows of none follow."""

    num_rows: int
    num_requests: int
    table_width: int
    num_samples: int
    pads: bool = False

    @property
    def is_decode(self) -> bool:
        """One row a request; a shape for steps with prompts has more rows than requests."""
        return self.num_rows == self.num_requests

    @property
    def of_forward(self) -> "StepShape":
        """What the forward pass reads: the fields before those of sampling, at the same places for any N."""
        return replace(self, num_samples=0)


@dataclass(frozen=True, slots=True)
class HostArrays:
    """Views of a host buffer, to be filled."""

    token_ids: NDArray[np.int64]  # [T], or a place of the table of sampled tokens (pending_tokens)
    positions: NDArray[np.int64]  # [T]
    slot_mapping: NDArray[np.int64]  # [T]
    source_rows: NDArray[np.int64]  # [T] where a padding row takes its routing from; empty without padding
    token_slot: NDArray[np.int32]  # [T]
    query_starts: NDArray[np.int32]  # [R + 1]
    sequence_lens: NDArray[np.int32]  # [R]
    block_tables: NDArray[np.int32]  # [R, W]
    sample_rows: NDArray[np.int64]  # [N] rows that are sampled from
    sample_slots: NDArray[np.int32]  # [N] their LoRA slots
    places: NDArray[np.int64]  # [N] their places in the table of sampled tokens
    seed: NDArray[np.int64]  # [N]
    position: NDArray[np.int64]  # [N]
    top_k: NDArray[np.int64]  # [N]
    temperature: NDArray[np.float32]  # [N]
    top_p: NDArray[np.float32]  # [N]
    min_p: NDArray[np.float32]  # [N]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The same on the device, valid until the next step's copy is enqueued."""

    shape: StepShape
    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    source_rows: torch.Tensor
    token_slot: torch.Tensor
    query_starts: torch.Tensor
    sequence_lens: torch.Tensor
    block_tables: torch.Tensor
    sample_rows: torch.Tensor
    sample_slots: torch.Tensor
    places: torch.Tensor
    seed: torch.Tensor
    position: torch.Tensor
    top_k: torch.Tensor
    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor


_INT64 = (
    *("token_ids", "positions", "slot_mapping", "source_rows"),
    *("sample_rows", "places", "seed", "position", "top_k"),
)
_FLOAT32 = ("temperature", "top_p", "min_p")
_NAMES = tuple(field.name for field in fields(HostArrays))
_NUMPY = {torch.int64: np.int64, torch.int32: np.int32, torch.float32: np.float32}


def _dtype(name: str) -> torch.dtype:
    if name in _INT64:
        return torch.int64
    return torch.float32 if name in _FLOAT32 else torch.int32


def _sizes(shape: StepShape) -> dict[str, tuple[int, ...]]:
    rows, requests, samples = (shape.num_rows,), (shape.num_requests,), (shape.num_samples,)
    of_rows = dict.fromkeys(("token_ids", "positions", "slot_mapping", "token_slot"), rows)
    of_samples = dict.fromkeys(
        ("sample_rows", "sample_slots", "places", "seed", "position", "top_k", *_FLOAT32), samples
    )
    return {
        **of_rows,
        **of_samples,
        "source_rows": rows if shape.pads else (0,),
        "query_starts": (shape.num_requests + 1,),
        "sequence_lens": requests,
        "block_tables": (shape.num_requests, shape.table_width),
    }


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    size: tuple[int, ...]
    dtype: torch.dtype
    begin: int
    end: int


def _lay_out(shape: StepShape) -> tuple[tuple[_Field, ...], int]:
    """The fields' places, and the bytes of all."""
    sizes, placed, begin = _sizes(shape), list[_Field](), 0
    for name in _NAMES:
        dtype = _dtype(name)
        count = 1
        for extent in sizes[name]:
            count *= extent
        end = begin + count * dtype.itemsize
        placed.append(_Field(name, sizes[name], dtype, begin, end))
        begin = -(-end // _ALIGNMENT) * _ALIGNMENT
    return tuple(placed), begin


@dataclass(frozen=True, slots=True)
class _Kept:
    """A shape's views: of every host buffer, and of the device's."""

    host: tuple[HostArrays, ...]
    device: StepInputs
    num_bytes: int


class StepBuffers:
    """Owns the buffers. One caller: the batch builder.

    Args:
        largest: no step's field is larger than this shape's.
        num_turns: host buffers, one more than steps that may have begun and not ended.
        device: where steps run.
    """

    def __init__(self, largest: StepShape, num_turns: int, device: torch.device) -> None:
        _, num_bytes = _lay_out(largest)
        pin = device.type == "cuda"
        self._host = [torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pin) for _ in range(num_turns)]
        self._device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._kept: dict[StepShape, _Kept] = {}
        self._turn = 0

    def keep(self, shape: StepShape) -> StepInputs:
        """The device's views of a shape that comes often; the same ones every time."""
        kept = self._kept.get(shape)
        if kept is None:
            placed, num_bytes = _lay_out(shape)
            host = tuple(self._on_host(placed, turn) for turn in range(len(self._host)))
            kept = self._kept[shape] = _Kept(host, self._on_device(shape, placed), num_bytes)
        return kept.device

    def fill(self, shape: StepShape, write: Callable[[HostArrays], None]) -> StepInputs:
        """Let `write` fill the next host buffer and enqueue its copy; returns the device's views."""
        turn = self._turn = (self._turn + 1) % len(self._host)
        kept = self._kept.get(shape)
        if kept is not None:
            host, device, num_bytes = kept.host[turn], kept.device, kept.num_bytes
        else:
            placed, num_bytes = _lay_out(shape)
            device, host = self._on_device(shape, placed), self._on_host(placed, turn)
        write(host)
        self._device[:num_bytes].copy_(self._host[turn][:num_bytes], non_blocking=True)
        return device

    def _on_host(self, placed: tuple[_Field, ...], turn: int) -> HostArrays:
        buffer = self._host[turn].numpy()
        views: dict[str, NDArray[Any]] = {
            f.name: buffer[f.begin : f.end].view(_NUMPY[f.dtype]).reshape(f.size) for f in placed
        }
        return HostArrays(**views)

    def _on_device(self, shape: StepShape, placed: tuple[_Field, ...]) -> StepInputs:
        if placed[-1].end > self._device.shape[0]:
            raise ValueError(
                f"{shape} needs {placed[-1].end} bytes, the step buffers have {self._device.shape[0]}"
            )
        views = {f.name: self._device[f.begin : f.end].view(f.dtype).view(f.size) for f in placed}
        return StepInputs(shape=shape, **views)
