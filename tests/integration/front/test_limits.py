"""Every limit of the API: one more than it allows is refused with field, limit, value and maximum by name."""

import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from inference_service.api.convert_prompt import MAX_CHAT_JSON_BYTES, MAX_CHAT_MESSAGES, MAX_ROLE_LENGTH
from inference_service.api.generation_piece import MAX_REPLY_BYTES
from inference_service.api.reply_limits import MAX_PROMPT_LOGPROB_PAIRS
from lorikeet.inference.v1 import generation_pb2 as pb
from lorikeet_contract.status import StatusCode
from lorikeet_rpc.errors import RpcFailure, from_rpc_error
from lorikeet_rpc.wire_count import WireBounds
from tests.support.fake_engine import FakeEngine, make_info
from tests.support.node import ACME, RunningNode, auth, finished, make_request, run_node

pytestmark = pytest.mark.asyncio(loop_scope="module")
ROOT = Path(__file__).parents[3]
# A token a byte.
CONTEXT, VOCAB = 12_000, 9_000
PARTS = WireBounds()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def node(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningNode]:
    """A node whose engine allows a whole vocabulary's log-probabilities."""
    limits = {"max_context_tokens": CONTEXT, "max_top_logprobs": 10**6, "max_samples": 5}
    async with run_node(tmp_path_factory.mktemp("limits"), FakeEngine(make_info(VOCAB, **limits))) as running:
        yield running


def chat(*contents: str, role: str = "user", **fields: str) -> pb.ChatMessages:
    """Messages of one role."""
    return pb.ChatMessages(messages=[pb.ChatMessage(role=role, content=text) for text in contents], **fields)


def ids(count: int, token: int = 1) -> pb.TokenIds:
    """The same token many times."""
    return pb.TokenIds(ids=[token] * count)


JSON_TEXT = '{"a": "' + "x" * (MAX_CHAT_JSON_BYTES - 8) + '"}'
# Name: what is asked; field, limit, value, maximum.
REQUESTS: dict[str, tuple[Callable[[], pb.GenerateRequest], str, str, int, int]] = {
    "prompt of ids": (
        lambda: make_request(token_ids=ids(CONTEXT)), "token_ids", "max_context_tokens", CONTEXT, CONTEXT - 1,
    ),
    "prompt of text": (
        lambda: make_request("x" * CONTEXT), "prompt", "max_context_tokens", CONTEXT, CONTEXT - 1,
    ),
    "text longer than any that fits": (
        lambda: make_request("x" * (16 * CONTEXT + 1)), "prompt", "max_prompt_bytes", 16 * CONTEXT + 1,
        16 * CONTEXT,
    ),
    "rendered chat": (
        lambda: make_request(chat=chat("x" * CONTEXT)), "chat", "max_context_tokens", CONTEXT, CONTEXT - 1,
    ),
    "max_tokens": (
        lambda: make_request(max_tokens=CONTEXT + 1), "sampling.max_tokens", "max_context_tokens",
        CONTEXT + 1, CONTEXT,
    ),
    "max_tokens after the prompt": (
        lambda: make_request("ab", max_tokens=CONTEXT - 1), "sampling.max_tokens", "max_context_tokens",
        CONTEXT - 1, CONTEXT - 2,
    ),
    "min_tokens": (
        lambda: make_request(min_tokens=6, max_tokens=5), "sampling.min_tokens", "max_tokens", 6, 5,
    ),
    "n": (lambda: make_request(n=6), "sampling.n", "max_samples", 6, 5),
    "logprobs": (
        lambda: make_request(logprobs=VOCAB + 1), "sampling.logprobs", "max_top_logprobs", VOCAB + 1, VOCAB,
    ),
    "prompt_logprobs": (
        lambda: make_request(prompt_logprobs=VOCAB + 1), "sampling.prompt_logprobs", "max_top_logprobs",
        VOCAB + 1, VOCAB,
    ),
    "prompt_logprobs of a long prompt": (
        lambda: make_request(token_ids=ids(1000), prompt_logprobs=8001), "sampling.prompt_logprobs",
        "max_prompt_logprob_pairs", 8001, MAX_PROMPT_LOGPROB_PAIRS // 1000,
    ),
    "stop_strings": (
        lambda: make_request(stop_strings=list("abcde")), "sampling.stop_strings", "max_stop_strings", 5, 4,
    ),
    "stop string": (
        lambda: make_request(stop_strings=["a", "x" * 257]), "sampling.stop_strings[1]",
        "max_stop_string_length", 257, 256,
    ),
    "stop_token_ids": (
        lambda: make_request(stop_token_ids=[1] * 1025), "sampling.stop_token_ids", "max_stop_token_ids",
        1025, 1024,
    ),
    "unknown stop token": (
        lambda: make_request(stop_token_ids=[1, VOCAB]), "sampling.stop_token_ids[1]", "vocab_size", VOCAB,
        VOCAB - 1,
    ),
    "unknown prompt token": (
        lambda: make_request(token_ids=pb.TokenIds(ids=[1, VOCAB])), "token_ids[1]", "vocab_size", VOCAB,
        VOCAB - 1,
    ),
    "unknown biased token": (
        lambda: make_request(logit_bias={VOCAB: 1.0}), f"sampling.logit_bias[{VOCAB}]", "vocab_size",
        VOCAB, VOCAB - 1,
    ),
    "logit_bias": (
        lambda: make_request(logit_bias=dict.fromkeys(range(1025), 1.0)), "sampling.logit_bias",
        "max_logit_bias_tokens", 1025, 1024,
    ),
    "bad_words": (
        lambda: make_request(bad_words=["x"] * 129), "sampling.bad_words", "max_bad_words", 129, 128,
    ),
    "bad word": (
        lambda: make_request(bad_words=["x" * 257]), "sampling.bad_words[0]", "max_bad_word_length", 257, 256,
    ),
    "chat messages": (
        lambda: make_request(chat=chat(*["x"] * (MAX_CHAT_MESSAGES + 1))), "chat.messages",
        "max_chat_messages", MAX_CHAT_MESSAGES + 1, MAX_CHAT_MESSAGES,
    ),
    "role": (
        lambda: make_request(chat=chat("x", role="r" * (MAX_ROLE_LENGTH + 1))), "chat.messages[0].role",
        "max_role_length", MAX_ROLE_LENGTH + 1, MAX_ROLE_LENGTH,
    ),
    "chat's JSON": (
        lambda: make_request(chat=chat("x", template_arguments_json=JSON_TEXT)), "chat",
        "max_chat_json_bytes", MAX_CHAT_JSON_BYTES + 1, MAX_CHAT_JSON_BYTES,
    ),
    "fields of a message": (
        lambda: make_request(stop_strings=["ab"] * (PARTS.max_fields + 1)), "request", "max_message_fields",
        PARTS.max_fields + 1, PARTS.max_fields,
    ),
    "numbers of a message": (
        lambda: make_request(token_ids=ids(PARTS.max_packed_values + 1)), "ids", "max_packed_values",
        PARTS.max_packed_values + 1, PARTS.max_packed_values,
    ),
}  # fmt: skip
# Those that the engine alone can know, or that other tests enforce: the limit's name stands in the file.
ELSEWHERE = {
    "kv_cache_tokens": "tests/unit/inference_service/scheduler/test_scheduler.py",
    "max_waiting_requests": "tests/unit/inference_service/scheduler/test_samples.py",
    "max_waiting_logprobs": "tests/unit/inference_service/engine/test_output_buffer.py",
    "max_choices": "tests/unit/inference_service/api/test_convert_constraint.py",
    "max_constraint_bytes": "tests/unit/inference_service/api/test_convert_constraint.py",
}
_REPLIES = {"max_reply_bytes"}


async def refusal(call: Any) -> RpcFailure:
    """How a call is refused, as a client sees it."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 (grpc's own class, whose code is checked)
        await finished(call)
    return from_rpc_error(caught.value)  # pyright: ignore[reportArgumentType]


def check(failure: RpcFailure, field: str, limit: str, value: int, maximum: int) -> None:
    """All four are in the metadata, and the words say them, too."""
    assert (failure.code, failure.reason) == (StatusCode.INVALID_ARGUMENT, "LIMIT_EXCEEDED")
    assert failure.metadata == {
        "field": field, "limit": limit, "value": str(value), "maximum": str(maximum),
    }  # fmt: skip
    assert str(value) in failure.message
    # The context is told by what it holds, one token of it for the answer.
    assert str(maximum) in failure.message or str(CONTEXT) in failure.message


@pytest.mark.parametrize("name", REQUESTS)
async def test_one_more_than_the_limit(node: RunningNode, name: str) -> None:
    """Streaming and unary; the engine never hears of it."""
    make, *expected = REQUESTS[name]
    num_requests = len(node.engine.requests)
    request = make()
    if name == "logit_bias":
        assert len(request.sampling.logit_bias) == 1025
    check(await refusal(node.inference.Generate(request, metadata=auth(ACME))), *expected)
    complete = node.inference.Complete(pb.CompleteRequest(request=request), metadata=auth(ACME))
    check(await refusal(complete), *expected)
    assert len(node.engine.requests) == num_requests


async def test_replies_that_fit_no_message(node: RunningNode) -> None:
    """Complete counts all samples together."""
    each = 8 + 9 * 100
    tokens = MAX_REPLY_BYTES // each // 4 + 1
    fits = make_request(max_tokens=tokens, logprobs=100, n=2)
    complete = node.inference.Complete(
        pb.CompleteRequest(request=make_request(max_tokens=tokens, logprobs=100, n=4)), metadata=auth(ACME)
    )
    check(await refusal(complete), "request", "max_reply_bytes", 4 * tokens * each, MAX_REPLY_BYTES)
    reply = await node.inference.Complete(pb.CompleteRequest(request=fits), metadata=auth(ACME))
    assert len(reply.further_samples) == 1
    assert reply.ByteSize() <= 4 << 20


def limit_names() -> set[str]:
    """Of every limit that the front end, the scheduler or the wire's counter can name in an error."""
    files = [
        *(ROOT / "inference_service" / "api").glob("*.py"),
        ROOT / "inference_service" / "scheduler" / "admission.py",
        ROOT / "inference_service" / "engine" / "output_buffer.py",
        ROOT / "protos" / "lorikeet_rpc" / "wire_count.py",
    ]
    pattern = re.compile(r'"(max_[a-z_]+|vocab_size|kv_cache_tokens)"')
    return {name for file in files for name in pattern.findall(file.read_text())}


async def test_no_limit_is_forgotten() -> None:
    """Each has a case above or a test elsewhere, and a line in the document."""
    names = limit_names()
    assert len(names) >= 20
    assert names == {limit for _, _, limit, *_ in REQUESTS.values()} | set(ELSEWHERE) | _REPLIES
    for limit, file in ELSEWHERE.items():
        assert limit in (ROOT / file).read_text(), (limit, file)
    document = (ROOT / "docs" / "inference.md").read_text()
    assert [name for name in sorted(names) if f"`{name}`" not in document] == []
