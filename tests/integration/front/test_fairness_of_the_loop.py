"""One tenant's huge request must not hold the others up: it is refused unread, or worked off in parts."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from inference_service.domain.request import EngineRequest, FinishReason, RequestOutput, TokenLogprobs
from lorikeet.inference.v1 import generation_pb2
from lorikeet_rpc.channel import open_channel
from lorikeet_rpc.errors import RpcFailure, from_rpc_error
from tests.support.fake_engine import FakeEngine, make_info
from tests.support.node import ACME, RunningNode, auth, finished, make_request, run_node

GENERATE = "/lorikeet.inference.v1.InferenceService/Generate"
# On two busy cores; what these tests guard against takes the loop for several times as long.
LONGEST_S = 0.4


@dataclass(slots=True)
class Gaps:
    """The longest the event loop was away, in this thread's own working time."""

    longest_s: float = 0.0


@asynccontextmanager
async def watching() -> AsyncGenerator[Gaps]:
    """Measure the loop that runs both the node and this test: its own work, not the machine's load."""
    gaps = Gaps()

    async def watch() -> None:
        last_s = time.thread_time()
        while True:
            await asyncio.sleep(0)
            now_s = time.thread_time()
            gaps.longest_s, last_s = max(gaps.longest_s, now_s - last_s), now_s

    task = asyncio.create_task(watch())
    await asyncio.sleep(0.01)
    try:
        yield gaps
    finally:
        task.cancel()


async def refused(node: RunningNode, raw: bytes) -> tuple[RpcFailure, float]:
    """How the node refuses a serialized request, and how long its loop was away."""
    async with open_channel(node.target, aio=True) as channel:
        call: Any = channel.unary_stream(GENERATE)
        async with watching() as gaps:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(raw, metadata=auth(ACME)).read()
    return from_rpc_error(caught.value), gaps.longest_s


def delimited(number: int, content: bytes) -> bytes:
    """One field of a message, with its length."""
    length, size = b"", len(content)
    while size > 127:
        length, size = length + bytes([size & 127 | 128]), size >> 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + content


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(delimited(4, b"\x0a\x03\x0a\x01u" * 3_500_000), id="turns"),
        pytest.param(delimited(6, b"\x3a\x01x" * 5_000_000), id="stop strings"),
        pytest.param(delimited(5, delimited(1, b"\x01" * 30_000_000)), id="token ids"),
        pytest.param(delimited(6, delimited(8, b"\x01" * 30_000_000)), id="stop token ids"),
        pytest.param(b"\x12\x00" * 12_000_000, id="one field again and again"),
    ],
)
async def test_millions_of_parts_are_refused_unread(tmp_path: Path, raw: bytes) -> None:
    """The limit is named with value and maximum, and the loop goes on."""
    async with run_node(tmp_path) as node:
        failure, longest_s = await refused(node, raw)
    assert (failure.code.value, failure.reason) == ("INVALID_ARGUMENT", "LIMIT_EXCEEDED")
    assert int(failure.metadata["value"]) > int(failure.metadata["maximum"])
    assert longest_s < LONGEST_S


async def test_a_chat_of_too_many_turns(tmp_path: Path) -> None:
    """Named as such where the message can be read."""
    turns = [generation_pb2.ChatMessage(role="u")] * 5000
    request = make_request(chat=generation_pb2.ChatMessages(messages=turns))
    async with run_node(tmp_path) as node:
        failure, _ = await refused(node, request.SerializeToString())
    assert failure.metadata == {
        "field": "chat.messages", "limit": "max_chat_messages", "value": "5000", "maximum": "4096"
    }  # fmt: skip


async def test_a_long_role(tmp_path: Path) -> None:
    """Refused before anything renders it."""
    turns = [generation_pb2.ChatMessage(role="u" * 10_000_000)]
    request = make_request(chat=generation_pb2.ChatMessages(messages=turns))
    async with run_node(tmp_path) as node:
        failure, longest_s = await refused(node, request.SerializeToString())
    assert failure.metadata["limit"] == "max_role_length"
    assert longest_s < LONGEST_S


async def test_a_chat_of_too_many_characters(tmp_path: Path) -> None:
    """Over all turns together, with the limit's numbers."""
    turns = [generation_pb2.ChatMessage(role="user", content="x" * 10_000)] * 1000
    request = make_request(chat=generation_pb2.ChatMessages(messages=turns))
    async with run_node(tmp_path) as node:
        failure, longest_s = await refused(node, request.SerializeToString())
    assert (failure.metadata["limit"], failure.metadata["field"]) == ("max_prompt_bytes", "chat")
    assert int(failure.metadata["value"]) > int(failure.metadata["maximum"])
    assert longest_s < LONGEST_S


class WholeVocabularyEngine(FakeEngine):
    """Answers with one token and the log-probabilities of every prompt token, ready in an instant."""

    async def generate(self, request: EngineRequest) -> AsyncIterator[RequestOutput]:
        """One output, the last."""
        self.requests[request.request_id] = request
        top = request.sampling.prompt_logprobs or 0
        entry = TokenLogprobs.of(-1.0, range(top), (-2.0,) * top)
        prompt = (None, *(entry,) * (len(request.prompt_token_ids) - 1))
        finish = self._finish(request, FinishReason.LENGTH, 1)
        yield RequestOutput(request.request_id, (1,), prompt_logprobs=prompt, finish=finish)


async def test_log_probabilities_of_a_whole_prompt_stream_in_small_steps(tmp_path: Path) -> None:
    """800,000 of them, none missing, and the loop is never away for long."""
    engine = WholeVocabularyEngine(make_info(max_top_logprobs=300))
    ids = [i % 256 for i in range(2700)]
    async with run_node(tmp_path, engine) as node:
        request = make_request(token_ids=generation_pb2.TokenIds(ids=ids), max_tokens=1, prompt_logprobs=300)
        async with watching() as gaps:
            messages = await node.generate(request)
    prompt = [t for m in messages for t in m.prompt_tokens]
    assert [t.id for t in prompt] == ids
    assert [len(t.top_logprobs) for t in prompt] == [0] + [300] * 2699
    assert (prompt[5].top_logprobs[7].id, prompt[5].top_logprobs[7].logprob) == (7, -2.0)
    assert [len(m.tokens) for m in messages[-1:]] == [1]
    assert max(m.ByteSize() for m in messages) <= 1 << 18
    assert gaps.longest_s < LONGEST_S


async def test_a_unary_reply_that_its_prompt_makes_too_large_costs_no_engine_work(tmp_path: Path) -> None:
    """Known once the prompt is tokenized, whether it came as ids or as text."""
    engine = FakeEngine(make_info(max_top_logprobs=300))
    async with run_node(tmp_path, engine) as node:
        prompts: tuple[dict[str, Any], ...] = (
            {"token_ids": generation_pb2.TokenIds(ids=[1] * 2000)},
            {"prompt": "a" * 2000},
        )
        for prompt in prompts:
            request = generation_pb2.CompleteRequest(
                request=make_request(max_tokens=1, prompt_logprobs=300, **prompt)
            )
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await finished(node.inference.Complete(request, metadata=auth(ACME)))
            failure = from_rpc_error(caught.value)
            assert (failure.reason, failure.metadata["limit"]) == ("LIMIT_EXCEEDED", "max_reply_bytes")
            assert "Generate" in failure.message
        assert not engine.requests


async def test_log_probabilities_of_one_prompt_are_bounded(tmp_path: Path) -> None:
    """The engine keeps them all until the prompt is computed; the error says how many fit this prompt."""
    engine = FakeEngine(make_info(150_000, max_top_logprobs=150_000))
    async with run_node(tmp_path, engine) as node:
        ids = generation_pb2.TokenIds(ids=[1] * 1000)
        request = make_request(token_ids=ids, max_tokens=1, prompt_logprobs=150_000)
        failure, _ = await refused(node, request.SerializeToString())
        assert not engine.requests
    assert failure.metadata == {
        "field": "sampling.prompt_logprobs", "limit": "max_prompt_logprob_pairs", "value": "150000",
        "maximum": "8000",
    }  # fmt: skip


async def test_tokenizing_a_large_text_lets_others_on(tmp_path: Path) -> None:
    """Tokens, their bytes and the reply are made away from the loop."""
    engine = FakeEngine(make_info(max_context_tokens=1_000_000))
    async with run_node(tmp_path, engine) as node:
        async with watching() as gaps:
            request = generation_pb2.TokenizeRequest(prompt="x" * 700_000)
            reply = await node.inference.Tokenize(request, metadata=auth(ACME))
        assert (len(reply.ids), len(reply.token_bytes)) == (700_000, 700_000)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await node.inference.Tokenize(
                generation_pb2.TokenizeRequest(prompt="x" * 3_000_000), metadata=auth(ACME)
            )
    assert from_rpc_error(caught.value).metadata["limit"] == "max_reply_bytes"
    assert gaps.longest_s < LONGEST_S
