"""Blocks for requests: what a request finds cached, takes, publishes and gives back."""

from inference_service.scheduler.block_pool import BlockPool
from inference_service.scheduler.prefix_cache import find_prefix
from inference_service.scheduler.request_state import RequestState


class KvCache:
    """Gives each running request the blocks of its sequence. The pool's only user."""

    def __init__(self, num_blocks: int, block_tokens: int, *, prefix_cache: bool) -> None:
        self.pool = BlockPool(num_blocks)
        self.hit_tokens = 0
        self.query_tokens = 0
        self._block_tokens = block_tokens
        self._has_prefix_cache = prefix_cache

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self._block_tokens)

    def admit(self, state: RequestState, reserve: int) -> bool:
        """Give a waiting request the blocks of all its known tokens. False: no room, and no change.

        `reserve` blocks are left for the growth of others. At least one token is left to compute, since its
        logits are what the next token is sampled from.
        """
        cached = self._find(state)
        missing = self.blocks_for(len(state.token_ids)) - len(cached)
        if missing + self.pool.num_unused(cached) + reserve > self.pool.num_available:
            return False
        self.pool.retain(cached)
        fresh = self.pool.allocate(missing)
        assert fresh is not None
        state.block_ids = [*cached, *fresh]
        state.num_published_blocks = len(cached)
        state.num_computed_tokens = state.num_confirmed_tokens = len(cached) * self._block_tokens
        self.hit_tokens += state.num_computed_tokens
        if self._looks_up(state):
            self.query_tokens += len(state.token_ids)
        return True

    def grow(self, state: RequestState, num_tokens: int) -> tuple[int, ...] | None:
        """Make room for `num_tokens` in all; the blocks added, or None and no change if there is no room."""
        missing = self.blocks_for(num_tokens) - len(state.block_ids)
        if missing <= 0:
            return ()
        fresh = self.pool.allocate(missing)
        if fresh is None:
            return None
        state.block_ids += fresh
        return tuple(fresh)

    def publish(self, state: RequestState) -> None:
        """Let others find the blocks that are full and confirmed as computed."""
        if not self._shares(state):
            return
        num_full = min(state.num_confirmed_tokens, len(state.token_ids)) // self._block_tokens
        if num_full > state.num_published_blocks:
            keys = state.keys.upto(state.token_ids, num_full)
            for index in range(state.num_published_blocks, num_full):
                self.pool.publish(state.block_ids[index], keys[index])
            state.num_published_blocks = num_full

    def free(self, state: RequestState) -> None:
        """Take all blocks back."""
        self.pool.release(state.block_ids)
        state.block_ids = []
        state.num_published_blocks = 0
        state.num_computed_tokens = state.num_confirmed_tokens = state.num_pending_tokens = 0

    def _looks_up(self, state: RequestState) -> bool:
        return self._shares(state) and not state.wants_prompt_logprobs

    def _shares(self, state: RequestState) -> bool:
        """Without a prefix cache, too, the samples of a request share: their keys are their own then."""
        return self._has_prefix_cache or state.shared_prompt is not None

    def _find(self, state: RequestState) -> list[int]:
        if not self._looks_up(state):
            return []
        num_blocks = (len(state.token_ids) - 1) // self._block_tokens
        return find_prefix(self.pool, state.keys.upto(state.token_ids, num_blocks))
