"""Masks of requests with structured output: which tokens may come next.

Matchers follow the output on the host. Their masks are computed here at the latest moment, while a device
runs the forward pass, all at once on llguidance's threads, into one pinned array that is copied once.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from inference_service.domain.structured_output import TokenMatcher
from inference_service.execution.request_table import RequestState, RequestTable
from lorikeet_kernels.sampling.token_bitmask import num_mask_words

_ALL = np.int32(-1)
_NOTHING_LEFT = (
    "sampling.structured_output allows tokens here, but bad_words or min_tokens mask them all: change those"
)
_NO_TOKEN = "the grammar allows no token of the vocabulary here, and the answer is not complete"  # noqa: S105


class TokenMasks:
    """One caller: the sampler."""

    def __init__(self, table: RequestTable, masked: Callable[[RequestState], Sequence[int]]) -> None:
        """`masked` says which tokens a request's other parameters mask in this step."""
        self._table = table
        self._masked = masked

    def compute(
        self, states: Sequence[RequestState], logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Masks and the rows of `logits` [B, V] that they are for, on its device: see token_bitmask.

        None where no request has structured output. A request that cannot go on gets its `failure`, and a
        mask that masks nothing: whatever is sampled for it is not used.
        """
        rows = [row for row, state in enumerate(states) if state.matcher is not None and not state.failure]
        if not rows:
            return None
        device = logits.device
        shape = (len(rows), num_mask_words(logits.shape[1]))
        masks = torch.empty(shape, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._fill([states[row] for row in rows], masks.numpy())
        index = torch.tensor(rows, pin_memory=device.type == "cuda")
        return masks.to(device, non_blocking=True), index.to(device, non_blocking=True)

    def _fill(self, states: Sequence[RequestState], masks: NDArray[np.int32]) -> None:
        matchers = [self._advanced(state) for state in states]
        matchers[0].fill_masks(matchers, masks)
        for state, matcher, mask in zip(states, matchers, masks, strict=True):
            if error := matcher.error():
                state.failure = f"the grammar became too complex: {error}"
            elif not mask.any():
                state.failure = _NO_TOKEN
            else:
                self._narrow(state, mask)
            if state.failure:
                mask.fill(_ALL)

    def _advanced(self, state: RequestState) -> TokenMatcher:
        matcher = state.matcher
        assert matcher is not None
        # After a preemption it goes on where it was: followed anew, without masks on the way, it would have
        # come to its limits elsewhere. It has seen no token but those that the scheduler knew.
        num_matched = state.num_prompt_tokens + matcher.num_tokens
        assert num_matched <= state.num_tokens, (num_matched, state.num_tokens)
        matcher.advance(self._table.tokens[state.row, num_matched : state.num_tokens].tolist())
        return matcher

    def _narrow(self, state: RequestState, mask: NDArray[np.int32]) -> None:
        """Take out what other parameters mask: a row without any token is to be known before it is drawn."""
        output, matcher = state.sampling.structured_output, state.matcher
        assert output is not None
        assert matcher is not None
        state.is_complete = False
        if output.ends_late or state.num_output_tokens < state.sampling.min_tokens:
            rest = mask.copy()
            _clear(rest, matcher.end_token_ids)
            # Nothing but the end may come: it does, whatever min_tokens and ignore_eos say.
            state.is_complete = not rest.any()
            if not state.is_complete:
                mask[:] = rest
        if masked := self._masked(state):
            _clear(mask, masked)
            if not mask.any():
                state.failure = _NOTHING_LEFT


def _clear(mask: NDArray[np.int32], token_ids: Sequence[int]) -> None:
    bits = mask.view(np.uint32)
    for token_id in token_ids:
        bits[token_id >> 5] &= np.uint32(~(1 << (token_id & 31)) & 0xFFFFFFFF)
