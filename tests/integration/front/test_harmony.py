"""A gpt-oss that speaks Harmony, through gRPC: template arguments in, channels out, tokens that stop."""

import json
from collections.abc import AsyncIterator
from datetime import date, datetime
from itertools import pairwise
from typing import Any

import grpc
import pytest
import pytest_asyncio

from lorikeet.inference.v1 import generation_pb2
from tests.support.harmony import CASES, EXPECTED, NOW, SPECIAL, write_harmony_model
from tests.support.stack import Completion, Stack

pytestmark = pytest.mark.asyncio(loop_scope="module")
# After "<|start|>assistant", whose last token is "t"; and what a test sends to reach the other two ends.
_ANSWER = ["t", "<|channel|>", "f", "i", "n", "a", "l", "<|message|>", "O", "k", "<|return|>"]
FOLLOWED_BY = {**dict(pairwise(_ANSWER)), "}": "<|call|>", "!": "<|endoftext|>"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """Both services over the model."""
    root = tmp_path_factory.mktemp("harmony")
    async with Stack(write_harmony_model(root / "model", FOLLOWED_BY), root / "stack") as running:
        yield running


def chat_of(case: dict[str, Any]) -> generation_pb2.ChatMessages:
    """A fixture's case as a client sends it."""
    messages = [
        generation_pb2.ChatMessage(
            role=m["role"],
            content=m["content"],
            fields_json=json.dumps({k: v for k, v in m.items() if k not in ("role", "content")}),
        )
        for m in case["messages"]
    ]
    return generation_pb2.ChatMessages(
        messages=messages,
        add_generation_prompt=case["add_generation_prompt"],
        template_arguments_json=json.dumps(case["arguments"]),
    )


async def tokenize(stack: Stack, case: dict[str, Any]) -> generation_pb2.TokenizeResponse:
    """The chat as the model reads it."""
    request = generation_pb2.TokenizeRequest(chat=chat_of(case))
    return await stack.inference().Tokenize(request, metadata=stack.auth(), timeout=20)


async def answer(stack: Stack, case: dict[str, Any], **sampling: Any) -> Completion:
    """The greedy answer to a chat."""
    request = generation_pb2.GenerateRequest(
        chat=chat_of(case), sampling=generation_pb2.SamplingParams(temperature=0, max_tokens=30, **sampling)
    )
    out = Completion()
    async for piece in stack.inference().Generate(request, metadata=stack.auth(), timeout=60):
        out.text += piece.text_delta
        out.token_ids += [token.id for token in piece.tokens]
        if piece.HasField("finish"):
            out.finish = piece.finish
    return out


def today() -> date:
    """As the template's strftime_now reads it."""
    return datetime.now().date()  # noqa: DTZ005 (the machine's local date)


def on(day: date, rendered: str) -> str:
    """The expected text, its fixed date replaced."""
    return rendered.replace(f"{datetime.fromisoformat(NOW):%Y-%m-%d}", f"{day:%Y-%m-%d}")


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["name"])
async def test_the_template_gets_everything(stack: Stack, case: dict[str, Any]) -> None:
    """Efforts, tools, tool calls and thoughts: the text that transformers renders, or its refusal."""
    expected = EXPECTED[case["name"]]
    if "error" in expected:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await tokenize(stack, case)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert expected["error"] in str(caught.value.details())
        return
    before = today()
    reply = await tokenize(stack, case)
    days = {before, today()}  # the service reads its clock somewhere between
    assert reply.rendered in {on(day, expected["rendered"]) for day in days}
    assert len(reply.ids) == len(expected["ids"])


@pytest.mark.parametrize(
    ("sampling", "text"),
    [
        ({}, "finalOk"),
        ({"skip_special_tokens": False}, "<|channel|>final<|message|>Ok"),
        (
            {"skip_special_tokens": False, "include_stop_string": True},
            "<|channel|>final<|message|>Ok<|return|>",
        ),
    ],
)
async def test_channels_are_seen_on_request(stack: Stack, sampling: dict[str, Any], text: str) -> None:
    """Without special tokens the channel's name runs into the answer; with them a client takes it apart."""
    case = CASES[0]
    done = await answer(stack, case, **sampling)
    assert done.text == text
    assert done.finish is not None
    assert done.finish.reason == generation_pb2.FINISH_REASON_STOP_TOKEN
    assert done.finish.stop_token_id == SPECIAL["<|return|>"]
    assert done.finish.usage.prompt_tokens == len(EXPECTED[case["name"]]["ids"])
    assert done.token_ids[0] == SPECIAL["<|channel|>"]
    assert done.token_ids[-1] == SPECIAL["<|return|>"]


@pytest.mark.parametrize(
    ("prompt", "token"), [("}", "<|call|>"), ("!", "<|endoftext|>"), ("k", "<|return|>")]
)
async def test_each_end_of_sequence_token_stops(stack: Stack, prompt: str, token: str) -> None:
    """generation_config.json lists three; all stop, and none where the caller says so."""
    done = await stack.generate(prompt, max_tokens=5)
    assert (done.token_ids, done.text) == ([SPECIAL[token]], "")
    assert done.finish is not None
    assert done.finish.stop_token_id == SPECIAL[token]
    ignored = await stack.generate(prompt, max_tokens=5, ignore_eos=True, skip_special_tokens=False)
    assert ignored.text == 5 * token
    assert ignored.finish is not None
    assert ignored.finish.reason == generation_pb2.FINISH_REASON_LENGTH
