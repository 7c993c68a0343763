"""Outputs that wait for a slow consumer."""

import asyncio

import pytest

from inference_service.domain.errors import EngineDeadError, SlowClientError
from inference_service.domain.request import FinishReason, RequestFinish, RequestOutput, TokenLogprobs
from inference_service.engine.output_buffer import OutputBuffer


async def test_outputs_without_logprobs_are_merged() -> None:
    """A consumer that was away gets one output with all tokens and the finish."""
    buffer = OutputBuffer()
    finish = RequestFinish(FinishReason.LENGTH)
    for output in (
        RequestOutput("a", (1,)),
        RequestOutput("a", (2,)),
        RequestOutput("a", (3,), finish=finish),
    ):
        assert buffer.put(output)
    assert await buffer.get() == RequestOutput("a", (1, 2, 3), finish=finish)


async def test_samples_are_merged_each_for_itself() -> None:
    """A slow reader of many samples gets one output of each, not one a token."""
    buffer = OutputBuffer()
    finish = RequestFinish(FinishReason.LENGTH)
    for step in range(20):
        for index in range(3):
            end = finish if step == 10 and index == 1 else None
            if index != 1 or step <= 10:
                assert buffer.put(RequestOutput("a", (100 * index + step,), index=index, finish=end))
    got = {output.index: output for output in [await buffer.get() for _ in range(3)]}
    assert got[0].token_ids == tuple(range(20))
    assert got[1] == RequestOutput("a", tuple(range(100, 111)), index=1, finish=finish)
    assert got[2].token_ids == tuple(range(200, 220))


async def test_outputs_with_logprobs_stay_apart() -> None:
    """Messages stay as small as the engine made them."""
    buffer = OutputBuffer()
    outputs = [RequestOutput("a", (i,), (TokenLogprobs(-1.0),)) for i in range(3)]
    for output in outputs:
        buffer.put(output)
    assert [await buffer.get() for _ in range(3)] == outputs


async def test_too_many_waiting_logprobs_end_the_stream_after_what_came() -> None:
    """The put that exceeds the bound says so once; the consumer reads the rest, then the error."""
    buffer = OutputBuffer(max_pairs=5)
    output = RequestOutput("a", (1,), (TokenLogprobs.of(-1.0, (1, 2), (-1.0, -2.0)),))
    assert buffer.put(output)
    assert not buffer.put(output)
    assert buffer.put(output)
    assert await buffer.get() == output
    with pytest.raises(SlowClientError, match="read the stream faster") as caught:
        await buffer.get()
    assert caught.value.metadata["limit"] == "max_waiting_logprobs"
    assert (caught.value.metadata["value"], caught.value.metadata["maximum"]) == ("6", "5")


async def test_one_output_larger_than_the_bound_passes() -> None:
    """A reader that keeps up is never too slow, whatever the size."""
    buffer = OutputBuffer(max_pairs=1)
    output = RequestOutput("a", (1,), (TokenLogprobs.of(-1.0, (1, 2), (-1.0, -2.0)),))
    for _ in range(3):
        assert buffer.put(output)
        assert await buffer.get() == output


async def test_failure_wakes_a_waiting_consumer_and_stays() -> None:
    """Raised on every read after what came before."""
    buffer = OutputBuffer()
    reading = asyncio.create_task(buffer.get())
    await asyncio.sleep(0)
    buffer.fail(EngineDeadError("gone"))
    with pytest.raises(EngineDeadError):
        await reading
    with pytest.raises(EngineDeadError):
        await buffer.get()


async def test_merged_outputs_stay_small() -> None:
    """Whoever comes back after long takes the backlog in parts, each the work of a moment."""
    buffer = OutputBuffer()
    for token in range(1000):
        buffer.put(RequestOutput("a", (token,)))
    parts: list[int] = []
    while len(parts) < 1000:
        output = await buffer.get()
        assert 0 < len(output.token_ids) <= 64
        parts += output.token_ids
    assert parts == list(range(1000))
