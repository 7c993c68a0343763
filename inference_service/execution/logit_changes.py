"""What requests ask to be done to their logits before they are sampled: masks, biases, penalties.

Masks and biases are short lists that the host knows, copied in each step. Penalties need every token so far:
a row of counts for each place in the request table, on the device, which a request's first sampling fills and
each sampled token changes there. The counts are made when the first request with penalties comes.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from inference_service.execution.device_copy import to_device
from inference_service.execution.request_table import RequestState, RequestTable
from inference_service.execution.token_masks import TokenMasks
from lorikeet_kernels.sampling.penalties import IN_OUTPUT, IN_PROMPT, Penalties, penalize
from lorikeet_kernels.sampling.token_bitmask import token_bitmask

_MASK = float("-inf")


class LogitChanges:
    """Owns the counts. One caller: the sampler."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._counts: torch.Tensor | None = None
        self._masks = TokenMasks(table, self._masked)

    def apply(self, logits: torch.Tensor, states: Sequence[RequestState]) -> torch.Tensor:
        """The logits to sample from: `logits` themselves where no request changes any, else float32 of them.

        `logits` stay as they are.
        """
        changed = [row for row, state in enumerate(states) if state.changes_logits]
        if not changed:
            return logits
        # First, since a complete answer ends whatever min_tokens says.
        masks = self._masks.compute(states, logits)
        scores = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        self._add_biases(scores, states, changed)
        penalised = [row for row in changed if states[row].sampling.has_penalties]
        if penalised:
            counts = self._filled_counts(logits, [states[row] for row in penalised])
            penalize(scores, _penalties(counts, penalised, states))
        if masks is not None:
            token_bitmask(scores, *masks)
        return scores

    def count(self, chosen: torch.Tensor, states: Sequence[RequestState]) -> None:
        """Add the sampled tokens [N], on the device, to what later penalties are taken from."""
        rows = [row for row, state in enumerate(states) if state.is_counted]
        if not rows or self._counts is None:
            return
        index = _tensor([(row, states[row].row) for row in rows], torch.int64, chosen.device)
        # A row without a token ends its request: what is counted for it then does not matter.
        places = index[:, 1] * self._counts.shape[1] + chosen[index[:, 0]].clamp(min=0)
        added = torch.full_like(places, IN_OUTPUT, dtype=torch.int32)
        self._counts.view(-1).scatter_add_(0, places, added)

    def _add_biases(
        self, scores: torch.Tensor, states: Sequence[RequestState], changed: Sequence[int]
    ) -> None:
        places: list[NDArray[np.int64]] = []
        values: list[NDArray[np.float32]] = []
        for row in changed:
            masked = np.array(self._masked(states[row]), np.int64)
            token_ids, biases = states[row].bias
            places += [masked + row * scores.shape[1], token_ids + row * scores.shape[1]]
            values += [np.full(len(masked), _MASK, np.float32), biases]
        index, added = np.concatenate(places), np.concatenate(values)
        if len(index):
            # A token may be masked twice and have a bias: in any order that adds up to minus infinity.
            device = scores.device
            scores.view(-1).scatter_add_(
                0, to_device(torch.from_numpy(index), device), to_device(torch.from_numpy(added), device)
            )

    def _masked(self, state: RequestState) -> list[int]:
        """Tokens that may not come next."""
        sampling, num_output = state.sampling, state.num_output_tokens
        is_held = num_output < sampling.min_tokens and not state.is_complete
        masked = list(sampling.held_back_token_ids) if is_held else []
        if sampling.bad_words:
            longest = min(num_output, max(map(len, sampling.bad_words)) - 1)
            tokens = self._table.tokens[state.row, state.num_tokens - longest : state.num_tokens].tolist()
            for word in sampling.bad_words:
                begin = longest - (len(word) - 1)
                if begin >= 0 and tuple(tokens[begin:]) == word[:-1]:
                    masked.append(word[-1])
        return masked

    def _filled_counts(self, logits: torch.Tensor, states: Sequence[RequestState]) -> torch.Tensor:
        """The counts, in which all tokens of `states` are."""
        if self._counts is None:
            shape = (self._table.tokens.shape[0], logits.shape[1])
            self._counts = torch.zeros(shape, dtype=torch.int32, device=logits.device)
        for state in states:
            if state.is_counted:
                continue
            row = self._counts[state.row]
            tokens = torch.from_numpy(self._table.tokens[state.row, : state.num_tokens].copy())
            tokens = to_device(tokens, logits.device)
            prompt, output = tokens[: state.num_prompt_tokens], tokens[state.num_prompt_tokens :]
            row.zero_().index_fill_(0, prompt, IN_PROMPT)
            row.scatter_add_(0, output, torch.full_like(output, IN_OUTPUT, dtype=torch.int32))
            state.is_counted = True
        return self._counts


def _penalties(counts: torch.Tensor, rows: Sequence[int], states: Sequence[RequestState]) -> Penalties:
    params, device = [states[row].sampling for row in rows], counts.device
    # A tensor each: kernels are compiled for where a tensor begins, and a column may begin anywhere.
    return Penalties(
        counts,
        rows=_tensor(rows, torch.int64, device),
        slots=_tensor([states[row].row for row in rows], torch.int64, device),
        repetition=_tensor([p.repetition_penalty for p in params], torch.float32, device),
        frequency=_tensor([p.frequency_penalty for p in params], torch.float32, device),
        presence=_tensor([p.presence_penalty for p in params], torch.float32, device),
    )


def _tensor(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    numbers = np.array(values, np.int64 if dtype == torch.int64 else np.float32)
    return to_device(torch.from_numpy(numbers), device)
