"""What the runner keeps of each request between steps: tokens, block table, slot, sampling parameters."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inference_service.domain.sampling import SamplingParams
from inference_service.domain.step import NewRequest, ScheduledRequest

_NO_BIAS = (np.empty(0, np.int64), np.empty(0, np.float32))


@dataclass(slots=True)
class RequestState:
    """One request. `row` is its row in the table's arrays."""

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

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far, also before a preemption."""
        return self.num_tokens - self.num_prompt_tokens


class RequestTable:
    """Rows of token ids and block ids, so that a batch is gathered by array indexing.

    The scheduler bounds running requests and their length; exceeding either here is a bug of ours.
    """

    def __init__(self, max_requests: int, max_context_tokens: int, block_tokens: int) -> None:
        # One token more than the context: the last sampled one is recorded though never computed.
        self.tokens = np.zeros((max_requests, max_context_tokens + 1), np.int64)
        self.blocks = np.zeros((max_requests, -(-max_context_tokens // block_tokens)), np.int32)
        self._free = list(range(max_requests - 1, -1, -1))
        self._states: dict[str, RequestState] = {}

    def __len__(self) -> int:
        return len(self._states)

    def add(self, new: NewRequest) -> None:
        """Take a request in; the id must be free."""
        assert new.request_id not in self._states, f"request {new.request_id} is running already"
        row = self._free.pop()
        self.tokens[row, : len(new.token_ids)] = new.token_ids
        self.blocks[row, : len(new.block_ids)] = new.block_ids
        self._states[new.request_id] = RequestState(
            row, new.slot, new.sampling, new.num_prompt_tokens, len(new.token_ids), len(new.block_ids),
            changes_logits=new.sampling.changes_logits, bias=_bias(new.sampling),
        )  # fmt: skip

    def remove(self, request_id: str) -> None:
        """Forget a request; unknown ids are fine (it may have ended before it was ever scheduled)."""
        state = self._states.pop(request_id, None)
        if state is not None:
            self._free.append(state.row)

    def schedule(self, scheduled: ScheduledRequest) -> RequestState:
        """The state of a request in this step, its block table extended."""
        state = self._states[scheduled.request_id]
        if scheduled.new_block_ids:
            end = state.num_blocks + len(scheduled.new_block_ids)
            self.blocks[state.row, state.num_blocks : end] = scheduled.new_block_ids
            state.num_blocks = end
        return state

    def append(self, state: RequestState, token_id: int) -> None:
        """Record a sampled token."""
        self.tokens[state.row, state.num_tokens] = token_id
        state.num_tokens += 1


def _bias(sampling: SamplingParams) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Token ids and what their logits get."""
    if not sampling.logit_bias:
        return _NO_BIAS
    token_ids, values = zip(*sampling.logit_bias, strict=True)
    return np.array(token_ids, np.int64), np.array(values, np.float32)
