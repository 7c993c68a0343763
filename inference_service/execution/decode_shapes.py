"""The fixed shapes that decode steps are brought to, so that each can be one captured graph."""

from collections.abc import Sequence
from dataclasses import dataclass

from inference_service.execution.step_buffers import StepShape

# Tokens of the longest sequence up to which a graph's block tables reach. Two lengths: the narrow one keeps a
# step's copy small (64 requests: 64 KiB instead of 2 MiB at 131,072 tokens) and splits the keys of few
# requests into fewer parts; each further one would add as many graphs again.
SHORT_CONTEXT_TOKENS = 4096


def default_sizes(max_requests: int) -> tuple[int, ...]:
    """1, 2, 4, then multiples of 8 to 64, of 16 to 128, of 32 beyond; and `max_requests` itself."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 129, 16), *range(160, max_requests + 1, 32)]
    return (*(size for size in sizes if size < max_requests), max_requests)


@dataclass(frozen=True, slots=True)
class DecodeShapes:
    """Batch sizes and context lengths, both ascending. Without sizes no step has a fixed shape."""

    sizes: tuple[int, ...]
    contexts: tuple[int, ...]
    block_tokens: int

    @classmethod
    def of(
        cls, sizes: Sequence[int], *, max_requests: int, max_context_tokens: int, block_tokens: int
    ) -> "DecodeShapes":
        """Sizes beyond `max_requests` never come and are left out."""
        contexts = {min(SHORT_CONTEXT_TOKENS, max_context_tokens), max_context_tokens}
        kept = sorted({size for size in sizes if size <= max_requests})
        return cls(tuple(kept), tuple(sorted(contexts)), block_tokens)

    def pick(self, num_requests: int, longest: int) -> StepShape | None:
        """The smallest shape that holds so many requests, the longest of so many tokens; None: none does."""
        size = next((size for size in self.sizes if size >= num_requests), None)
        context = next((context for context in self.contexts if context >= longest), None)
        return None if size is None or context is None else self._shape(size, context)

    def all(self) -> list[StepShape]:
        """Every shape, the largest first: what the later ones need then fits the memory of the first."""
        return [self._shape(s, c) for s in reversed(self.sizes) for c in reversed(self.contexts)]

    def _shape(self, size: int, context: int) -> StepShape:
        index = self.sizes.index(size)
        # Where the next smaller size is one less, no batch of this size has a row to fill up.
        is_full = size == 1 if index == 0 else self.sizes[index - 1] == size - 1
        return StepShape(size, size, -(-context // self.block_tokens), size, pads=not is_full)
