"""Several samples of one request through the real engine process: how they end, together and apart."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from inference_service.domain.errors import NotFiniteError
from inference_service.domain.request import EngineRequest, FinishReason
from inference_service.engine.engine_client import EngineClient
from tests.integration.engine.test_engine_process import make_config, running, settled
from tests.support.engine_builders import make_request
from tests.support.fake_backend import BLIND_TOKEN
from tests.support.fake_device import expected_tokens

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineClient]:
    """One engine for all tests that leave it as they found it."""
    async with running(make_config(tmp_path_factory.mktemp("engine"), "step_s=0.002")) as shared:
        yield shared


def make_samples(count: int, prompt: Sequence[int] = (1, 2, 3), **more: Any) -> EngineRequest:
    """A request of several samples."""
    return replace(make_request("many", prompt, **more), num_samples=count)


async def ends_of(engine: EngineClient, request: EngineRequest) -> dict[int, FinishReason]:
    """How each sample ended."""
    return {o.index: o.finish.reason async for o in engine.generate(request) if o.finish is not None}


async def test_samples_end_each_for_itself(engine: EngineClient) -> None:
    """One sample is stopped alone, the others go on; the stream ends with the last of them."""
    tokens: dict[int, list[int]] = {}
    ends: dict[int, FinishReason] = {}
    async for output in engine.generate(make_samples(4, max_tokens=60)):
        assert output.index not in ends
        tokens.setdefault(output.index, []).extend(output.token_ids)
        engine.abort("many", 2)
        engine.abort("many", 99)
        if output.finish is not None:
            ends[output.index] = output.finish.reason
    assert ends.pop(2) is FinishReason.ABORTED
    assert ends == dict.fromkeys((0, 1, 3), FinishReason.LENGTH)
    for index, got in tokens.items():
        expected = expected_tokens(None, (1, 2, 3), 60)
        assert got == (expected[: len(got)] if index == 2 else expected)
    assert (await settled(engine)).kv_blocks_available == 256


async def test_a_sample_that_fails_ends_the_request(engine: EngineClient) -> None:
    """With its error; the first sample, which would go on for long, is stopped."""
    with pytest.raises(NotFiniteError):
        async for output in engine.generate(make_samples(3, (1, BLIND_TOKEN), max_tokens=380)):
            assert output.index == 0
    status = await settled(engine)
    assert (status.running_requests, status.kv_blocks_available) == (0, 256)


async def test_a_stream_of_samples_that_is_left(engine: EngineClient) -> None:
    """All of them stop, those that wait too; the id is free at once."""
    for _ in range(3):
        async with aclosing(engine.generate(make_samples(40, max_tokens=300))) as outputs:
            await anext(outputs)
    assert (await settled(engine)).kv_blocks_available == 256


async def test_a_drain_aborts_all_samples(tmp_path: Path) -> None:
    """It counts the request once, and waits for every sample's last word."""
    async with running(make_config(tmp_path, "step_s=0.005")) as engine:
        many = asyncio.create_task(ends_of(engine, make_samples(3, max_tokens=390)))
        async with aclosing(engine.generate(make_request("first", max_tokens=2))) as outputs:
            async for _ in outputs:
                pass
        assert await engine.drain(0.01) == 1
        assert await many == dict.fromkeys(range(3), FinishReason.ABORTED)
