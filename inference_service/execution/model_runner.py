"""Runs steps: batch, forward pass, sampling, log-probabilities. Implements ports.ModelRunner."""

from collections.abc import Iterator

import numpy as np
import torch

from inference_service.domain.request import TokenLogprobs
from inference_service.domain.step import ModelRunnerOutput, SampledRequest, SchedulerOutput
from inference_service.execution.batch_builder import BatchBuilder, BatchRequest
from inference_service.execution.device_copy import to_device
from inference_service.execution.request_table import RequestTable
from inference_service.execution.sampler import TokenSampler, logprobs_of
from inference_service.layers.batch import ForwardBatch, LoraBatch
from inference_service.layers.decoder import Decoder

# Prompt log-probabilities need logits of every prompt position; this many rows of [V] float32 exist at once.
_LOGITS_ROWS = 64


class BatchModelRunner:
    """The model runner of one device. One caller: the engine loop."""

    def __init__(self, model: Decoder, table: RequestTable, builder: BatchBuilder) -> None:
        self._model = model
        self._table = table
        self._builder = builder
        self._sampler = TokenSampler(table)

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """See ports.ModelRunner."""
        for request_id in step.finished:
            self._table.remove(request_id)
        for new in step.new:
            self._table.add(new)
        if not step.scheduled:
            return ModelRunnerOutput(step.step, ())
        requests = self._builder.requests(step.scheduled)
        batch = self._builder.build(requests)
        hidden = self._model.forward(batch)
        prompt_logprobs = self._prompt_logprobs(requests, batch, hidden)
        sampled = self._sample(requests, batch, hidden)
        results = (
            SampledRequest(
                request.request_id, *sampled.get(index, ((), ())), tuple(prompt_logprobs.get(index, ()))
            )
            for index, request in enumerate(requests)
        )
        return ModelRunnerOutput(step.step, tuple(results))

    def _sample(
        self, requests: list[BatchRequest], batch: ForwardBatch, hidden: torch.Tensor
    ) -> dict[int, tuple[tuple[int, ...], tuple[TokenLogprobs, ...]]]:
        """Token and log-probabilities by index of the request, for those that sample in this step."""
        samplers = [index for index, request in enumerate(requests) if request.samples]
        if not samplers:
            return {}
        states = [requests[index].state for index in samplers]
        logits = self._logits([requests[index].end - 1 for index in samplers], requests, batch, hidden)
        token_ids, logprobs = self._sampler.sample(logits, states)
        for state, token_id in zip(states, token_ids, strict=True):
            self._table.append(state, token_id)
        return {
            index: ((token_id,), () if logprob is None else (logprob,))
            for index, token_id, logprob in zip(samplers, token_ids, logprobs, strict=True)
        }

    def _prompt_logprobs(
        self, requests: list[BatchRequest], batch: ForwardBatch, hidden: torch.Tensor
    ) -> dict[int, list[TokenLogprobs]]:
        """Of the prompt tokens that this step's rows predict, by index of the request."""
        found: dict[int, list[TokenLogprobs]] = {}
        wanted = list(_prompt_rows(requests))
        for begin in range(0, len(wanted), _LOGITS_ROWS):
            part = wanted[begin : begin + _LOGITS_ROWS]
            logits = self._logits([row for _, row, _ in part], requests, batch, hidden)
            targets = [self._table.tokens[requests[index].state.row, position] for index, _, position in part]
            counts = [requests[index].state.sampling.prompt_logprobs or 0 for index, _, _ in part]
            token_ids = self._builder.tensor(np.array(targets))
            for (index, _, _), value in zip(part, logprobs_of(logits, token_ids, counts), strict=True):
                found.setdefault(index, []).append(value)
        return found

    def _logits(
        self, rows: list[int], requests: list[BatchRequest], batch: ForwardBatch, hidden: torch.Tensor
    ) -> torch.Tensor:
        """Logits [N, V] of the given rows of the batch."""
        if len(rows) == requests[-1].end:  # a batch of decodes: every row, in order, and the padding
            return self._model.logits(hidden, batch.lora)[: len(rows)]
        lora: LoraBatch = batch.lora
        if lora.is_active:
            slots = np.repeat(
                np.array([r.state.slot for r in requests], np.int32), [r.end - r.begin for r in requests]
            )
            lora = self._builder.lora(slots[rows])
        return self._model.logits(hidden.index_select(0, to_device(torch.tensor(rows), hidden.device)), lora)


def _prompt_rows(requests: list[BatchRequest]) -> Iterator[tuple[int, int, int]]:
    """(index of the request, row, position of the prompt token that the row predicts)."""
    for index, request in enumerate(requests):
        if request.state.sampling.prompt_logprobs is None:
            continue
        for row in range(request.begin, request.end):
            predicted = request.position + row - request.begin + 1
            if predicted < request.state.num_prompt_tokens:
                yield index, row, predicted
