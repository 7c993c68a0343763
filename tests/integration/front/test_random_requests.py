"""Random and mutated requests through the real interceptor, servicer and engine: every answer is a valid one.

The seed is printed; LORIKEET_FUZZ_SEED sets another.
"""

import asyncio
import json
import os
import shutil
import threading
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from inference_service.engine.engine_client import EngineClient
from inference_service.server import Node, TextModel
from inference_service.settings import Settings
from lorikeet.inference.v1 import generation_pb2 as pb
from lorikeet.inference.v1 import inference_service_pb2_grpc, model_pb2
from lorikeet_rpc.server import DEFAULT_MAX_MESSAGE_BYTES
from tests.support.chat_cases import TEMPLATES
from tests.support.fixtures import FIXTURES
from tests.support.reply_checks import (
    REQUEST_TYPES,
    check_complete,
    check_error,
    check_generate,
    check_tokenize,
    check_too_long,
    check_undecodable,
)
from tests.support.request_strategies import Ending, RandomCall, calls

SEED = int(os.environ.get("LORIKEET_FUZZ_SEED", "20261130"))
# A hang, that is; the slowest answers take half a second on an idle machine.
ANSWER_S = 60.0
AUTH = (("authorization", "Bearer fuzz-token"),)
PATH = "/lorikeet.inference.v1.InferenceService/"


@dataclass
class Rig:
    """A node on a loop of its own thread, and a channel to it that speaks bytes."""

    loop: asyncio.AbstractEventLoop
    node: Node
    engine: EngineClient
    channel: grpc.aio.Channel
    model: model_pb2.GetModelResponse
    abort: Any

    def run(self, work: Any) -> Any:
        """Await on the node's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(2 * ANSWER_S)

    async def answer(self, call: RandomCall) -> str:
        """Make one call and check what comes: "OK", why it was refused, or how this side ended it."""
        replies: list[bytes] = []
        reason = None
        try:
            replies = await self._replies(call)
        except asyncio.CancelledError:
            return "cancelled"
        except grpc.aio.AioRpcError as error:
            if call.ending is Ending.DEADLINE and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return "deadline"
            if len(call.raw) > DEFAULT_MAX_MESSAGE_BYTES:
                check_too_long(error, len(call.raw))
                return "too long"
            reason = check_error(error)
        assert len(call.raw) <= DEFAULT_MAX_MESSAGE_BYTES
        check_undecodable(call.method, call.raw, reason)
        if reason is not None:
            return reason
        message = REQUEST_TYPES[call.method].FromString(call.raw)
        match call.method:
            case "Generate":
                check_generate(message, [pb.GenerateResponse.FromString(r) for r in replies], self.model)
            case "Complete":
                reply = pb.CompleteResponse.FromString(replies[0])
                check_complete(message.request, reply, self.model)
            case _:
                check_tokenize(pb.TokenizeResponse.FromString(replies[0]), self.model)
        return "OK"

    async def _replies(self, call: RandomCall) -> list[bytes]:
        timeout_s = ANSWER_S if call.timeout_s is None else call.timeout_s
        if call.method != "Generate":
            unary = self.channel.unary_unary(PATH + call.method)(call.raw, metadata=AUTH, timeout=timeout_s)
            if call.ending is Ending.CANCEL:
                await asyncio.sleep(call.num_read / 500)
                unary.cancel()
            return [await unary]
        stream = self.channel.unary_stream(PATH + "Generate")(call.raw, metadata=AUTH, timeout=timeout_s)
        replies: list[bytes] = []
        while (reply := await stream.read()) is not grpc.aio.EOF:
            replies.append(reply)
            if len(replies) == call.num_read:
                if call.ending is Ending.CANCEL:
                    stream.cancel()
                if call.ending is Ending.ABORT:
                    request_id = pb.GenerateResponse.FromString(reply).request_id
                    await self.abort(pb.AbortRequest(request_id=request_id), metadata=AUTH, timeout=ANSWER_S)
        return replies

    async def answers(self, batch: Sequence[RandomCall]) -> list[str]:
        """All at once."""
        return list(await asyncio.gather(*map(self.answer, batch)))

    async def at_rest(self) -> None:
        """Fails unless everything that requests hold comes back."""
        async with asyncio.timeout(ANSWER_S):
            while True:
                status = await self.engine.status()
                busy = status.running_requests + status.waiting_requests + status.adapter_leases
                if not busy and status.kv_blocks_available == status.kv_blocks_total:
                    return
                await asyncio.sleep(0.01)


def write_model(path: Path) -> Path:
    """The tiny Qwen3-MoE with a template for thoughts and calls, and one that writes tools indented."""
    shutil.copytree(FIXTURES / "models" / "qwen3_moe", path)
    shutil.copyfile(TEMPLATES / "qwen3_like.jinja", path / "chat_template.jinja")
    (path / "additional_chat_templates").mkdir()
    shutil.copyfile(TEMPLATES / "llama3_like.jinja", path / "additional_chat_templates" / "tool_use.jinja")
    config = json.loads((path / "generation_config.json").read_text())
    (path / "generation_config.json").write_text(json.dumps(config | {"max_new_tokens": 6}))
    return path


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Generator[Rig]:
    """One node for all: small enough that requests queue, preempt each other and meet each limit."""
    root = tmp_path_factory.mktemp("random")
    values = {
        "model_dir": write_model(root / "model"), "data_dir": root / "data", "listen": "127.0.0.1:0",
        "static_tenants": {"fuzz": "fuzz-token"}, "device": "cpu", "dtype": "float32", "num_threads": 1,
        "max_context_tokens": 96, "num_blocks": 24, "max_running_requests": 6, "max_waiting_requests": 40,
        "max_step_tokens": 48, "max_samples": 8, "max_stop_strings": 4, "log_level": "error",
    }  # fmt: skip
    parsed = Settings.model_validate(values)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="node")
    thread.start()

    async def start() -> Rig:
        engine = await EngineClient.start(parsed.engine_config())
        node = Node(parsed, TextModel.read(parsed), engine)
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{await node.start()}")
        stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
        model = await stub.GetModel(model_pb2.GetModelRequest(), metadata=AUTH)
        return Rig(loop, node, engine, channel, model, stub.Abort)

    async def stop(rig: Rig) -> None:
        await rig.channel.close()
        await rig.node.stop(1.0)
        await rig.engine.close()

    started = asyncio.run_coroutine_threadsafe(start(), loop).result(240)
    try:
        yield started
    finally:
        asyncio.run_coroutine_threadsafe(stop(started), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()


# Of an example that fails, which is to be shown whole.
@pytest.mark.filterwarnings("ignore:Generating overly large repr:hypothesis.errors.HypothesisWarning")
@pytest.mark.parametrize(
    "num_examples", [30, pytest.param(800, marks=[pytest.mark.long, pytest.mark.timeout(900)])]
)
def test_every_answer_is_valid(rig: Rig, num_examples: int) -> None:
    """Batches of calls at once; afterwards nothing is held, and the node answers as before."""
    print(f"LORIKEET_FUZZ_SEED={SEED}")
    counts: dict[str, int] = {}
    canary = pb.CompleteRequest(
        request=pb.GenerateRequest(
            prompt="a story", sampling=pb.SamplingParams(temperature=0, max_tokens=8, n=2)
        )
    ).SerializeToString()
    complete = rig.channel.unary_unary(PATH + "Complete")

    async def tokens() -> list[list[int]]:
        reply = pb.CompleteResponse.FromString(await complete(canary, metadata=AUTH, timeout=ANSWER_S))
        return [[token.id for token in sample.tokens] for sample in (reply, *reply.further_samples)]

    @seed(SEED)
    @settings(
        max_examples=num_examples, deadline=None, database=None,
        suppress_health_check=list(HealthCheck), phases=[Phase.generate, Phase.shrink],
    )  # fmt: skip
    @given(st.lists(calls(), min_size=3, max_size=6))
    def check(batch: list[RandomCall]) -> None:
        for reason in rig.run(rig.answers(batch)):
            counts[reason] = counts.get(reason, 0) + 1

    before = rig.run(tokens())
    check()
    rig.run(rig.at_rest())
    assert rig.run(tokens()) == before
    assert rig.engine.num_restarts == 0
    print(f"{sum(counts.values())} requests: {counts}")
    assert counts["OK"] > sum(counts.values()) / 4
