"""A stand-in for shared memory: bytes, seen as tiles of any type, and barriers.

Memory lies as the hardware has it: a swizzled layout's tiles are panels, 128 bytes of each row, after one
another; without the swizzle, which no reader sees. What nobody has written yet, and what a copy is under way
to, is all ones: NaN in every floating type, -1 in integers.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import threads_stand_in
import torch
import triton.language as tl
from triton.runtime import interpreter

TORCH_TYPES = {"fp8e4nv": torch.float8_e4m3fn, "bf16": torch.bfloat16, "fp16": torch.float16}


def storage_type(dtype: Any) -> np.dtype[Any]:
    """NumPy's type of the interpreter's elements: as many bits."""
    return interpreter._get_np_dtype(dtype)


class Barrier:
    """An mbarrier: a phase ends when `count` have arrived and all announced bytes are there."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.count = self.missing = self.missing_bytes = self.ended = 0

    def init(self, count: Any) -> None:
        """Before anybody arrives."""
        self.count = self.missing = int(count)

    def expect(self, num_bytes: Any) -> None:
        """Announce bytes, and arrive."""
        self.update(1, -int(num_bytes))

    def arrive(self, count: Any) -> None:
        """So many of those that are counted."""
        self.update(int(count), 0)

    def update(self, arrivals: int, num_bytes: int) -> None:
        """Note what arrived; bytes that are announced count as negative."""
        threads_stand_in.move()
        with self.changed:
            self.missing -= arrivals
            self.missing_bytes -= num_bytes
            assert self.missing >= 0, "more arrivals than the barrier counts"
            if self.missing == self.missing_bytes == 0:
                self.missing = self.count
                self.ended += 1
                self.changed.notify_all()

    def wait(self, phase: Any, pred: Any = True) -> None:
        """Until the phase of that parity has ended."""
        with self.changed:
            while pred and not self.changed.wait_for(lambda: self.ended % 2 != int(phase), 0.1):
                threads_stand_in.keep_waiting()


class Barriers(list[Barrier]):
    """An allocation of barriers."""

    @property
    def shape(self) -> list[int]:
        """As a memory descriptor's."""
        return [len(self), 1]

    def index(self, slot: Any, *_: Any) -> Barrier:  # pyright: ignore[reportIncompatibleMethodOverride]
        """As a memory descriptor's."""
        return self[int(slot)]


class PanelLayout:
    """NVMMASharedLayout."""

    panel_bytes: int | None = 128

    def __init__(self, swizzle_byte_width: int = 128, element_bitwidth: int = 16, rank: int = 2) -> None:
        assert swizzle_byte_width == self.panel_bytes

    @staticmethod
    def get_default_for(*_: object) -> "PanelLayout":
        """Rows of fewer bytes than a panel are their own."""
        return PanelLayout()


class PlainLayout:
    """SwizzledSharedLayout that does not swizzle: row after row."""

    panel_bytes: int | None = None

    def __init__(self, vec: int, per_phase: int, max_phase: int, order: Sequence[int]) -> None:
        assert max_phase == 1


Layout = PanelLayout | PlainLayout


def make_tensor(values: np.ndarray[Any, Any], dtype: Any) -> Any:
    """A tensor of the interpreter."""
    handle = interpreter.TensorHandle(np.ascontiguousarray(values), dtype)
    return tl.core.tensor(handle, tl.block_type(dtype, [int(size) for size in values.shape]))


@dataclass(frozen=True)
class Part:
    """Some elements of shared memory, to be read."""

    elements: np.ndarray[Any, Any]
    dtype: Any

    def load(self, _layout: object = None) -> Any:
        """As a tensor of the interpreter."""
        return make_tensor(self.elements.copy(), self.dtype)


@dataclass(frozen=True)
class Shared:
    """A view of shared memory: `shape` over a run of bytes; the last two dimensions are a tile."""

    run: np.ndarray[Any, Any]
    shape: tuple[int, ...]
    dtype: Any
    layout: Layout
    is_turned: bool = False

    @classmethod
    def allocate(cls, dtype: Any, shape: Sequence[Any], layout: Layout) -> "Shared":
        """Nobody has written there yet."""
        sizes = tuple(int(size) for size in shape)
        num_bytes = int(np.prod(sizes)) * storage_type(dtype).itemsize
        return cls(np.full(num_bytes, 0xFF, np.uint8), sizes, dtype, layout)

    def index(self, slot: Any) -> "Shared":
        """The tile, or group of them, of the first dimension."""
        size = self.run.size // self.shape[0]
        assert 0 <= int(slot) < self.shape[0]
        return replace(self, run=self.run[int(slot) * size :][:size], shape=self.shape[1:])

    def permute(self, _order: object) -> "Shared":
        """The tile transposed."""
        return replace(self, is_turned=not self.is_turned)

    def reshape(self, shape: Sequence[Any]) -> "Shared":
        """The same bytes; no tile is cut."""
        return self._reinterpret(self.dtype, shape, self.layout)

    def _reinterpret(self, dtype: Any, shape: Sequence[Any], layout: Layout) -> "Shared":
        sizes = tuple(int(size) for size in shape)
        assert int(np.prod(sizes)) * storage_type(dtype).itemsize == self.run.size
        return Shared(self.run, sizes, dtype, layout)

    def slice(self, start: Any, length: Any, dim: int = 0) -> Part:
        """Some of a plain layout's elements."""
        assert self.layout.panel_bytes is None
        assert int(start) + int(length) <= self.shape[dim]
        chosen = [slice(None)] * len(self.shape)
        chosen[dim] = slice(int(start), int(start) + int(length))
        return Part(self.tile.reshape(self.shape)[tuple(chosen)], self.dtype)

    @property
    def tile(self) -> np.ndarray[Any, Any]:
        """A view [rows, panels, columns of a panel] of a tile's elements; a line is a row."""
        assert int(np.prod(self.shape[:-2])) == 1
        rows, columns = (1, *self.shape)[-2:]
        elements = self.run.view(storage_type(self.dtype))
        panel = min(columns, (self.layout.panel_bytes or self.run.size) // elements.itemsize)
        return elements.reshape(columns // panel, rows, panel).transpose(1, 0, 2)

    @property
    def floats(self) -> np.ndarray[Any, Any]:
        """A copy in float32."""
        values = torch.from_numpy(self.tile.reshape(self.shape).copy()).view(TORCH_TYPES[self.dtype.name])
        floats = values.float().numpy()
        return floats.T if self.is_turned else floats

    def load(self, _layout: object = None) -> Any:
        """As a tensor of the interpreter."""
        assert not self.is_turned
        return make_tensor(self.tile.reshape(self.shape).copy(), self.dtype)

    def store(self, value: Any) -> None:
        """From a tensor of the interpreter."""
        self.write(value.handle.data)

    def write(self, values: np.ndarray[Any, Any]) -> None:
        """From elements in the same order."""
        self.tile[...] = values.reshape(self.tile.shape)

    def spoil(self) -> None:
        """What was here is no longer, and something else is not yet."""
        self.run[...] = 0xFF


def allocate(dtype: Any, shape: Sequence[Any], layout: Any) -> Barriers | Shared:
    """Stand in for allocate_shared_memory."""
    if dtype == tl.int64:
        return Barriers(Barrier() for _ in range(int(shape[0])))
    return Shared.allocate(dtype, shape, layout)
