"""What the runner does with requests: order, preemption, sampling, log-probabilities."""

from dataclasses import replace
from pathlib import Path

import pytest

from inference_service.domain.sampling import SamplingParams
from inference_service.domain.step import NewRequest, ScheduledRequest, SchedulerOutput
from inference_service.execution.backend import DeviceBackend
from tests.support.runner import GREEDY, DrivenRequest, drive, make_backend
from tests.support.tiny_model import write_model

PROMPT = (3, 17, 17, 0, 39, 8, 21, 2, 5, 30, 11, 12, 13, 14, 15, 16, 18, 19)
RANDOM = SamplingParams(max_tokens=99, temperature=1.3, top_p=0.95, top_k=30, seed=7)


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> DeviceBackend:
    """One backend for all tests of the file."""
    path = write_model(tmp_path_factory.mktemp("model"))
    return make_backend(model_dir=str(path), max_context_tokens=128, max_running_requests=8)


def test_results_follow_the_batch_order_and_wait_for_the_prompt(backend: DeviceBackend) -> None:
    """A chunk short of the prompt's end samples nothing; a decode beside it does."""
    a = NewRequest("a", PROMPT, 18, GREEDY, (0, 1), 0, -1)
    b = NewRequest("b", PROMPT[:5], 5, GREEDY, (2,), 0, -1)
    out = backend.runner.execute(
        SchedulerOutput(1, (ScheduledRequest("b", 0, 5), ScheduledRequest("a", 0, 10)), (a, b))
    )
    assert out.step == 1
    assert [r.request_id for r in out.results] == ["b", "a"]
    assert [len(r.token_ids) for r in out.results] == [1, 0]
    out = backend.runner.execute(
        SchedulerOutput(2, (ScheduledRequest("a", 10, 8), ScheduledRequest("b", 5, 1)))
    )
    assert [len(r.token_ids) for r in out.results] == [1, 1]
    assert backend.runner.execute(SchedulerOutput(3, (), finished=("a", "b", "never seen"))).results == ()


def test_preempted_request_continues_alike(backend: DeviceBackend) -> None:
    """Recomputed from prompt and output, it draws the tokens that it would have drawn."""
    whole = drive(backend, [DrivenRequest(PROMPT, sampling=RANDOM)], num_tokens=12)[0]
    tokens = (*PROMPT, *whole.token_ids[:5])
    out = backend.runner.execute(
        SchedulerOutput(
            0, (ScheduledRequest("x", 0, 23),), (NewRequest("x", tokens, 18, RANDOM, (5, 6), 0, -1),)
        )
    )
    assert out.results[0].token_ids == (whole.token_ids[5],)
    # Preempted and back in the same step, under the same id.
    again = NewRequest("x", (*tokens, whole.token_ids[5]), 18, RANDOM, (3, 4), 0, -1)
    out = backend.runner.execute(
        SchedulerOutput(1, (ScheduledRequest("x", 0, 24),), (again,), finished=("x",))
    )
    assert out.results[0].token_ids == (whole.token_ids[6],)
    backend.runner.execute(SchedulerOutput(2, (), finished=("x",)))


def test_blocks_grow_one_by_one(backend: DeviceBackend) -> None:
    """new_block_ids extend the table, wherever the blocks lie."""
    expected = drive(backend, [DrivenRequest(PROMPT[:3])], num_tokens=40)[0].token_ids
    blocks = iter((31, 4, 17))
    new = NewRequest("g", PROMPT[:3], 3, GREEDY, (), 0, -1)
    share = ScheduledRequest("g", 0, 3, (next(blocks),))
    tokens = list(backend.runner.execute(SchedulerOutput(0, (share,), (new,))).results[0].token_ids)
    for position in range(3, 42):
        fresh = (next(blocks),) if position % 16 == 0 else ()
        out = backend.runner.execute(SchedulerOutput(position, (ScheduledRequest("g", position, 1, fresh),)))
        tokens.extend(out.results[0].token_ids)
    assert tokens == expected
    backend.runner.execute(SchedulerOutput(99, (), finished=("g",)))


def test_seeds_decide_and_neighbours_do_not(backend: DeviceBackend) -> None:
    """Equal seeds draw equal tokens beside greedy and other rows; other seeds differ."""
    alone = drive(backend, [DrivenRequest(PROMPT, sampling=RANDOM)])[0].token_ids
    batch = [
        DrivenRequest(PROMPT[:4], sampling=GREEDY),
        DrivenRequest(PROMPT, sampling=RANDOM),
        DrivenRequest(PROMPT, sampling=replace(RANDOM, seed=2**64 - 1)),
        DrivenRequest(PROMPT, sampling=replace(RANDOM, seed=-1)),
    ]
    together = [r.token_ids for r in drive(backend, batch, chunk=7)]
    assert together[1] == alone
    assert together[2] != alone
    assert together[3] == together[2]  # seeds are 64 bits


def test_logprobs_only_where_asked(backend: DeviceBackend) -> None:
    """None, 0, and some beside each other; prompt log-probabilities in chunks equal those at once."""
    wants = [None, 0, 3]
    requests = [DrivenRequest(PROMPT, sampling=replace(GREEDY, logprobs=n, prompt_logprobs=n)) for n in wants]
    whole, chunked = (drive(backend, requests, num_tokens=3, chunk=chunk) for chunk in (99, 5))
    for count, result, other in zip(wants, whole, chunked, strict=True):
        assert len(result.logprobs) == (0 if count is None else 3)
        assert len(result.prompt_logprobs) == (0 if count is None else len(PROMPT) - 1)
        for entry, same in zip(result.prompt_logprobs, other.prompt_logprobs, strict=True):
            assert len(entry.top_ids) == len(entry.top_logprobs) == count
            assert entry.top_ids == same.top_ids
            assert entry.logprob == pytest.approx(same.logprob, abs=1e-5)
    assert whole[2].logprobs[0].top_ids[0] == whole[2].token_ids[0]
    assert whole[2].logprobs[0].logprob == whole[2].logprobs[0].top_logprobs[0]


def test_many_prompt_positions(backend: DeviceBackend) -> None:
    """More rows than are turned into logits at once; the last prompt token is not its own prediction."""
    prompt = [i % 40 for i in range(100)]
    sampling = replace(GREEDY, prompt_logprobs=1)
    result = drive(backend, [DrivenRequest(prompt, sampling=sampling)], num_tokens=1)[0]
    assert len(result.prompt_logprobs) == 99


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bit_compute(tmp_path: Path, dtype: str) -> None:
    """Close to float32, and independent of the batch like it."""
    path = str(write_model(tmp_path))
    sampling = replace(GREEDY, prompt_logprobs=0)
    requests = [DrivenRequest(PROMPT, sampling=sampling), DrivenRequest(PROMPT[:7], sampling=sampling)]
    exact = drive(make_backend(model_dir=path, max_context_tokens=64), requests, num_tokens=1)
    backend = make_backend(model_dir=path, dtype=dtype, max_context_tokens=64, batch_invariant=True)
    assert backend.info.dtype == dtype
    rounded = drive(backend, requests, num_tokens=1)
    assert drive(backend, requests[1:], num_tokens=1)[0].prompt_logprobs == rounded[1].prompt_logprobs
    errors = [
        abs(a.logprob - b.logprob)
        for a, b in zip(exact[0].prompt_logprobs, rounded[0].prompt_logprobs, strict=True)
    ]
    assert sorted(errors)[len(errors) // 2] < 0.1
