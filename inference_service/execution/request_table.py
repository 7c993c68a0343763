"""What the runner keeps of each request between steps: tokens, block table, slot, sampling parameters."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inference_service.domain.sampling import SamplingParams
from inference_service.domain.step import NewRequest, ScheduledRequest
from inference_service.domain.structured_output import TokenMatcher

Places = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Rows of the table and positions in their sequences, [N] each."""

_NO_BIAS = (np.empty(0, np.int64), np.empty(0, np.float32))


@dataclass(slots=True)
class RequestState:
    """One request. `row` is its row in the table's arrays.

    `num_tokens` counts tokens that the device has sampled, or is about to, though the host may not know them.
    """

    row: int
    slot: int
    sampling: SamplingParams
    num_prompt_tokens: int
    num_tokens: int
    num_blocks: int
    # Whether the sampler has to change this request's logits, and whether its tokens are in the counts then.
    changes_logits: bool = False
    is_counted: bool = False
    bias: tuple[NDArray[np.int64], NDArray[np.float32]] = _NO_BIAS
    waits_for_tokens: bool = False
    is_gone: bool = False
    # Structured output: the request's own matcher, which outlives a preemption; see token_masks.
    matcher: TokenMatcher | None = None
    is_complete: bool = False
    failure: str = ""

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far, also before a preemption."""
        return self.num_tokens - self.num_prompt_tokens


class RequestTable:
    """Rows of token ids, block ids and parameters, so that a batch is gathered by array indexing.

    A sampled token's place in `tokens` holds -1 - row until the host knows it: the device keeps each row's
    last token and reads it from there (lorikeet_kernels.sampling.pending_tokens).

    The scheduler bounds running requests and their length; exceeding either here is a bug of ours.
    """

    def __init__(self, max_requests: int, max_context_tokens: int, block_tokens: int) -> None:
        # One token more than the context: the last sampled one is recorded though never computed.
        self.tokens = np.zeros((max_requests, max_context_tokens + 1), np.int64)
        self.blocks = np.zeros((max_requests, -(-max_context_tokens // block_tokens)), np.int32)
        self.slot = np.zeros(max_requests, np.int32)
        self.temperature = np.zeros(max_requests, np.float32)
        self.top_p = np.zeros(max_requests, np.float32)
        self.min_p = np.zeros(max_requests, np.float32)
        self.top_k = np.zeros(max_requests, np.int64)
        self.seed = np.zeros(max_requests, np.int64)
        self._free = list(range(max_requests - 1, -1, -1))
        self._states: dict[str, RequestState] = {}

    def __len__(self) -> int:
        return len(self._states)

    @property
    def max_requests(self) -> int:
        """Rows of the arrays."""
        return len(self.slot)

    def add(self, new: NewRequest) -> None:
        """Take a request in; the id must be free."""
        assert new.request_id not in self._states, f"request {new.request_id} is running already"
        row, sampling = self._free.pop(), new.sampling
        self.tokens[row, : len(new.token_ids)] = new.token_ids
        self.blocks[row, : len(new.block_ids)] = new.block_ids
        self.slot[row] = new.slot
        self.temperature[row] = sampling.temperature
        self.top_p[row] = sampling.top_p
        self.min_p[row] = sampling.min_p
        self.top_k[row] = sampling.top_k
        self.seed[row] = signed_seed(sampling.seed)
        self._states[new.request_id] = RequestState(
            row, new.slot, sampling, new.num_prompt_tokens, len(new.token_ids), len(new.block_ids),
            changes_logits=sampling.changes_logits, bias=_bias(sampling),
            waits_for_tokens=sampling.waits_for_tokens,
            matcher=_matcher(sampling),
        )  # fmt: skip

    def remove(self, request_id: str) -> None:
        """Forget a request; unknown ids are fine (it may have ended before it was ever scheduled)."""
        state = self._states.pop(request_id, None)
        if state is not None:
            state.is_gone = True
            self._free.append(state.row)

    def schedule(self, scheduled: Sequence[ScheduledRequest]) -> list[RequestState]:
        """The states of a step's requests, their block tables extended."""
        states = [self._states[share.request_id] for share in scheduled]
        for state, share in zip(states, scheduled, strict=True):
            if share.new_block_ids:
                end = state.num_blocks + len(share.new_block_ids)
                self.blocks[state.row, state.num_blocks : end] = share.new_block_ids
                state.num_blocks = end
        return states

    def expect(self, states: Sequence[RequestState], places: Places) -> None:
        """The device is about to sample these requests' next tokens."""
        rows, positions = places
        self.tokens[rows, positions] = -1 - rows
        for state in states:
            state.num_tokens += 1

    def append(self, state: RequestState, token_id: int) -> None:
        """Record a sampled token that the host knows at once."""
        self.tokens[state.row, state.num_tokens] = token_id
        state.num_tokens += 1

    def learn(self, states: Sequence[RequestState], places: Places, token_ids: NDArray[np.int64]) -> None:
        """Record expected tokens; not those of requests that are gone, whose rows may be others' by now."""
        rows, positions = places
        gone = [state.is_gone for state in states]
        if any(gone):
            stays = ~np.array(gone)
            rows, positions, token_ids = rows[stays], positions[stays], token_ids[stays]
        self.tokens[rows, positions] = token_ids


def signed_seed(seed: int) -> int:
    """A seed's 64 bits, whatever its sign, as the int64 that torch computes with."""
    return ((seed + (1 << 63)) & ((1 << 64) - 1)) - (1 << 63)


def _matcher(sampling: SamplingParams) -> TokenMatcher | None:
    if (output := sampling.structured_output) is None:
        return None
    assert output.matcher is not None, "the engine compiles a grammar before its request is scheduled"
    return output.matcher


def _bias(sampling: SamplingParams) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Token ids and what their logits get."""
    if not sampling.logit_bias:
        return _NO_BIAS
    token_ids, values = zip(*sampling.logit_bias, strict=True)
    return np.array(token_ids, np.int64), np.array(values, np.float32)
