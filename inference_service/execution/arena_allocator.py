"""Which bytes of the arena are taken. Pure arithmetic; best fit, neighbours merged on release."""

from bisect import bisect_left, insort
from collections.abc import Iterable


class ArenaAllocator:
    """Hands out ranges of [0, total_bytes). The layout makes all sizes multiples of the alignment."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.used_bytes = 0
        self._free: list[tuple[int, int]] = [(0, total_bytes)] if total_bytes else []  # (begin, end), sorted

    def allocate(self, num_bytes: int) -> int | None:
        """The start of a range of `num_bytes` in the smallest gap that holds it; None: no gap does."""
        if num_bytes == 0:
            return 0
        fitting = [(end - begin, begin, end) for begin, end in self._free if end - begin >= num_bytes]
        if not fitting:
            return None
        _, begin, end = min(fitting)
        self._free.remove((begin, end))
        if end - begin > num_bytes:
            insort(self._free, (begin + num_bytes, end))
        self.used_bytes += num_bytes
        return begin

    def replace(self, taken: Iterable[tuple[int, int]]) -> None:
        """Forget all ranges; these (begin, num_bytes) are taken instead. They must not overlap."""
        free: list[tuple[int, int]] = []
        end_of_last = used = 0
        for begin, num_bytes in sorted(taken):
            if begin > end_of_last:
                free.append((end_of_last, begin))
            end_of_last = begin + num_bytes
            used += num_bytes
        if end_of_last < self.total_bytes:
            free.append((end_of_last, self.total_bytes))
        self._free, self.used_bytes = free, used

    def release(self, begin: int, num_bytes: int) -> None:
        """Give back exactly what `allocate` returned for `num_bytes`."""
        if num_bytes == 0:
            return
        end = begin + num_bytes
        index = bisect_left(self._free, (begin, end))
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index > 0 and self._free[index - 1][1] == begin:
            begin = self._free.pop(index - 1)[0]
        insort(self._free, (begin, end))
        self.used_bytes -= num_bytes
