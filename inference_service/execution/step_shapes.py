"""The fixed shapes that steps are brought to, so that each can be one captured graph."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from inference_service.execution.config import BackendConfig
from inference_service.execution.step_buffers import StepShape

# Tokens of the longest sequence up to which a graph's block tables reach. Two lengths: the narrow one keeps a
# step's copy small (64 requests: 64 KiB instead of 2 MiB at 131,072 tokens) and splits the keys of few
# requests into fewer parts; each further one would add as many graphs again.
SHORT_CONTEXT_TOKENS = 4096
# Beyond, the device needs longer for a step than the host for its launches.
_MOST_TOKENS = 4096


def default_sizes(max_requests: int) -> tuple[int, ...]:
    """1, 2, 4, then multiples of 8 to 64, of 16 to 128, of 32 beyond; and `max_requests` itself."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 129, 16), *range(160, max_requests + 1, 32)]
    return (*(size for size in sizes if size < max_requests), max_requests)


def default_token_counts(max_step_tokens: int) -> tuple[int, ...]:
    """Multiples of 64 to 512, of 128 to 2,048, of 256 to 4,096, and `max_step_tokens` if it is less.

    Rows that fill a step up cost what rows cost: a quarter at most from 256 on, an eighth from 1,024.
    """
    most = min(max_step_tokens, _MOST_TOKENS)
    counts = [*range(64, 513, 64), *range(640, 2049, 128), *range(2304, _MOST_TOKENS + 1, 256)]
    return (*(count for count in counts if count < most), most)


def graph_sizes(config: BackendConfig, device: torch.device) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Requests of decode steps and tokens of others that are worth a fixed shape, as configured.

    On a CPU, which captures nothing, only what was asked for.
    """
    sizes, counts = config.graph_batch_sizes, config.graph_token_counts
    if device.type == "cpu":
        return sizes or (), counts or ()
    if not config.cuda_graphs:
        return (), ()
    return (
        default_sizes(config.max_running_requests) if sizes is None else sizes,
        default_token_counts(config.max_step_tokens) if counts is None else counts,
    )


@dataclass(frozen=True, slots=True)
class StepShapes:
    """Of decode steps by their requests, of steps with prompts by their tokens; all numbers ascend.

    A step with prompts has room for `max_requests`, and more tokens than that: a batch of as many rows as
    requests is one of decodes to attention. Without sizes and counts no step has a fixed shape.
    """

    sizes: tuple[int, ...]
    token_counts: tuple[int, ...]
    contexts: tuple[int, ...]
    max_requests: int
    block_tokens: int

    @classmethod
    def of(
        cls,
        sizes: Sequence[int],
        token_counts: Sequence[int] = (),
        *,
        max_requests: int,
        max_step_tokens: int,
        max_context_tokens: int,
        block_tokens: int,
    ) -> "StepShapes":
        """Sizes and counts that never come are left out."""
        return cls(
            tuple(sorted({size for size in sizes if size <= max_requests})),
            tuple(sorted({count for count in token_counts if max_requests < count <= max_step_tokens})),
            tuple(sorted({min(SHORT_CONTEXT_TOKENS, max_context_tokens), max_context_tokens})),
            max_requests,
            block_tokens,
        )

    def pick(self, num_requests: int, longest: int) -> StepShape | None:
        """The smallest that holds so many decodes, the longest of so many tokens; None: none does."""
        size = next((size for size in self.sizes if size >= num_requests), None)
        context = next((context for context in self.contexts if context >= longest), None)
        return None if size is None or context is None else self._decode(size, context)

    def pick_mixed(self, num_tokens: int, longest: int) -> StepShape | None:
        """The same for a step of so many tokens with prompts among them; nothing is sampled in it yet."""
        for context in self.contexts:
            if context >= longest:
                count = next((c for c in self._counts(context) if c >= num_tokens), None)
                return None if count is None else self._mixed(count, context)
        return None

    def all(self) -> list[StepShape]:
        """Every shape, the largest first: what the later ones need then fits the memory of the first."""
        contexts = tuple(reversed(self.contexts))
        mixed = [
            self._mixed(count, context)
            for count in reversed(self.token_counts)
            for context in contexts
            if count in self._counts(context)
        ]
        return mixed + [self._decode(size, context) for size in reversed(self.sizes) for context in contexts]

    def _counts(self, context: int) -> tuple[int, ...]:
        """Beside a shorter context few: a chunk of a long prompt has mostly as many tokens as a step may."""
        if context == self.contexts[0]:
            return self.token_counts
        return tuple(c for c in self.token_counts if c & (c - 1) == 0 or c == self.token_counts[-1])

    def _decode(self, size: int, context: int) -> StepShape:
        index = self.sizes.index(size)
        # Where the next smaller size is one less, no batch of this size has a row to fill up.
        is_full = size == 1 if index == 0 else self.sizes[index - 1] == size - 1
        return StepShape(size, size, -(-context // self.block_tokens), size, pads=not is_full)

    def _mixed(self, count: int, context: int) -> StepShape:
        return StepShape(count, self.max_requests, -(-context // self.block_tokens), 0, pads=True)
