"""Runs steps: batch, forward pass, sampling, log-probabilities. Implements ports.ModelRunner."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from inference_service.domain.request import TokenLogprobs
from inference_service.domain.step import ModelRunnerOutput, SampledRequest, SchedulerOutput
from inference_service.execution.batch_builder import BatchBuilder, StepBatch
from inference_service.execution.device_copy import to_device
from inference_service.execution.forward_pass import ForwardPass, Hidden
from inference_service.execution.request_table import RequestTable
from inference_service.execution.sampler import (
    LogprobsOnTheWay,
    SampledOnTheWay,
    TokenSampler,
    launch_logprobs,
)
from inference_service.execution.step_graphs import StepGraphs

# Prompt log-probabilities need logits of every prompt position; this many rows of [V] float32 exist at once.
_LOGITS_ROWS = 64


@dataclass(slots=True, eq=False)
class _Launched:
    """A step between its launch and its results."""

    step: SchedulerOutput
    batch: StepBatch
    logits: torch.Tensor | None  # until they are sampled from
    prompt_logprobs: list[tuple[list[int], LogprobsOnTheWay]]  # indices of requests, and what is theirs
    sampled: SampledOnTheWay | None = None
    failures: list[str] = field(default_factory=list[str])  # of the requests that were sampled, mostly ""
    done: torch.cuda.Event | None = None  # None on a CPU, where a launch is the work


class BatchModelRunner:
    """The model runner of one device. One caller: the engine loop."""

    def __init__(
        self,
        forward: ForwardPass,
        graphs: StepGraphs,
        table: RequestTable,
        builder: BatchBuilder,
        sampler: TokenSampler,
    ) -> None:
        self._forward = forward
        self._graphs = graphs
        self._table = table
        self._builder = builder
        self._sampler = sampler
        self._launched: deque[_Launched] = deque()
        self.is_asynchronous = forward.sampled.is_cuda

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """One step from launch to results, with none in flight; it may schedule nothing."""
        assert not self._launched, "a step is in flight: its results come first"
        if not step.scheduled:
            self._take_in(step)
            return ModelRunnerOutput(step.step, ())
        self.launch(step)
        return self.collect()

    @torch.inference_mode()
    def launch(self, step: SchedulerOutput) -> None:
        """See ports.ModelRunner."""
        assert all(launched.logits is None for launched in self._launched), "a step waits to be sampled"
        self._take_in(step)
        batch = self._builder.build(step.scheduled)
        hidden = self._run(batch)
        launched = _Launched(step, batch, None, self._prompt_logprobs(batch, hidden))
        if batch.samplers:
            launched.logits = self._logits(batch, hidden)
        waits = bool(self._launched) and any(state.waits_for_tokens for state in batch.sampled_states)
        self._launched.append(launched)
        if not waits:
            self._sample(launched)

    @torch.inference_mode()
    def collect(self) -> ModelRunnerOutput:
        """See ports.ModelRunner."""
        launched = self._launched.popleft()
        if launched.done is not None:
            launched.done.synchronize()
        batch, sampled = launched.batch, launched.sampled
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        if sampled is not None:
            token_ids, logprobs = sampled.read(len(batch.samplers))
            known = sampled.token_ids[: len(token_ids)].numpy()
            self._table.learn(batch.sampled_states, batch.places, known)
        if self._launched and self._launched[0].logits is not None:
            self._sample(self._launched[0])
        return _output(launched, token_ids, logprobs)

    def _take_in(self, step: SchedulerOutput) -> None:
        for request_id in step.finished:
            self._table.remove(request_id)
        for new in step.new:
            self._table.add(new)

    def _run(self, batch: StepBatch) -> Hidden:
        if batch.is_fixed:
            return self._graphs.run(batch.inputs, has_adapters=batch.has_adapters)
        on_host = (batch.starts.tolist(), batch.lengths.tolist())
        return self._forward.run(batch.inputs, has_adapters=batch.has_adapters, on_host=on_host)

    def _sample(self, launched: _Launched) -> None:
        """Enqueue the choice of tokens, and the copies of all that the step brings."""
        batch = launched.batch
        if launched.logits is not None:
            states = batch.sampled_states
            launched.sampled = self._sampler.launch(launched.logits, states, batch.sampling)
            launched.logits = None
            self._forward.sampled.index_copy_(0, batch.inputs.places, launched.sampled.tokens)
            launched.failures = [state.failure for state in states]
            self._table.expect(states, batch.places)
        if self._forward.sampled.is_cuda:
            launched.done = torch.cuda.Event()
            launched.done.record()

    def _logits(self, batch: StepBatch, hidden: Hidden) -> torch.Tensor:
        """Logits of the rows that are sampled from, and of those that fill a fixed shape of decodes up."""
        if batch.samples_all:
            return self._forward.logits(hidden)
        if not batch.is_fixed and len(batch.samplers) == batch.num_rows:  # decodes: every row, in order
            return self._forward.logits(hidden)[: batch.num_rows]
        return self._forward.logits_of(hidden, batch.inputs.sample_rows, batch.inputs.sample_slots)

    def _prompt_logprobs(self, batch: StepBatch, hidden: Hidden) -> list[tuple[list[int], LogprobsOnTheWay]]:
        """Of the prompt tokens that this step's rows predict, in the order of the rows."""
        if batch.samples_all or all(state.sampling.prompt_logprobs is None for state in batch.states):
            return []
        found: list[tuple[list[int], LogprobsOnTheWay]] = []
        wanted = list(_prompt_rows(batch))
        device = hidden.states.device
        for begin in range(0, len(wanted), _LOGITS_ROWS):
            part = wanted[begin : begin + _LOGITS_ROWS]
            indices = [index for index, _, _ in part]
            states = [batch.states[index] for index in indices]
            rows = to_device(torch.tensor([row for _, row, _ in part]), device)
            slots = to_device(torch.tensor([state.slot for state in states], dtype=torch.int32), device)
            targets = [
                self._table.tokens[state.row, position]
                for state, (_, _, position) in zip(states, part, strict=True)
            ]
            logits = self._forward.logits_of(hidden, rows, slots)
            token_ids = to_device(torch.from_numpy(np.array(targets)), device)
            counts = [state.sampling.prompt_logprobs or 0 for state in states]
            found.append((indices, launch_logprobs(logits, token_ids, counts)))
        return found


def _prompt_rows(batch: StepBatch) -> Iterator[tuple[int, int, int]]:
    """(index of the request, row, position of the prompt token that the row predicts)."""
    for index, state in enumerate(batch.states):
        if state.sampling.prompt_logprobs is None:
            continue
        begin, end = batch.starts[index : index + 2].tolist()
        first = int(batch.computed[index]) + 1
        for row in range(begin, min(end, begin + state.num_prompt_tokens - first)):
            yield index, row, first + row - begin


def _output(
    launched: _Launched, token_ids: list[int], logprobs: list[TokenLogprobs | None]
) -> ModelRunnerOutput:
    """The step's results in the batch's order."""
    scheduled = launched.step.scheduled
    sampled: dict[int, tuple[tuple[int, ...], tuple[TokenLogprobs, ...]]] = {
        index: ((token_id,), () if logprob is None else (logprob,))
        for index, token_id, logprob in zip(launched.batch.samplers, token_ids, logprobs, strict=True)
    }
    failures = dict(zip(launched.batch.samplers, launched.failures, strict=True))
    prompt: dict[int, list[TokenLogprobs]] = {}
    for indices, on_the_way in launched.prompt_logprobs:
        for index, entry in zip(indices, on_the_way.read(), strict=True):
            prompt.setdefault(index, []).append(entry)
    results = (
        SampledRequest(
            share.request_id,
            *sampled.get(index, ((), ())),
            tuple(prompt.get(index, ())),
            failures.get(index, ""),
        )
        for index, share in enumerate(scheduled)
    )
    return ModelRunnerOutput(launched.step.step, tuple(results))
