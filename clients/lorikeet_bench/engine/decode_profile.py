"""What a decode step is made of, as an engine process writes it and a command shows it. Pure."""

from collections.abc import Sequence

import msgspec

from lorikeet_bench.engine.kernel_parts import part_of
from lorikeet_bench.load.model_part import ModelPart
from lorikeet_bench.load.step_floor import DecodeStepBytes


class OpTime(msgspec.Struct, frozen=True):
    """One kernel on a GPU, or one operator on a CPU: calls and microseconds of one step, on average.

    A kernel that serves two parts of the model stands there twice.
    """

    name: str
    part: ModelPart
    calls: float
    us: float


class GapTime(msgspec.Struct, frozen=True):
    """The device's idle time between two kernels that follow each other, of one step on average."""

    after: str
    before: str
    count: float
    us: float


class PartTime(msgspec.Struct, frozen=True):
    """A part's kernels, of one step on average, and what its bytes take at the least; None: a thousandth."""

    part: ModelPart
    us: float
    floor_us: float | None


class DecodeProfile(msgspec.Struct, frozen=True):
    """Averages over `steps` decode steps of `rows` requests that name `adapters` distinct adapters.

    `step_us` was measured before the profiler ran, from one launch to the next; `busy_us` and `gap_us` are
    the device's time with and without a kernel under the profiler, which slows the host, not the device. On
    a CPU `busy_us` is all operators' own time, and there are no gaps. Kernels of two streams overlap: their
    times may add up to more than `busy_us`.
    """

    device: str
    steps: int
    rows: int
    adapters: int
    step_us: float
    busy_us: float
    gap_us: float
    ops: tuple[OpTime, ...]
    gaps: tuple[GapTime, ...] = ()

    def beside(self, floor: DecodeStepBytes) -> tuple[PartTime, ...]:
        """Every part by its time; one that no kernel was seen of, but that has bytes to read, at the end."""
        times: dict[ModelPart, float] = {}
        for op in self.ops:
            times[op.part] = times.get(op.part, 0.0) + op.us
        floors = {part: 1e6 * seconds for part, seconds in floor.by_part().items() if seconds}
        for part in floors:
            times.setdefault(part, 0.0)
        return tuple(
            PartTime(part, us, floors.get(part))
            for part, us in sorted(times.items(), key=lambda item: -item[1])
        )


class ProfiledPoint(msgspec.Struct, frozen=True):
    """One load's profile beside its floor, in bytes and by the parts."""

    concurrency: int
    adapters: int
    floor: DecodeStepBytes
    parts: tuple[PartTime, ...]
    profile: DecodeProfile

    @classmethod
    def of(
        cls, concurrency: int, adapters: int, floor: DecodeStepBytes, profile: DecodeProfile
    ) -> "ProfiledPoint":
        """With its parts."""
        return cls(concurrency, adapters, floor, profile.beside(floor), profile)


def parts_in_order(names: Sequence[str]) -> list[ModelPart]:
    """Each kernel's part, of kernels in the order in which they ran.

    The lm_head's product goes by the same kernels as the projections: it is what stands between the last norm
    and the sampling.
    """
    parts = [part_of(name) for name in names]
    products: list[int] = []
    for index, part in enumerate(parts):
        if part is ModelPart.NORMS:
            products.clear()
        elif part is ModelPart.PROJECTIONS:
            products.append(index)
        elif part is ModelPart.SAMPLING:
            for product in products:
                parts[product] = ModelPart.LM_HEAD
            products.clear()
    return parts
