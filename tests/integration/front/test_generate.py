"""Generation through the whole front end: text, stop strings, errors, limits of messages."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from inference_service.domain.request import EngineRequest
from lorikeet.inference.v1 import generation_pb2, model_pb2
from lorikeet_rpc.errors import RpcFailure, from_rpc_error
from tests.support.fake_engine import EOS, FakeEngine, make_info
from tests.support.node import (
    ACME,
    ADMIN,
    DIGEST,
    NODE_TOKEN,
    OTHER,
    OTHERS,
    SECOND,
    auth,
    code_of,
    finished,
    make_request,
    run_node,
    text_of,
)
from tests.support.waiting import eventually


def answering(data: bytes, *, end: bool = True) -> FakeEngine:
    """An engine that says `data`, then ends."""
    engine = FakeEngine()

    def script(request: EngineRequest) -> Iterator[int]:
        yield from data
        while True:
            yield EOS if end else data[-1]

    engine.script = script
    return engine


async def failure_of(call: Any) -> RpcFailure:
    """How a call fails."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await finished(call)
    return from_rpc_error(caught.value)


async def test_stream_of_deltas(tmp_path: Path) -> None:
    """Sequence numbers, one request id, tokens with their bytes, and a finish with everything in it."""
    async with run_node(tmp_path, answering("naïve".encode())) as node:
        messages = await node.generate(
            make_request("ab", max_tokens=50, adapter="pirate@prod", request_id="r1")
        )
    assert text_of(messages) == "naïve"
    assert [m.sequence for m in messages] == list(range(len(messages)))
    assert {m.request_id for m in messages} == {"r1"}
    tokens = [t for m in messages for t in m.tokens]
    assert b"".join(t.text_bytes for t in tokens[:-1]) == "naïve".encode()
    assert all(not m.HasField("finish") for m in messages[:-1])
    finish = messages[-1].finish
    assert finish.reason == generation_pb2.FINISH_REASON_STOP_TOKEN
    assert finish.stop_token_id == EOS
    assert (finish.usage.prompt_tokens, finish.usage.cached_tokens, finish.usage.output_tokens) == (2, 1, 7)
    assert (finish.timings.queue_ms, finish.timings.decode_ms) == (1, 4)
    assert finish.adapter.revision == f"tenants/acme/adapters/pirate/revisions/{DIGEST}"
    assert finish.adapter.tier_hit == generation_pb2.ADAPTER_TIER_HOST


async def test_base_model_has_no_adapter_in_its_finish(tmp_path: Path) -> None:
    """Unset means base, and the reply says so by leaving the adapter out."""
    async with run_node(tmp_path) as node:
        messages = await node.generate(make_request())
        assert [r.digest for r in node.engine.requests.values()] == [None]
    assert not messages[-1].finish.HasField("adapter")


async def test_engine_gets_what_was_asked(tmp_path: Path) -> None:
    """Sampling, tenant, digest and deadline arrive at the engine."""
    async with run_node(tmp_path) as node:
        request = make_request(
            temperature=0.5,
            top_p=0.9,
            top_k=7,
            seed=11,
            max_tokens=3,
            stop_token_ids=[9],
            logprobs=2,
            adapter="pirate",
        )
        await node.generate(request, timeout_s=30)
        (seen,) = node.engine.requests.values()
    assert (seen.tenant, seen.digest, seen.prompt_token_ids) == ("acme", SECOND, (97, 98))
    assert seen.deadline_s is not None
    assert (seen.sampling.temperature, seen.sampling.top_k, seen.sampling.seed) == (0.5, 7, 11)
    assert seen.sampling.stop_token_ids == (EOS, 9)


@pytest.mark.parametrize("include", [False, True])
async def test_stop_string_over_tokens(tmp_path: Path, include: bool) -> None:
    """Caught, not leaked; the engine is told to stop; usage counts up to the token that completed it."""
    async with run_node(tmp_path, answering(b"say STOP and more", end=False)) as node:
        request = make_request(max_tokens=500, stop_strings=["STOP"], include_stop_string=include)
        messages = await node.generate(request)
        assert not node.engine.running
    assert text_of(messages) == ("say STOP" if include else "say ")
    finish = messages[-1].finish
    assert (finish.reason, finish.stop_string) == (generation_pb2.FINISH_REASON_STOP_STRING, "STOP")
    assert finish.usage.output_tokens == len("say STOP")
    assert not finish.HasField("stop_token_id")


async def test_characters_are_never_cut(tmp_path: Path) -> None:
    """max_tokens inside a character: one U+FFFD at the end, no error, every delta valid."""
    async with run_node(tmp_path, answering("a🚢b".encode())) as node:
        messages = await node.generate(make_request(max_tokens=3))
    assert [m.text_delta for m in messages if m.text_delta] == ["a", "\ufffd"]
    assert messages[-1].finish.reason == generation_pb2.FINISH_REASON_LENGTH


async def test_complete_equals_the_stream(tmp_path: Path) -> None:
    """Unary and streaming say the same."""
    async with run_node(tmp_path, answering("東京 é".encode())) as node:
        request = make_request(max_tokens=50, logprobs=2, prompt_logprobs=1)
        messages = await node.generate(request)
        reply = await node.inference.Complete(
            generation_pb2.CompleteRequest(request=request), metadata=auth(ACME)
        )
    assert reply.text == text_of(messages) == "東京 é"
    assert list(reply.tokens) == [t for m in messages for t in m.tokens]
    assert list(reply.prompt_tokens) == [t for m in messages for t in m.prompt_tokens]
    assert reply.finish.usage == messages[-1].finish.usage
    first, second = reply.prompt_tokens
    assert not first.HasField("logprob")
    assert second.HasField("logprob")
    assert len(second.top_logprobs) == 1


async def test_chat_goes_through_the_template(tmp_path: Path) -> None:
    """The rendered chat is what the engine sees, and Tokenize shows it."""
    chat = generation_pb2.ChatMessages(messages=[generation_pb2.ChatMessage(role="user", content="hey")])
    async with run_node(tmp_path) as node:
        await node.generate(make_request(chat=chat))
        (seen,) = node.engine.requests.values()
        reply = await node.inference.Tokenize(generation_pb2.TokenizeRequest(chat=chat), metadata=auth(ACME))
    assert bytes(seen.prompt_token_ids) == b"hey"
    assert (reply.rendered, list(reply.ids), list(reply.token_bytes)) == (
        "hey",
        [*b"hey"],
        [b"h", b"e", b"y"],
    )


@pytest.mark.parametrize(
    "name",
    [
        "never",
        "acme/never",
        "pirate@never",
        "pirate@lost",
        "unready",
        "Pirate",
        "pirate ",
        "other/secret",
        "fake",
        "base",
        f"tenants/acme/adapters/pirate/revisions/{OTHERS}",
        "a\nb",
        "x" * 5000,
    ],
)
async def test_unknown_adapters_are_not_found(tmp_path: Path, name: str) -> None:
    """Never the base model: unknown, alien, unready and misspelt names, streaming and unary."""
    async with run_node(tmp_path) as node:
        request = make_request(adapter=name)
        failure = await failure_of(node.inference.Generate(request, metadata=auth(ACME)))
        assert (failure.code.value, failure.metadata["field"]) == ("NOT_FOUND", "adapter")
        assert failure.metadata["value"]
        complete = node.inference.Complete(
            generation_pb2.CompleteRequest(request=request), metadata=auth(ACME)
        )
        assert await code_of(complete) is grpc.StatusCode.NOT_FOUND
        assert not node.engine.requests


async def test_names_of_other_tenants(tmp_path: Path) -> None:
    """A tenant's own spelling works; an admin may use another tenant's; errors do not tell them apart."""
    async with run_node(tmp_path) as node:
        mine = await node.generate(make_request(adapter="secret"), OTHER)
        admin = await node.generate(make_request(adapter="other/secret"), ADMIN)
        assert mine[-1].finish.adapter.digest == admin[-1].finish.adapter.digest == OTHERS
        alien = await failure_of(
            node.inference.Generate(make_request(adapter="other/secret"), metadata=auth(ACME))
        )
        nobody = await failure_of(
            node.inference.Generate(make_request(adapter="other/nobody"), metadata=auth(ACME))
        )
    assert alien.message.replace("secret", "nobody") == nobody.message


async def test_empty_adapter_is_invalid(tmp_path: Path) -> None:
    """Set but empty is a mistake of the caller."""
    async with run_node(tmp_path) as node:
        failure = await failure_of(node.inference.Generate(make_request(adapter=""), metadata=auth(ACME)))
    assert (failure.code.value, failure.metadata["field"]) == ("INVALID_ARGUMENT", "adapter")


async def test_before_the_first_catalog(tmp_path: Path) -> None:
    """UNAVAILABLE with a retry time; the manager gets in; without a token it is UNAUTHENTICATED."""
    async with run_node(tmp_path, with_catalog=False) as node:
        failure = await failure_of(node.inference.Generate(make_request(), metadata=auth(ACME)))
        assert (failure.code.value, failure.reason) == ("UNAVAILABLE", "NOT_READY")
        assert failure.retry_after_s
        reply = await node.inference.GetModel(model_pb2.GetModelRequest(), metadata=auth(NODE_TOKEN))
        assert reply.name == "fake"
        assert (await failure_of(node.inference.Generate(make_request()))).code.value == "UNAUTHENTICATED"


async def test_static_tenants_need_no_manager(tmp_path: Path) -> None:
    """A bench's tenant works without any catalog, adapters aside."""
    async with run_node(tmp_path, with_catalog=False, static_tenants={"demo": "bench"}) as node:
        assert text_of(await node.generate(make_request(), "bench")) == "bbbbb"
        failure = await failure_of(node.inference.Generate(make_request(adapter="x"), metadata=auth("bench")))
        assert failure.code.value == "NOT_FOUND"


@pytest.mark.parametrize("token", ["wrong", NODE_TOKEN, ACME + "x", ""])
async def test_wrong_tokens(tmp_path: Path, token: str) -> None:
    """Only a tenant's token generates; the node token does not."""
    async with run_node(tmp_path) as node:
        code = await code_of(node.inference.Generate(make_request(), metadata=auth(token)))
    assert code is grpc.StatusCode.UNAUTHENTICATED


async def test_duplicate_request_id(tmp_path: Path) -> None:
    """Unique among a tenant's running requests; free again afterwards, and for other tenants."""
    async with run_node(tmp_path) as node:
        node.engine.held = asyncio.Event()
        first = asyncio.create_task(node.generate(make_request(request_id="same")))
        await eventually(lambda: node.engine.running)
        failure = await failure_of(
            node.inference.Generate(make_request(request_id="same"), metadata=auth(ACME))
        )
        assert failure.reason == "DUPLICATE_REQUEST"
        other = asyncio.create_task(node.generate(make_request(request_id="same"), OTHER))
        await asyncio.sleep(0.05)
        node.engine.held.set()
        await first
        await other
        await node.generate(make_request(request_id="same"))


async def test_two_million_tokens_are_refused_for_their_length(tmp_path: Path) -> None:
    """The message arrives, and the error names the context, not the message's size."""
    ids = generation_pb2.TokenIds(ids=[299] * 2_000_000)
    async with run_node(tmp_path) as node:
        failure = await failure_of(node.inference.Generate(make_request(token_ids=ids), metadata=auth(ACME)))
    assert (failure.code.value, failure.reason) == ("INVALID_ARGUMENT", "LIMIT_EXCEEDED")
    assert failure.metadata == {
        "field": "token_ids",
        "limit": "max_context_tokens",
        "value": "2000000",
        "maximum": "9999",
    }


async def test_a_huge_text_is_refused_before_it_is_tokenized(tmp_path: Path) -> None:
    """Longer than any text that could fit: no work for the tokenizer."""
    async with run_node(tmp_path) as node:
        failure = await failure_of(
            node.inference.Generate(make_request("x" * 5_000_000), metadata=auth(ACME))
        )
    assert failure.metadata["limit"] == "max_prompt_bytes"


async def test_whole_vocabulary_log_probabilities_stay_below_the_default_limit(tmp_path: Path) -> None:
    """150,000 log-probabilities for each prompt and output token: many messages, none above 4 MiB."""
    engine = FakeEngine(make_info(150_000, max_top_logprobs=150_000))
    async with run_node(tmp_path, engine) as node:
        request = make_request("abc", max_tokens=1, logprobs=150_000, prompt_logprobs=150_000)
        messages = await node.generate(request)
    assert max(m.ByteSize() for m in messages) < 4 << 20
    prompt = [t for m in messages for t in m.prompt_tokens]
    assert [len(t.top_logprobs) for t in prompt] == [0, 150_000, 150_000]
    assert [t.id for t in prompt] == [*b"abc"]
    assert [len(t.top_logprobs) for m in messages for t in m.tokens] == [150_000]
    assert [m.sequence for m in messages] == list(range(len(messages)))


async def test_a_long_unary_reply(tmp_path: Path) -> None:
    """20 log-probabilities for 8000 tokens fit one message of a default client."""
    async with run_node(tmp_path) as node:
        request = generation_pb2.CompleteRequest(request=make_request(max_tokens=8000, logprobs=20))
        reply = await node.inference.Complete(request, metadata=auth(ACME))
    assert len(reply.tokens) == 8000
    assert reply.ByteSize() < 4 << 20


async def test_unary_replies_that_cannot_fit_are_refused_with_advice(tmp_path: Path) -> None:
    """At once where max_tokens tells, else when the reply has grown too large; the work stops."""
    engine = FakeEngine(make_info(150_000, max_top_logprobs=150_000))
    async with run_node(tmp_path, engine) as node:
        early = generation_pb2.CompleteRequest(request=make_request(max_tokens=9000, logprobs=1000))
        failure = await failure_of(node.inference.Complete(early, metadata=auth(ACME)))
        assert (failure.reason, failure.metadata["limit"]) == ("LIMIT_EXCEEDED", "max_reply_bytes")
        assert "Generate" in failure.message
        assert not engine.requests
        late = generation_pb2.CompleteRequest(request=make_request(max_tokens=None, logprobs=10_000))
        failure = await failure_of(node.inference.Complete(late, metadata=auth(ACME)))
        assert "Generate" in failure.message
        assert not engine.running


async def test_tokenize_replies_that_cannot_fit(tmp_path: Path) -> None:
    """The advice is to send parts."""
    engine = FakeEngine(make_info(max_context_tokens=1_000_000))
    async with run_node(tmp_path, engine) as node:
        request = generation_pb2.TokenizeRequest(prompt="x" * 1_200_000)
        failure = await failure_of(node.inference.Tokenize(request, metadata=auth(ACME)))
    assert "in parts" in failure.message


async def test_model_shows_every_field(tmp_path: Path) -> None:
    """Limits, schema with its digest, counters."""
    async with run_node(tmp_path) as node:
        reply = await node.inference.GetModel(model_pb2.GetModelRequest(), metadata=auth(ACME))
    assert (reply.vocab_size, reply.instance_id, reply.base_digest) == (300, "fake-1", "b" * 64)
    assert reply.limits.max_context_tokens == 10_000
    assert reply.lora_schema.sites[0].key == "lm_head"
    assert reply.status.kv_blocks_total == 100


async def test_defaults_of_the_model(tmp_path: Path) -> None:
    """generation_config.json gives defaults, unless the node was told not to use it."""
    config = '{"temperature": 0.25, "top_k": 5, "max_new_tokens": 4}'
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "generation_config.json").write_text(config)
    bare = generation_pb2.GenerateRequest(prompt="ab")
    async with run_node(tmp_path) as node:
        messages = await node.generate(bare)
        (seen,) = node.engine.requests.values()
    assert (seen.sampling.temperature, seen.sampling.top_k, len(messages)) == (0.25, 5, 4)
    async with run_node(tmp_path, generation_config="none") as node:
        await node.generate(make_request(max_tokens=1, temperature=None))
        (seen,) = node.engine.requests.values()
    assert (seen.sampling.temperature, seen.sampling.top_k) == (1.0, 0)


async def test_seeds_are_drawn_anew(tmp_path: Path) -> None:
    """Without a seed each request has its own random stream."""
    async with run_node(tmp_path) as node:
        await node.generate(make_request())
        await node.generate(make_request())
        one, two = (r.sampling.seed for r in node.engine.requests.values())
    assert one != two


async def test_hostile_names_reach_neither_model_nor_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Every bad name is an error, and none of them can write a line of its own into the log."""
    names = json.loads(
        (Path(__file__).parents[2] / "fixtures" / "adapters_bad" / "bad_names.json").read_text()
    )
    flat = [n for n in (names if isinstance(names, list) else names["names"]) if isinstance(n, str)]
    assert len(flat) > 5
    async with run_node(tmp_path) as node:
        for name in flat:
            try:
                request = make_request(adapter=name)
            except (UnicodeEncodeError, ValueError):
                continue  # no proto string can hold it
            code = await code_of(node.inference.Generate(request, metadata=auth(ACME)))
            assert code in {grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT}, name
        assert not node.engine.requests
    written = "".join(capfd.readouterr())
    assert all(c.isprintable() or c in "\n\x1b" for c in written)
