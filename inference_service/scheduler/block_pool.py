"""The key-value blocks: who uses each, which are free, and which keep a prefix for later.

A block is in exactly one state: in use (one reference or more), cached (none, but it holds a published
prefix) or free. Cached blocks are given away oldest first once no free one is left.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence


class BlockPool:
    """Owner of all blocks of one engine. Every `allocate` and `retain` is matched by one `release`."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._free = deque(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could give: free, or holding only prefixes that nobody uses."""
        return len(self._free) + len(self._cached)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, or None and no change if there are fewer."""
        if count > self.num_available:
            return None
        return [self._take() for _ in range(count)]

    def retain(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each block, which may be cached."""
        for block_id in block_ids:
            if self._references[block_id] == 0:
                del self._cached[block_id]
            self._references[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Take a reference from each block of one sequence; its later blocks will be given away first."""
        for block_id in reversed(block_ids):
            assert self._references[block_id] > 0, block_id
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                if block_id in self._key_of:
                    self._cached[block_id] = None
                else:
                    self._free.append(block_id)

    def publish(self, block_id: int, key: bytes) -> None:
        """Make a full, computed block findable. If another block has the key already, nothing changes."""
        if key not in self._block_of and block_id not in self._key_of:
            self._key_of[block_id] = key
            self._block_of[key] = block_id

    def find(self, key: bytes) -> int | None:
        """The block published under a key; it stays valid until the next `allocate` unless retained."""
        return self._block_of.get(key)

    def num_unused(self, block_ids: Iterable[int]) -> int:
        """How many of the blocks count as available now, that is, would be taken by `retain`."""
        return sum(1 for block_id in block_ids if self._references[block_id] == 0)

    def _take(self) -> int:
        if self._free:
            block_id = self._free.popleft()
        else:
            block_id, _ = self._cached.popitem(last=False)
            del self._block_of[self._key_of.pop(block_id)]
        self._references[block_id] = 1
        return block_id
