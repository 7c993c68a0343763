"""What a GPU backend does before it is ready: compile what can come up, load libraries, capture graphs."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from inference_service.domain.engine import BackendUnusableError
from inference_service.domain.sampling import SamplingParams
from inference_service.domain.start_phases import StartPhases
from inference_service.domain.step import NewRequest, ScheduledRequest, SchedulerOutput
from inference_service.execution.batch_builder import BatchBuilder
from inference_service.execution.forward_pass import ForwardPass
from inference_service.execution.model_runner import BatchModelRunner
from inference_service.execution.step_graphs import StepGraphs
from inference_service.execution.warm_up_ops import (
    warm_up_attentions,
    warm_up_linears,
    warm_up_moes,
    warm_up_readers,
    warm_up_sampler,
)
from lorikeet_kernels.launch.compile_ahead import compile_ahead

# The host's path is the same for all these lengths; they differ in what a matrix library chooses for them.
_LENGTHS = (1, 2, 3, 8, 16, 17, 32, 64, 100, 128, 200, 256, 257, 384, 512, 768, 1000, 1024, 1536)
_MAX_COMPILE_THREADS = 16
_PLAIN = SamplingParams(max_tokens=1, temperature=0.0)
_FULL = SamplingParams(max_tokens=1, temperature=1.0, top_k=5, top_p=0.9, logprobs=1, prompt_logprobs=1)


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step, and the cache's size in tokens."""

    max_step_tokens: int
    max_running_requests: int
    max_context_tokens: int
    cache_tokens: int
    block_tokens: int


def warm_up(
    forward: ForwardPass,
    graphs: StepGraphs,
    runner: BatchModelRunner,
    builder: BatchBuilder,
    limits: StepLimits,
    phases: StartPhases,
) -> None:
    """Launch everything once that requests can make the device launch, then capture. GPU only.

    Slots are empty and the cache's blocks nobody's yet: what these steps write there is never read.
    """
    device = forward.sampled.device
    with torch.inference_mode():
        with phases.phase("compile"):
            compile_ahead(lambda: launch_ops(forward, limits), _compile_threads())
        with phases.phase("launch"):
            launch_ops(forward, limits)
            torch.cuda.synchronize(device)
    with phases.phase("steps"):
        # Steps of fixed shapes run once more before they are captured.
        run_steps(runner, limits, () if builder.shapes.token_counts else _LENGTHS)
        torch.cuda.synchronize(device)
    with phases.phase("capture"), torch.inference_mode():
        capture_all(graphs, builder)
        torch.cuda.synchronize(device)


def _compile_threads() -> int:
    """All cores: loading is over. More than these wait for the interpreter's lock and nothing else."""
    return min(_MAX_COMPILE_THREADS, len(os.sched_getaffinity(0)))


def launch_ops(forward: ForwardPass, limits: StepLimits) -> None:
    """Each distinct kernel that batches within `limits` can launch, once."""
    # Prompt log-probabilities take 64 rows at a time through the output head.
    warm_up_linears(
        forward,
        max_tokens=limits.max_step_tokens,
        max_sampled=max(64, limits.max_running_requests),
    )
    warm_up_moes(forward, max_tokens=limits.max_step_tokens)
    warm_up_attentions(
        forward,
        max_requests=limits.max_running_requests,
        max_context_tokens=limits.max_context_tokens,
        max_step_tokens=limits.max_step_tokens,
    )
    warm_up_readers(forward)
    warm_up_sampler(forward, max_requests=limits.max_running_requests)


def capture_all(graphs: StepGraphs, builder: BatchBuilder) -> None:
    """Every fixed shape with adapters and without, the largest first.

    Raises:
        BackendUnusableError: an op of this model cannot be captured, or memory is too short for it.
    """
    for shape in builder.shapes.all():
        inputs = builder.idle(shape)
        for has_adapters in (True, False):
            try:
                graphs.capture(inputs, has_adapters=has_adapters)
            except RuntimeError as error:  # torch's, also when CUDA is out of memory
                step, flag = (
                    (f"a decode step of {shape.num_requests} requests", "--graph-batch-sizes")
                    if shape.is_decode
                    else (f"a step of {shape.num_rows} tokens", "--graph-token-counts")
                )
                raise BackendUnusableError(
                    f"{step} cannot be captured as a CUDA graph: {str(error).splitlines()[0]}; give fewer or "
                    f"smaller {flag}, or serve with --no-cuda-graphs"
                ) from error


def run_steps(runner: BatchModelRunner, limits: StepLimits, lengths: Sequence[int] = _LENGTHS) -> None:
    """Whole steps of many lengths, without adapters and with (empty) ones, the longest first."""
    longest = min(limits.max_step_tokens, limits.cache_tokens)
    for length in sorted({longest, *(n for n in (17, *lengths) if n < longest)}, reverse=True):
        for slot in (0, -1):
            _run_step(runner, limits, length, slot, _FULL if length in (17, longest) else _PLAIN)


def _run_step(
    runner: BatchModelRunner, limits: StepLimits, length: int, slot: int, sampling: SamplingParams
) -> None:
    """One step of `length` prompt tokens, over as many requests as that takes."""
    per_request = min(length, limits.max_context_tokens - 1)
    lengths = [min(per_request, length - begin) for begin in range(0, length, per_request)]
    new: list[NewRequest] = []
    first_block = 0
    for index, count in enumerate(lengths[: limits.max_running_requests]):
        num_blocks = -(-count // limits.block_tokens)
        blocks = tuple(range(first_block, first_block + num_blocks))
        first_block += num_blocks
        wanted = sampling if index == 0 else replace(sampling, prompt_logprobs=None)
        new.append(NewRequest(f"warm-up {index}", (0,) * count, count, wanted, blocks, 0, slot))
    if first_block * limits.block_tokens > limits.cache_tokens:
        return
    ids = tuple(request.request_id for request in new)
    prefill = tuple(ScheduledRequest(r.request_id, 0, r.num_prompt_tokens) for r in new)
    runner.execute(SchedulerOutput(0, prefill, tuple(new)))
    runner.execute(SchedulerOutput(1, (), finished=ids))
