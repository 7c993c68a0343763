"""Several samples of one prompt through gRPC, the engine process and a real model."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
import pytest_asyncio

from lorikeet.inference.v1 import generation_pb2 as pb
from lorikeet_bench.rigs import write_byte_tokenizer
from lorikeet_contract.status import StatusCode
from lorikeet_rpc.errors import RpcFailure, from_rpc_error
from tests.support.lone_node import lone_node
from tests.support.stack import Stack, make_request
from tests.support.tiny_gpt_oss import CONFIG, make_weights, write_gpt_oss

pytestmark = pytest.mark.asyncio(loop_scope="module")
VOCAB = CONFIG["vocab_size"]
LETTERS = [bytes([ord("A") + token]) for token in range(VOCAB)]
PROMPT = [(7 * i * i + 3 * i) % VOCAB for i in range(200)]
BLOCK_TOKENS, STEP_TOKENS = 16, 40
SHARED = (len(PROMPT) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
DRAWN = {"temperature": 1.3, "seed": 41, "max_tokens": 24, "ignore_eos": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """One node without a manager, whose steps are small and which remembers no prompt of other requests."""
    root = tmp_path_factory.mktemp("samples")
    model = write_gpt_oss(root / "model", make_weights(CONFIG))
    write_byte_tokenizer(model, VOCAB, LETTERS)
    flags = ["--max-step-tokens", str(STEP_TOKENS), "--no-prefix-cache", "--max-samples", "12"]
    async with lone_node(model, root, flags) as node:
        yield node.stack


@dataclass
class Sample:
    """What a stream brought of one sample."""

    text: str = ""
    tokens: list[pb.TokenInfo] = field(default_factory=list)
    finish: pb.Finish | None = None

    @property
    def ids(self) -> list[int]:
        """Token ids."""
        return [token.id for token in self.tokens]

    @property
    def reason(self) -> int:
        """Why it ended."""
        assert self.finish is not None
        return self.finish.reason


def folded(pieces: Sequence[pb.GenerateResponse]) -> list[Sample]:
    """By index; the sequence has no gap, and nothing follows a sample's finish."""
    assert [piece.sequence for piece in pieces] == list(range(len(pieces)))
    samples: dict[int, Sample] = {}
    for piece in pieces:
        sample = samples.setdefault(piece.index, Sample())
        assert sample.finish is None, "a piece after the finish"
        assert not (piece.prompt_tokens and piece.index)
        sample.text += piece.text_delta
        sample.tokens += piece.tokens
        sample.finish = piece.finish if piece.HasField("finish") else None
    return [samples[index] for index in range(len(samples))]


async def ask(stack: Stack, prompt: Sequence[int] = PROMPT, **sampling: Any) -> list[Sample]:
    """All samples of a request."""
    call = stack.inference().Generate(make_request(prompt, **sampling), metadata=stack.auth(), timeout=60)
    return folded([piece async for piece in call])


async def test_samples_are_those_of_their_seeds(stack: Stack) -> None:
    """Sample i is the request with seed + i, alone or beside others; each draws its own."""
    alone = [(await ask(stack, **{**DRAWN, "seed": 41 + i}))[0] for i in range(4)]
    samples, beside, _ = await asyncio.gather(
        ask(stack, **DRAWN, n=4), ask(stack, **DRAWN, n=2), ask(stack, PROMPT[:50], n=3, max_tokens=30)
    )
    assert [sample.ids for sample in samples] == [sample.ids for sample in alone]
    assert [sample.ids for sample in beside] == [sample.ids for sample in alone[:2]]
    assert len({tuple(sample.ids) for sample in samples}) == 4
    assert [sample.text for sample in samples] == [sample.text for sample in alone]


async def test_greedy_samples_are_alike(stack: Stack) -> None:
    """All the same, and the same as one."""
    (one,) = await ask(stack, max_tokens=20, ignore_eos=True)
    samples = await ask(stack, max_tokens=20, ignore_eos=True, n=3)
    assert [sample.ids for sample in samples] == [one.ids] * 3


async def test_a_long_prompt_is_computed_once(stack: Stack) -> None:
    """Eight samples take the steps of one prompt, not of eight, and the engine says what they shared."""
    before = await stack.status()
    await ask(stack, max_tokens=1)
    one = await stack.status()
    await ask(stack, max_tokens=1, n=8)
    eight = await stack.status()
    assert one.steps - before.steps == len(PROMPT) // STEP_TOKENS
    # Beside the prompt each of the others computes what is in no full block, eight tokens: 56 in two steps.
    assert eight.steps - one.steps <= len(PROMPT) // STEP_TOKENS + 2
    assert one.prefix_hit_tokens == before.prefix_hit_tokens
    assert eight.prefix_hit_tokens - one.prefix_hit_tokens == 7 * SHARED


async def test_usages_add_up(stack: Stack) -> None:
    """The prompt and its log-probabilities come once; every sample counts its own output."""
    request = make_request(PROMPT, **DRAWN, n=3, prompt_logprobs=1, logprobs=1)
    call = stack.inference().Generate(request, metadata=stack.auth(), timeout=60)
    pieces = [piece async for piece in call]
    samples = folded(pieces)
    usages = [sample.finish.usage for sample in samples if sample.finish]
    assert [usage.prompt_tokens for usage in usages] == [len(PROMPT), 0, 0]
    assert [usage.cached_tokens for usage in usages] == [0, 0, 0]
    assert [usage.output_tokens for usage in usages] == [len(sample.tokens) for sample in samples]
    prompt_tokens = [token for piece in pieces for token in piece.prompt_tokens]
    assert [token.id for token in prompt_tokens] == PROMPT
    for sample in samples:
        assert sample.finish is not None
        assert sample.finish.timings.decode_ms > 0
        assert all(token.HasField("logprob") for token in sample.tokens)


async def test_complete_has_all_samples(stack: Stack) -> None:
    """Sample 0 where one has always been, the others behind it."""
    samples = await ask(stack, **DRAWN, n=3)
    request = pb.CompleteRequest(request=make_request(PROMPT, **DRAWN, n=3, prompt_logprobs=0))
    reply = await stack.inference().Complete(request, metadata=stack.auth(), timeout=60)
    assert [s.index for s in reply.further_samples] == [1, 2]
    for got, sample in zip((reply, *reply.further_samples), samples, strict=True):
        assert (got.text, [token.id for token in got.tokens]) == (sample.text, sample.ids)
        assert (got.finish.reason, got.finish.usage.output_tokens) == (sample.reason, len(sample.ids))
    assert len(reply.prompt_tokens) == len(PROMPT)
    alone = await stack.inference().Complete(
        pb.CompleteRequest(request=make_request(PROMPT, **DRAWN)), metadata=stack.auth(), timeout=60
    )
    assert not alone.further_samples
    assert alone.text == reply.text


async def test_stop_strings_and_tokens_end_one_sample(stack: Stack) -> None:
    """The others go on to their own ends."""
    free = await ask(stack, **DRAWN, n=3)
    others = free[0].text + free[2].text
    own = [free[1].text[i : i + 3] for i in range(len(free[1].text) - 2)]
    stop = next(text for text in own[4:] if text not in others)
    samples = await ask(stack, **DRAWN, n=3, stop_strings=[stop])
    assert [sample.reason for sample in samples] == [
        pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_STOP_STRING, pb.FINISH_REASON_LENGTH,
    ]  # fmt: skip
    assert samples[1].text == free[1].text[: free[1].text.index(stop)]
    assert [samples[0].text, samples[2].text] == [free[0].text, free[2].text]
    stop_token = free[2].ids[5]
    ended = await ask(stack, **DRAWN, n=3, stop_token_ids=[stop_token])
    for sample, whole in zip(ended, free, strict=True):
        end = whole.ids.index(stop_token) + 1 if stop_token in whole.ids else len(whole.ids)
        assert sample.ids == whole.ids[:end]
    assert await stack.at_rest() == ""


async def test_abort_ends_all_samples(stack: Stack) -> None:
    """Each with its finish, the call with OK."""
    stub = stack.inference()
    request = make_request(PROMPT, **{**DRAWN, "max_tokens": 300}, n=4, request_id="many")
    call = stub.Generate(request, metadata=stack.auth(), timeout=60)
    pieces = [await call.read()]
    assert (await stub.Abort(pb.AbortRequest(request_id="many"), metadata=stack.auth(), timeout=10)).aborted
    while (piece := await call.read()) is not grpc.aio.EOF:
        pieces.append(piece)
    assert [sample.reason for sample in folded(pieces)] == [pb.FINISH_REASON_ABORTED] * 4
    assert await call.code() is grpc.StatusCode.OK
    assert await stack.at_rest() == ""


async def test_a_client_that_leaves_ends_all_samples(stack: Stack) -> None:
    """At the first piece; nothing stays behind."""
    call = stack.inference().Generate(
        make_request(PROMPT, **{**DRAWN, "max_tokens": 300}, n=12), metadata=stack.auth(), timeout=60
    )
    await call.read()
    call.cancel()
    assert await stack.at_rest() == ""


async def failure(stack: Stack, **sampling: Any) -> RpcFailure:
    """How a request is refused."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(stack, **sampling)
    return from_rpc_error(caught.value)


async def test_too_many_samples_are_refused_by_name(stack: Stack) -> None:
    """The limit is among GetModel's."""
    maximum = (await stack.model()).limits.max_samples
    assert maximum == 12
    refused = await failure(stack, n=maximum + 1, max_tokens=1)
    assert (refused.code, refused.reason) == (StatusCode.INVALID_ARGUMENT, "LIMIT_EXCEEDED")
    assert refused.metadata == {
        "field": "sampling.n", "limit": "max_samples", "value": "13", "maximum": "12",
    }  # fmt: skip
    refused = await failure(stack, n=0, max_tokens=1)
    assert (refused.reason, refused.metadata["field"]) == ("INVALID_REQUEST", "sampling.n")
