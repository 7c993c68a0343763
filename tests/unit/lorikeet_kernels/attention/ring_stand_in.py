"""What gluon_stand_in lacks for kernels with rings: shared memory, copies, mbarriers, warps with own tasks.

`install()` as there. Partitions of a warp specialization run in threads, barriers count arrivals, bytes and
phases. A copy that was asked for happens a little later, so that who does not wait reads NaN; so does a
product, so that who gives its operands' slots away before its end multiplies NaN.
"""

import builtins
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import gluon_stand_in
import numpy as np
import threads_stand_in
import torch
import triton.language as tl
from shared_memory_stand_in import (
    Barrier,
    PanelLayout,
    PlainLayout,
    Shared,
    allocate,
    make_tensor,
    storage_type,
)
from triton.runtime import interpreter

HOPPER = "triton.experimental.gluon.language.nvidia.hopper"
AMPERE = "triton.experimental.gluon.language.nvidia.ampere"
DESCRIPTORS = "triton.experimental.gluon.nvidia.hopper"
POLL_S = 5e-3
"""Between looks at what other programs write: looking takes time from those who do it."""
THREADS = 128
"""Of a warpgroup, each of which arrives for its own asynchronous copies."""


@dataclass(frozen=True)
class Descriptor:
    """A tensor descriptor: a tensor, of which copies take blocks."""

    base: torch.Tensor
    block_shape: list[int]
    layout: PanelLayout

    @classmethod
    def from_tensor(cls, base: torch.Tensor, block: Sequence[int], layout: PanelLayout) -> "Descriptor":
        """As the real one's."""
        return cls(base, list(block), layout)

    def block(self, at: Sequence[int]) -> np.ndarray[Any, Any]:
        """A block's bytes, as they are now."""
        ends = [start + size for start, size in zip(at, self.block_shape, strict=True)]
        assert all(a >= 0 and b <= n for a, b, n in zip(at, ends, self.base.shape, strict=True))
        block = self.base[tuple(slice(a, b) for a, b in zip(at, ends, strict=True))]
        return block.contiguous().view(torch.uint8).numpy()


def _copy_block(descriptor: Descriptor, at: Sequence[Any], barrier: Barrier, place: Shared) -> None:
    start = [int(index) for index in at]
    assert list(place.shape) == descriptor.block_shape
    place.spoil()

    def happen() -> None:
        block = descriptor.block(start)
        place.write(block.view(storage_type(place.dtype)))
        barrier.update(0, block.nbytes)

    threads_stand_in.later(happen)


class _Copies(threading.local):
    """A partition's asynchronous copies that may be under way."""

    def __init__(self) -> None:
        self.started: list[threading.Thread] = []


_copies = _Copies()


def _copy_elements(place: Shared, pointer: Any, mask: Any = None, cache_modifier: str = "") -> None:
    assert place.shape == pointer.handle.data.shape
    is_there = np.broadcast_to(True if mask is None else mask.handle.data, place.shape)
    place.spoil()

    def happen() -> None:
        chosen = interpreter.TensorHandle(np.ascontiguousarray(is_there), tl.int1)
        loaded = interpreter.interpreter_builder.create_masked_load(
            pointer.handle, chosen, None, None, None, is_volatile=False
        )
        place.write(loaded.data)

    _copies.started = [copy for copy in _copies.started if copy.is_alive()]
    _copies.started.append(threads_stand_in.later(happen))


def _arrive_after_copies(barrier: Barrier, *, increment_count: bool = True) -> None:
    assert not increment_count, "each thread's arrival is among those that the barrier counts"
    copies = tuple(_copies.started)

    def happen() -> None:
        for copy in copies:
            copy.join()
        barrier.arrive(THREADS)

    threads_stand_in.later(happen)


@dataclass(frozen=True)
class Product:
    """A product that is under way: reads its operands when it is waited for."""

    a: Shared
    b: Shared
    added: Any

    def finish(self) -> Any:
        """The sum."""
        threads_stand_in.take_time("products")
        product = np.matmul(self.a.floats, self.b.floats)
        if self.added is not None:
            product += _finish(self.added).handle.data
        return make_tensor(product, tl.float32)


def _finish(value: Any) -> Any:
    return value.finish() if isinstance(value, Product) else value


def _multiply(a: Shared, b: Shared, acc: Any, *, use_acc: bool = True, is_async: bool = False) -> Any:
    product = Product(a, b, acc if use_acc else None)
    return product if is_async else product.finish()


def _wait_for_products(outstanding: int, values: Sequence[Any]) -> Any:
    assert outstanding == 0
    finished = tuple(_finish(value) for value in values)
    return finished[0] if len(finished) == 1 else finished


def _specialize(tasks: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]], *_: object) -> Any:
    return threads_stand_in.run_together([partial(task, *args) for task, args in tasks])[0]


def _assemble(asm: str, _constraints: str, args: Sequence[Any], **_: object) -> Any:
    if asm.startswith("ld.acquire"):  # by those who wait for other programs
        time.sleep(POLL_S)
        threads_stand_in.keep_waiting()
        return tl.load(args[0])
    assert asm.startswith("griddepcontrol"), asm
    return None


def _range(*bounds: Any) -> Iterator[Any]:
    """A loop's numbers are tensors, as on a device."""
    for number in builtins.range(*map(int, bounds)):
        yield interpreter.interpreter_semantic.to_tensor(number)


class _Number(int):
    """A constant of a module, for kernels and for the host: tl.constexpr + tensor is no tensor."""

    @property
    def value(self) -> int:
        """As a constexpr's."""
        return int(self)


def attach(kernel_module: ModuleType) -> None:
    """As gluon_stand_in's; loops' numbers and the module's constants are as kernels see them on a device."""
    gluon_stand_in.attach(kernel_module)
    names = vars(kernel_module)
    names["range"] = _range
    for name, constant in names.items():
        if isinstance(constant, tl.constexpr):
            names[name] = _Number(constant.value)


def install() -> None:
    """Put the stand-ins in the places of Gluon's modules."""
    gluon_stand_in.install()
    threads_stand_in.install()
    language = sys.modules["triton.experimental.gluon.language"]
    for name in ("exp2", "num_programs", "zeros_like", "cdiv", "atomic_add", "static_assert"):
        setattr(language, name, lambda *args, _name=name, **kwargs: getattr(tl, _name)(*args, **kwargs))
    vars(language).update(
        allocate_shared_memory=allocate,
        NVMMASharedLayout=PanelLayout,
        SwizzledSharedLayout=PlainLayout,
        thread_barrier=lambda: None,
        warp_specialize=_specialize,
        inline_asm_elementwise=_assemble,
    )
    hopper, descriptors = ModuleType(HOPPER), ModuleType(DESCRIPTORS)
    mbarrier, tma = ModuleType(f"{HOPPER}.mbarrier"), ModuleType(f"{HOPPER}.tma")
    async_copy = ModuleType(f"{AMPERE}.async_copy")
    vars(mbarrier).update(
        MBarrierLayout=lambda: None,
        init=Barrier.init,
        expect=Barrier.expect,
        arrive=Barrier.arrive,
        wait=Barrier.wait,
    )
    vars(tma).update(async_copy_global_to_shared=_copy_block)
    vars(async_copy).update(async_copy_global_to_shared=_copy_elements, mbarrier_arrive=_arrive_after_copies)
    vars(sys.modules[AMPERE]).update(async_copy=async_copy)
    vars(hopper).update(
        fence_async_shared=lambda: None,
        mbarrier=mbarrier,
        tma=tma,
        warpgroup_mma=_multiply,
        warpgroup_mma_wait=_wait_for_products,
    )
    vars(descriptors)["TensorDescriptor"] = Descriptor
    added = (hopper, descriptors, mbarrier, tma, async_copy)
    sys.modules.update({module.__name__: module for module in added})
