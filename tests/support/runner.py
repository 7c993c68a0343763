"""Drives a model runner without a scheduler: every request advances each step, in chunks of a given size."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from inference_service.domain.request import TokenLogprobs
from inference_service.domain.sampling import SamplingParams
from inference_service.domain.step import NewRequest, ScheduledRequest, SchedulerOutput
from inference_service.execution.backend import DeviceBackend, load_backend
from inference_service.execution.config import BackendConfig
from tests.support.fixtures import FIXTURES

GREEDY = SamplingParams(max_tokens=16, temperature=0.0)


@dataclass(frozen=True, slots=True)
class DrivenRequest:
    """What to run; `num_cached` tokens count as computed in `block_ids`, which are allocated where empty."""

    token_ids: Sequence[int]
    slot: int = -1
    sampling: SamplingParams = GREEDY
    num_cached: int = 0
    block_ids: tuple[int, ...] = ()


@dataclass(slots=True)
class Driven:
    """What came of one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    block_ids: tuple[int, ...] = ()


def make_backend(model: str = "qwen3_moe", **settings: object) -> DeviceBackend:
    """A CPU backend of a fixture model, small unless told otherwise."""
    defaults: dict[str, object] = {
        "model_dir": str(FIXTURES / "models" / model),
        "dtype": "float32",
        "num_blocks": 512,
        "max_context_tokens": 1024,
        "num_threads": 1,
        "num_slots": 4,
        "arena_bytes": 8 << 20,
        "host_pool_bytes": 32 << 20,
        "max_running_requests": 32,
    }
    return load_backend(BackendConfig(**(defaults | settings)))  # pyright: ignore[reportArgumentType]


def drive(
    backend: DeviceBackend, requests: Sequence[DrivenRequest], num_tokens: int = 16, chunk: int = 1 << 30
) -> list[Driven]:
    """Run all requests at once until each has `num_tokens` output tokens; prompts go in chunks of `chunk`."""
    results = [Driven() for _ in requests]
    computed = [request.num_cached for request in requests]
    new: list[NewRequest] = []
    next_block = 0
    for index, request in enumerate(requests):
        length = len(request.token_ids) + num_tokens
        blocks = request.block_ids or tuple(range(next_block, next_block - (-length // 16)))
        next_block = max(next_block, *(b + 1 for b in blocks))
        results[index].block_ids = blocks
        new.append(
            NewRequest(
                f"r{index}",
                tuple(request.token_ids),
                len(request.token_ids),
                request.sampling,
                blocks,
                request.num_cached,
                request.slot,
            )
        )
    step = 0
    while any(len(result.token_ids) < num_tokens for result in results):
        shares: list[ScheduledRequest] = []
        for index, (request, result) in enumerate(zip(requests, results, strict=True)):
            known = len(request.token_ids) + len(result.token_ids)
            if len(result.token_ids) < num_tokens:
                count = min(chunk, known - computed[index])
                shares.append(ScheduledRequest(f"r{index}", computed[index], count))
        output = backend.runner.execute(SchedulerOutput(step, tuple(shares), tuple(new) if step == 0 else ()))
        for share, sampled in zip(shares, output.results, strict=True):
            index = int(share.request_id[1:])
            computed[index] += share.num_scheduled_tokens
            results[index].token_ids.extend(sampled.token_ids)
            results[index].logprobs.extend(sampled.logprobs)
            results[index].prompt_logprobs.extend(sampled.prompt_logprobs)
        step += 1
    backend.runner.execute(SchedulerOutput(step, (), finished=tuple(n.request_id for n in new)))
    return results
