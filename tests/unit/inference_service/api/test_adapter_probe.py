"""What a probe concludes from log-probabilities, against numpy's float64; and what it asks of the engine."""

import asyncio
from collections.abc import AsyncIterator, Callable

import numpy as np
import pytest

from inference_service.api.adapter_probe import AdapterProbe
from inference_service.domain.adapter import ResidencyTier, ResidentAdapter
from inference_service.domain.errors import DeadlineError, NotFiniteError, QueueFullError
from inference_service.domain.probe import ProbeVerdict
from inference_service.domain.request import (
    EngineRequest,
    FinishReason,
    RequestFinish,
    RequestOutput,
    TokenLogprobs,
)
from inference_service.text.tokenizer import Tokenizer
from tests.support.byte_tokenizer import byte_tokenizer_json
from tests.support.fake_engine import FakeEngine, make_info
from tests.support.waiting import eventually

DIGEST = "1" * 64
VOCAB = 300
Logits = Callable[[EngineRequest, int], np.ndarray]


class LogitsEngine(FakeEngine):
    """Answers from logits [positions, V] in float64, as the model runner would."""

    def __init__(self, logits: Logits, **limits: int) -> None:
        super().__init__(make_info(VOCAB, **limits))
        self.logits = logits
        self.num_base_runs = 0

    async def generate(self, request: EngineRequest) -> AsyncIterator[RequestOutput]:
        """See ports.Engine."""
        self.requests[request.request_id] = request
        run = self.num_base_runs
        self.num_base_runs += request.digest is None
        if self.held is not None:
            await self.held.wait()
        logits = self.logits(request, run)
        if np.isnan(logits[-1]).any():
            raise NotFiniteError("not finite")
        rows = log_softmax(logits)
        finish = RequestFinish(FinishReason.LENGTH)
        if request.sampling.logprobs is None:
            yield RequestOutput(request.request_id, (1,), finish=finish)
            return
        targets = request.prompt_token_ids[1:]
        prompt = [best(row, 1, token) for row, token in zip(rows[:-1], targets, strict=True)]
        last = best(rows[-1], request.sampling.logprobs, int(rows[-1].argmax()))
        yield RequestOutput(request.request_id, (int(rows[-1].argmax()),), (last,), (None, *prompt), finish)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Along the last axis."""
    with np.errstate(invalid="ignore"):
        shifted = logits - logits.max(-1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def best(row: np.ndarray, count: int, token: int) -> TokenLogprobs:
    """The most likely ones of a row."""
    order = np.argsort(-row, kind="stable")[:count]
    return TokenLogprobs.of(float(row[token]), order.tolist(), row[order].tolist())


def base_logits(request: EngineRequest) -> np.ndarray:
    """The same for every run."""
    return np.random.default_rng(0).normal(size=(len(request.prompt_token_ids), VOCAB))


def make_probe(logits: Logits, **limits: int) -> tuple[AdapterProbe, LogitsEngine]:
    """A probe over an engine that has the adapter on its device."""
    engine = LogitsEngine(logits, **limits)
    engine.adapters[DIGEST] = ResidentAdapter(DIGEST, ResidencyTier.ACTIVE)
    return AdapterProbe(engine, Tokenizer(byte_tokenizer_json())), engine


def test_differences_are_those_of_float64() -> None:
    """Of the whole vocabulary at the end and of the prompt's own tokens before it, whichever is larger."""

    def logits(request: EngineRequest, _: int) -> np.ndarray:
        found = base_logits(request)
        if request.digest:
            found[3] += np.linspace(0, 2, VOCAB)
            found[-1, 17] += 30
        return found

    probe, engine = make_probe(logits)
    result = asyncio.run(probe.probe(DIGEST, 10))
    request = next(r for r in engine.requests.values() if r.digest)
    ours, theirs = (log_softmax(logits(r, 0)) for r in (_base(request), request))
    targets = np.array(request.prompt_token_ids[1:])
    expected = max(
        np.abs(ours[-1] - theirs[-1]).max(),
        np.abs(np.take_along_axis(ours[:-1] - theirs[:-1], targets[:, None], 1)).max(),
    )
    assert result.verdict is ProbeVerdict.CHANGES
    assert result.max_difference == pytest.approx(expected, rel=1e-5)
    assert result.noise == 0
    assert result.positions == len(request.prompt_token_ids)
    assert result.top1_changes == int((ours.argmax(-1) != theirs.argmax(-1)).sum()) > 0


def _base(request: EngineRequest) -> EngineRequest:
    return EngineRequest(request.request_id, "", request.prompt_token_ids, request.sampling)


def test_a_change_at_one_early_position_is_seen() -> None:
    """An adapter of the last layer's expert touches no later position."""

    def logits(request: EngineRequest, _: int) -> np.ndarray:
        found = base_logits(request)
        if request.digest:
            found[2, 0] += 0.5  # moves the normaliser, so every token of that position
        return found

    result = asyncio.run(make_probe(logits)[0].probe(DIGEST, 10))
    assert result.verdict is ProbeVerdict.CHANGES
    assert 0 < result.max_difference < 0.1


def test_an_adapter_without_effect_changes_nothing() -> None:
    """Not by a bit."""
    result = asyncio.run(make_probe(lambda request, _: base_logits(request))[0].probe(DIGEST, 10))
    assert result.verdict is ProbeVerdict.CHANGES_NOTHING
    assert (result.max_difference, result.noise, result.top1_changes) == (0, 0, 0)


def test_what_the_base_model_differs_by_itself_is_no_change() -> None:
    """On a device whose sums follow the batch, two runs of the base say what rounding makes."""

    def logits(request: EngineRequest, run: int) -> np.ndarray:
        shift = 1e-3 if request.digest is None and run == 1 else 1e-4 if request.digest else 0
        found = base_logits(request)
        found[-1, 5] += shift
        return found

    result = asyncio.run(make_probe(logits)[0].probe(DIGEST, 10))
    assert result.verdict is ProbeVerdict.CHANGES_NOTHING
    assert 0 < result.max_difference < result.noise


@pytest.mark.parametrize("position", [4, -1])
def test_an_adapter_that_is_not_finite_is_told(position: int) -> None:
    """In the middle of the prompt, where no token is sampled, as well as at its end."""

    def logits(request: EngineRequest, _: int) -> np.ndarray:
        found = base_logits(request)
        if request.digest:
            found[position] = np.nan
        return found

    result = asyncio.run(make_probe(logits)[0].probe(DIGEST, 10))
    assert result.verdict is ProbeVerdict.NOT_FINITE
    assert result.max_difference == 0


def test_tokens_that_the_base_model_rules_out_do_not_count() -> None:
    """A head that gives minus infinity to padding rows gives it with the adapter, too."""

    def logits(request: EngineRequest, _: int) -> np.ndarray:
        found = base_logits(request)
        found[:, -7:] = -np.inf
        found[-1, 0] += 1.0 if request.digest else 0.0
        return found

    result = asyncio.run(make_probe(logits)[0].probe(DIGEST, 10))
    assert result.verdict is ProbeVerdict.CHANGES
    assert 0.5 < result.max_difference < 1


def test_a_base_model_that_is_not_finite_is_not_the_adapters_fault() -> None:
    """The probe fails instead of blaming the adapter."""
    probe, _ = make_probe(lambda r, _: np.full((len(r.prompt_token_ids), VOCAB), np.nan))
    with pytest.raises(NotFiniteError, match="base model's own"):
        asyncio.run(probe.probe(DIGEST, 10))


def test_requests_are_nobodys() -> None:
    """Base, adapter and base again, of no tenant, with a deadline, one token each; at most 64 tokens."""
    probe, engine = make_probe(lambda request, _: base_logits(request))
    asyncio.run(probe.probe(DIGEST, 10))
    requests = list(engine.requests.values())
    assert [r.digest for r in requests] == [None, DIGEST, None]
    assert {r.tenant for r in requests} == {""}
    assert all(r.deadline_s is not None and r.sampling.max_tokens == 1 for r in requests)
    assert {len(r.prompt_token_ids) for r in requests} == {64}


def test_a_small_cache_takes_a_short_prompt() -> None:
    """Three prompts together leave most blocks to requests."""
    probe, engine = make_probe(lambda request, _: base_logits(request), num_blocks=8, block_tokens=4)
    asyncio.run(probe.probe(DIGEST, 10))
    assert {len(r.prompt_token_ids) for r in engine.requests.values()} == {4}


def test_an_adapter_comes_to_the_device_before_it_is_compared() -> None:
    """Else the base would run alone, in another batch."""
    probe, engine = make_probe(lambda request, _: base_logits(request))
    engine.adapters[DIGEST] = ResidentAdapter(DIGEST, ResidencyTier.HOST)
    asyncio.run(probe.probe(DIGEST, 10))
    first, *rest = engine.requests.values()
    assert (first.digest, len(first.prompt_token_ids), first.sampling.logprobs) == (DIGEST, 1, None)
    assert [r.digest for r in rest] == [None, DIGEST, None]


async def test_probes_run_one_at_a_time() -> None:
    """And one whose caller left ends its requests, so that the next gets its turn."""
    probe, engine = make_probe(lambda request, _: base_logits(request))
    engine.held = asyncio.Event()
    first, second = (asyncio.create_task(probe.probe(DIGEST, 10)) for _ in range(2))
    await eventually(lambda: len(engine.requests) == 3)
    await asyncio.sleep(0)
    assert len(engine.requests) == 3
    first.cancel()
    await eventually(lambda: len(engine.requests) == 6)
    engine.held.set()
    assert (await second).verdict is ProbeVerdict.CHANGES_NOTHING


async def test_what_a_request_would_end_with_the_probe_ends_with() -> None:
    """A full queue, a deadline."""

    def full(*_: object) -> np.ndarray:
        raise QueueFullError("16 requests wait already", retry_after_s=1)

    with pytest.raises(QueueFullError):
        await make_probe(full)[0].probe(DIGEST, 10)
    engine = FakeEngine()
    engine.adapters[DIGEST] = ResidentAdapter(DIGEST, ResidencyTier.ACTIVE)
    probe = AdapterProbe(engine, Tokenizer(byte_tokenizer_json()))
    with pytest.raises(DeadlineError):
        await probe.probe(DIGEST, 1e-9)
