"""Keys by which full blocks are found again: a sha256 chain over (adapter digest or base) and the tokens.

Keys and values depend on the weights that made them, so the chain starts from the revision's digest, which
names its content: a replaced adapter has another one. Sha256 rather than a fast hash, because a collision
would hand one tenant's values to another.
"""

import copy
import hashlib
import struct
from collections.abc import Sequence

from inference_service.scheduler.block_pool import BlockPool


class BlockKeys:
    """The chain of one request's keys, grown block by block as its tokens become known.

    Args:
        digest: the revision's; None for the base model.
        block_tokens: tokens of a block.
        owner: a number that only those who may share these blocks have; None shares them with all.
    """

    def __init__(self, digest: str | None, block_tokens: int, owner: int | None = None) -> None:
        self._block_tokens = block_tokens
        self._pack = struct.Struct(f"<{block_tokens}q").pack
        # Base and adapters have seeds of different length, so neither can imitate the other.
        seed = b"base" if digest is None else b"adapter:" + digest.encode()
        if owner is not None:
            seed = b"owner:%d:" % owner + seed
        self._last = hashlib.sha256(seed).digest()
        self._keys: list[bytes] = []

    def fork(self) -> "BlockKeys":
        """The same keys so far, to be grown by another request with the same tokens so far."""
        twin = copy.copy(self)
        twin._keys = list(self._keys)  # noqa: SLF001 (its own class)
        return twin

    def upto(self, token_ids: Sequence[int], num_blocks: int) -> list[bytes]:
        """The keys of the first `num_blocks` blocks. Tokens given in earlier calls must be the same."""
        size = self._block_tokens
        for index in range(len(self._keys), num_blocks):
            block = self._pack(*token_ids[index * size : (index + 1) * size])
            self._last = hashlib.sha256(self._last + block).digest()
            self._keys.append(self._last)
        return self._keys[:num_blocks]


def find_prefix(pool: BlockPool, keys: Sequence[bytes]) -> list[int]:
    """The longest run of published blocks from the start; not retained."""
    found: list[int] = []
    for key in keys:
        block_id = pool.find(key)
        if block_id is None:
            break
        found.append(block_id)
    return found
