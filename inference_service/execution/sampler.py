"""From logits to tokens and log-probabilities of requests, without waiting for either."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from inference_service.domain.request import TokenLogprobs
from inference_service.domain.sampling import SamplingParams
from inference_service.execution.device_copy import to_device, to_host
from inference_service.execution.logit_changes import LogitChanges
from inference_service.execution.request_table import RequestState, RequestTable, signed_seed
from lorikeet_kernels.sampling.logprobs import token_logprobs
from lorikeet_kernels.sampling.sampling import SamplingBatch, sample


@dataclass(frozen=True, slots=True, eq=False)
class LogprobsOnTheWay:
    """Log-probabilities of N tokens, on their way to the host; readable once the copies are done."""

    chosen: torch.Tensor  # [N] float32
    top_ids: torch.Tensor  # [N, most] int32
    top_logprobs: torch.Tensor  # [N, most] float32
    counts: Sequence[int]

    def read(self) -> list[TokenLogprobs]:
        """Of each token, with as many of the most likely ones as it counts."""
        # Arrays to the end: numbers of whole vocabularies, made Python objects, would stop the engine.
        ids, values = self.top_ids.numpy(), self.top_logprobs.numpy()
        return [
            TokenLogprobs(logprob, ids[row, :count].tobytes(), values[row, :count].tobytes())
            for row, (logprob, count) in enumerate(zip(self.chosen.tolist(), self.counts, strict=True))
        ]


@dataclass(frozen=True, slots=True, eq=False)
class SampledOnTheWay:
    """Tokens of the sampled rows, on the device and on their way to the host, and what is asked beside."""

    tokens: torch.Tensor  # [B] int64 on the device, rows that fill a batch up included
    token_ids: torch.Tensor  # the same on the host
    logprob_rows: Sequence[int]
    logprobs: LogprobsOnTheWay | None

    def read(self, count: int) -> tuple[list[int], list[TokenLogprobs | None]]:
        """Of the first `count` rows."""
        found: list[TokenLogprobs | None] = [None] * count
        if self.logprobs is not None:
            for row, entry in zip(self.logprob_rows, self.logprobs.read(), strict=True):
                found[row] = entry
        return self.token_ids[:count].tolist(), found


class TokenSampler:
    """Samples the table's requests. One caller: the model runner."""

    def __init__(self, table: RequestTable) -> None:
        self._changes = LogitChanges(table)

    def launch(
        self, logits: torch.Tensor, states: Sequence[RequestState], batch: SamplingBatch
    ) -> SampledOnTheWay:
        """One token for each row of `logits` [B, V], and its log-probabilities where the request wants them.

        `states` are those of the first rows; further ones fill the batch up. Log-probabilities are of
        `logits` as given: the model's own, before biases, masks, penalties, temperature and cuts. Rows that
        are not finite get NO_TOKEN.
        """
        scores = self._changes.apply(logits, states)
        chosen = sample(scores, batch)
        self._changes.count(chosen, states)
        rows = [row for row, state in enumerate(states) if state.sampling.logprobs is not None]
        logprobs = None
        if rows:
            index = to_device(torch.tensor(rows), logits.device)
            counts = [states[row].sampling.logprobs or 0 for row in rows]
            logprobs = launch_logprobs(logits[index], chosen[index].clamp(min=0), counts)
        return SampledOnTheWay(chosen, to_host(chosen), rows, logprobs)

    def sample(
        self, logits: torch.Tensor, states: Sequence[RequestState]
    ) -> tuple[list[int], list[TokenLogprobs | None]]:
        """As `launch`, for requests that are no batch of the builder's; waits for the tokens."""
        params = [state.sampling for state in states]
        batch = sampling_batch(params, [state.num_tokens for state in states], logits.device)
        sampled = self.launch(logits, states, batch)
        if logits.is_cuda:
            torch.cuda.current_stream(logits.device).synchronize()
        return sampled.read(len(states))


def launch_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, counts: Sequence[int]) -> LogprobsOnTheWay:
    """Log-probabilities of `token_ids` [N] and of the counts[i] most likely tokens of each row."""
    num_top = min(max(counts), logits.shape[-1])
    chosen, top_ids, top_logprobs = token_logprobs(logits, token_ids, num_top)
    return LogprobsOnTheWay(to_host(chosen), to_host(top_ids.to(torch.int32)), to_host(top_logprobs), counts)


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
        seed=tensor([signed_seed(p.seed) for p in params], torch.int64),
        position=tensor(list(positions), torch.int64),
        all_greedy=all(p.temperature == 0 for p in params),
        any_cut=any(p.temperature > 0 and (p.top_k > 0 or p.top_p < 1) for p in params),
        any_top_k=any(p.temperature > 0 and p.top_k > 0 for p in params),
        any_top_p=any(p.temperature > 0 and p.top_p < 1 for p in params),
        min_p=tensor([p.min_p for p in params], torch.float32)
        if any(p.temperature > 0 and p.min_p > 0 for p in params)
        else None,
    )
