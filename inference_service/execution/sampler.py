"""From logits to tokens and log-probabilities of requests."""

from collections.abc import Sequence

import numpy as np
import torch

from inference_service.domain.request import TokenLogprobs
from inference_service.domain.sampling import SamplingParams
from inference_service.execution.device_copy import to_device
from inference_service.execution.logit_changes import LogitChanges
from inference_service.execution.request_table import RequestState, RequestTable
from lorikeet_kernels.logprobs import token_logprobs
from lorikeet_kernels.sampling import SamplingBatch, sample


def sampling_batch(
    params: Sequence[SamplingParams], positions: Sequence[int], device: torch.device
) -> SamplingBatch:
    """The rows' parameters as tensors. `positions` index the tokens to be sampled in their sequences."""

    def tensor(values: list[float] | list[int], dtype: torch.dtype) -> torch.Tensor:
        return to_device(torch.tensor(values, dtype=dtype), device)

    return SamplingBatch(
        temperature=tensor([p.temperature for p in params], torch.float32),
        top_k=tensor([p.top_k for p in params], torch.int64),
        top_p=tensor([p.top_p for p in params], torch.float32),
        # Seeds are any 64 bits; int64 is what torch computes with.
        seed=to_device(
            torch.from_numpy(np.array([p.seed & (2**64 - 1) for p in params], np.uint64).view(np.int64)),
            device,
        ),
        position=tensor(list(positions), torch.int64),
        all_greedy=all(p.temperature == 0 for p in params),
        any_cut=any(p.temperature > 0 and (p.top_k > 0 or p.top_p < 1) for p in params),
        any_top_k=any(p.temperature > 0 and p.top_k > 0 for p in params),
        any_top_p=any(p.temperature > 0 and p.top_p < 1 for p in params),
        min_p=tensor([p.min_p for p in params], torch.float32)
        if any(p.temperature > 0 and p.min_p > 0 for p in params)
        else None,
    )


class TokenSampler:
    """Samples the table's requests. One caller: the model runner."""

    def __init__(self, table: RequestTable) -> None:
        self._changes = LogitChanges(table)

    def sample(
        self, logits: torch.Tensor, states: Sequence[RequestState]
    ) -> tuple[list[int], list[TokenLogprobs | None]]:
        """One token for each row of `logits` [N, V], and its log-probabilities where the request wants them.

        Log-probabilities are of `logits` as given: the model's own, before biases, masks, penalties,
        temperature and cuts. Rows that are not finite get NO_TOKEN.
        """
        params = [state.sampling for state in states]
        positions = [state.num_tokens for state in states]
        scores = self._changes.apply(logits, states)
        chosen = sample(scores, sampling_batch(params, positions, logits.device))
        self._changes.count(chosen, states)
        wanted = [p.logprobs for p in params]
        logprobs: list[TokenLogprobs | None] = [None] * len(params)
        rows = [row for row, count in enumerate(wanted) if count is not None]
        if rows:
            index = to_device(torch.tensor(rows), logits.device)
            counts = [wanted[row] or 0 for row in rows]
            found = logprobs_of(logits[index], chosen[index].clamp(min=0), counts)
            for row, value in zip(rows, found, strict=True):
                logprobs[row] = value
        return chosen.tolist(), logprobs


def logprobs_of(logits: torch.Tensor, token_ids: torch.Tensor, counts: Sequence[int]) -> list[TokenLogprobs]:
    """Log-probabilities of `token_ids` [N] and of the counts[i] most likely tokens of each row."""
    num_top = min(max(counts), logits.shape[-1])
    chosen, top_ids, top_logprobs = token_logprobs(logits, token_ids, num_top)
    # Arrays to the end: numbers of whole vocabularies, made Python objects, would stop the engine.
    ids, values = top_ids.to(torch.int32).cpu().numpy(), top_logprobs.cpu().numpy()
    return [
        TokenLogprobs(logprob, ids[row, :count].tobytes(), values[row, :count].tobytes())
        for row, (logprob, count) in enumerate(zip(chosen.tolist(), counts, strict=True))
    ]
