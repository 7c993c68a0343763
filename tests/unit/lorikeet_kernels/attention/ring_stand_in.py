"""What gluon_stand_in lacks for latent_ring: shared memory, TMA, mbarriers and warps with tasks of their own.

`install()` as there. Partitions of a warp specialization run in threads, barriers count arrivals, bytes and
phases, and a copy that was asked for happens a little later, so that who does not wait reads NaN or a slot's
former step. Shared memory lies as the hardware has it, panels of 64 elements after one another; without the
swizzle, which no reader sees.
"""

import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import gluon_stand_in
import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

PANEL = 64
PATIENCE_S = 60.0
COPY_S = 1e-4
HOPPER = "triton.experimental.gluon.language.nvidia.hopper"
DESCRIPTORS = "triton.experimental.gluon.nvidia.hopper"


class Barrier:
    """An mbarrier: a phase ends when `count` have arrived and all announced bytes are there."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.count = self.missing = self.missing_bytes = self.ended = 0

    def update(self, arrivals: int, num_bytes: int) -> None:
        """Note what arrived; bytes that are announced count as negative."""
        with self.changed:
            self.missing -= arrivals
            self.missing_bytes -= num_bytes
            assert self.missing >= 0, "more arrivals than the barrier counts"
            if self.missing == self.missing_bytes == 0:
                self.missing = self.count
                self.ended += 1
                self.changed.notify_all()

    def wait(self, phase: int) -> None:
        """Until the phase of that parity has ended."""
        with self.changed:
            done = self.changed.wait_for(lambda: self.ended % 2 != int(phase), PATIENCE_S)
        assert done, "a barrier that nobody ends"


class Barriers(list[Barrier]):
    """An allocation of barriers."""

    def index(self, slot: Any, *_: Any) -> Barrier:  # pyright: ignore[reportIncompatibleMethodOverride]
        """As a memory descriptor's."""
        return self[int(slot)]


@dataclass(frozen=True)
class Shared:
    """A view of shared memory: `shape` over a run of elements; the last two dimensions are a tile."""

    run: np.ndarray[Any, Any]
    shape: tuple[int, ...]
    dtype: Any
    is_turned: bool = False

    def index(self, slot: Any) -> "Shared":
        """The tile, or group of them, of the first dimension."""
        size = self.run.size // self.shape[0]
        assert 0 <= int(slot) < self.shape[0]
        return Shared(self.run[int(slot) * size :][:size], self.shape[1:], self.dtype)

    def permute(self, _order: object) -> "Shared":
        """The tile transposed."""
        return Shared(self.run, self.shape, self.dtype, not self.is_turned)

    def _reinterpret(self, dtype: Any, shape: Sequence[Any], _layout: object) -> "Shared":
        sizes = tuple(int(size) for size in shape)
        assert np.prod(sizes) == self.run.size
        return Shared(self.run, sizes, dtype)

    @property
    def tile(self) -> np.ndarray[Any, Any]:
        """A view [rows, panels, PANEL] of a tile's elements."""
        rows, columns = self.shape
        panel = min(PANEL, columns)
        return self.run.reshape(columns // panel, rows, panel).transpose(1, 0, 2)

    def load(self, _layout: object = None) -> Any:
        """As a tensor of the interpreter."""
        values = self.tile.reshape(self.shape)
        values = np.ascontiguousarray(values.T if self.is_turned else values)
        return tl.core.tensor(
            TensorHandle(values, self.dtype), tl.block_type(self.dtype, [int(n) for n in values.shape])
        )

    def store(self, value: Any) -> None:
        """From a tensor of the interpreter."""
        self.tile[...] = value.handle.data.reshape(self.tile.shape)


@dataclass(frozen=True)
class Descriptor:
    """A tensor descriptor: rows, of which copies take blocks."""

    base: torch.Tensor
    block: tuple[int, int]

    @classmethod
    def from_tensor(cls, base: torch.Tensor, block: Sequence[int], _layout: object) -> "Descriptor":
        """As the real one's."""
        return cls(base, (block[0], block[1]))


def _allocate(dtype: Any, shape: Sequence[Any], _layout: object) -> Any:
    sizes = tuple(int(size) for size in shape)
    if dtype == tl.int64:
        return Barriers(Barrier() for _ in range(sizes[0]))
    return Shared(np.full(int(np.prod(sizes)), np.nan, np.float16), sizes, dtype)


def _init(barrier: Barrier, count: Any) -> None:
    barrier.count = barrier.missing = int(count)


def _copy(descriptor: Descriptor, at: Sequence[Any], barrier: Barrier, place: Shared) -> None:
    row, column = (int(index) for index in at)
    rows, columns = descriptor.block
    assert place.shape == (rows, columns)
    assert row + rows <= descriptor.base.shape[0]
    block = descriptor.base[row : row + rows, column : column + columns].numpy()

    def happen() -> None:
        time.sleep(COPY_S)
        place.tile[...] = block.reshape(place.tile.shape)
        barrier.update(0, block.nbytes)

    threading.Thread(target=happen).start()


def _multiply(a: Shared, b: Shared, acc: Any, *, use_acc: bool = True, is_async: bool = False) -> Any:
    del is_async
    product = tl.dot(a.load(), b.load(), input_precision="ieee")
    return acc + product if use_acc else product


def _specialize(tasks: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]], *_: object) -> Any:
    failures: list[BaseException] = []

    def work(task: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            task(*args)
        except BaseException as error:  # noqa: BLE001 (it is raised below)
            failures.append(error)

    threads = [threading.Thread(target=work, args=task) for task in tasks[1:]]
    for thread in threads:
        thread.start()
    task, args = tasks[0]
    try:
        result = task(*args)
    except BaseException as error:
        if failures:  # for whose barriers this one waited
            raise failures[0] from error
        raise
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return result


def install() -> None:
    """Put the stand-ins in the places of Gluon's modules."""
    gluon_stand_in.install()
    language = sys.modules["triton.experimental.gluon.language"]
    for name in ("exp2", "num_programs", "zeros_like"):
        setattr(language, name, lambda *args, _name=name, **kwargs: getattr(tl, _name)(*args, **kwargs))

    class Layout:
        """Forgotten."""

        def __init__(self, *_: object, **__: object) -> None:
            pass

        @staticmethod
        def get_default_for(*_: object) -> None:
            """Forgotten too."""

    vars(language).update(
        allocate_shared_memory=_allocate,
        NVMMASharedLayout=Layout,
        thread_barrier=lambda: None,
        warp_specialize=_specialize,
    )
    hopper, descriptors = ModuleType(HOPPER), ModuleType(DESCRIPTORS)
    mbarrier, tma = ModuleType(f"{HOPPER}.mbarrier"), ModuleType(f"{HOPPER}.tma")
    vars(mbarrier).update(
        MBarrierLayout=Layout,
        init=_init,
        expect=lambda barrier, num_bytes: barrier.update(1, -int(num_bytes)),
        arrive=lambda barrier, count: barrier.update(int(count), 0),
        wait=lambda barrier, phase: barrier.wait(phase),
    )
    vars(tma).update(async_copy_global_to_shared=_copy)
    vars(hopper).update(
        fence_async_shared=lambda: None,
        mbarrier=mbarrier,
        tma=tma,
        warpgroup_mma=_multiply,
        warpgroup_mma_wait=lambda _outstanding, values: values[0] if len(values) == 1 else values,
    )
    vars(descriptors)["TensorDescriptor"] = Descriptor
    sys.modules.update({module.__name__: module for module in (hopper, descriptors, mbarrier, tma)})
