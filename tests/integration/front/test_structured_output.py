"""Structured output through gRPC and the engine process; answers are judged by jsonschema, re and lark."""

import asyncio
import random
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from inference_service.text.tokenizer import Tokenizer
from lorikeet.inference.v1 import generation_pb2 as pb
from tests.support.lone_node import lone_node
from tests.support.stack import Completion, Stack, make_request
from tests.support.structured_cases import constraints, satisfies, schema_of

pytestmark = pytest.mark.asyncio(loop_scope="module")
MODEL = Path(__file__).parents[2] / "fixtures" / "models" / "mixtral"
TOKENIZER = Tokenizer.from_directory(MODEL)
EOS = 2
PROMPT = [5, 60, 200, 7]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """One node without a manager."""
    root = tmp_path_factory.mktemp("structured")
    async with lone_node(MODEL, root, ["--max-running-requests", "8"]) as node:
        yield node.stack


async def ask(stack: Stack, output: pb.StructuredOutput | None, **sampling: Any) -> Completion:
    """One answer of a hot model, unless `sampling` says otherwise."""
    values = {"max_tokens": 200, "temperature": 1.5, "seed": 1, **sampling}
    return await stack.generate(PROMPT, structured_output=output, **values)


def check_ended(done: Completion) -> None:
    """By an end-of-sequence token that is not in the text."""
    assert done.finish is not None
    assert (done.finish.reason, done.finish.stop_token_id) == (pb.FINISH_REASON_STOP_TOKEN, EOS), done
    assert done.token_ids[-1] == EOS
    assert done.text == TOKENIZER.decode(done.token_ids[:-1], skip_special_tokens=True)


async def test_every_kind_beside_others(stack: Stack) -> None:
    """Mixed batches of all kinds; each answer is what was asked for."""
    outputs = constraints(random.Random(0), 40)
    answers = await asyncio.gather(*(ask(stack, output, seed=seed) for seed, output in enumerate(outputs)))
    for output, done in zip(outputs, answers, strict=True):
        check_ended(done)
        assert satisfies(done.text, output), (done.text, output)


async def test_greedy_and_cut_distributions(stack: Stack) -> None:
    """Temperature 0, top_k, top_p and min_p take their tokens from what the mask leaves."""
    output = schema_of(PERSON)
    for cuts in ({"temperature": 0.0}, {"top_k": 1}, {"top_k": 5, "top_p": 0.5}, {"min_p": 0.9}):
        done = await ask(stack, output, **cuts)
        check_ended(done)
        assert satisfies(done.text, output)
    assert (await ask(stack, output, top_k=1)).text == (await ask(stack, output, temperature=0.0)).text


async def test_the_mask_wins(stack: Stack) -> None:
    """Biases, penalties and bad words choose among what is allowed, and bring nothing that is not.

    Of digits, which this tokenizer never merges.
    """
    output = pb.StructuredOutput(regex="[01]{3}")
    zero, one, two = (TOKENIZER.encode(digit, add_special_tokens=False)[0] for digit in "012")
    done = await ask(stack, output, logit_bias={two: 100.0, EOS: 100.0, one: 50.0}, temperature=0.0)
    check_ended(done)
    assert done.text == "111"
    done = await ask(stack, output, bad_words=["0"], presence_penalty=2.0, repetition_penalty=1.9)
    check_ended(done)
    assert done.text == "111"
    free = pb.StructuredOutput(regex="[01]{3}2{0,9}")
    done = await ask(stack, free, logit_bias={zero: -100.0, two: 100.0}, temperature=0.0)
    check_ended(done)
    assert done.text == "111222222222"


async def test_nothing_is_left(stack: Stack) -> None:
    """Bad words that mask all that is allowed end the request with a status that names them."""
    output = pb.StructuredOutput(choice=pb.Choices(values=["a"]))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(stack, output, bad_words=["a"])
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "bad_words" in (caught.value.details() or "")
    # In the midst of an answer what was streamed stays valid.
    request = make_request(
        PROMPT, structured_output=pb.StructuredOutput(regex="b{3}a"), bad_words=["a"], max_tokens=9
    )
    text = ""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for piece in stack.inference().Generate(request, metadata=stack.auth(), timeout=60):
            text += piece.text_delta
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert text == "bbb"


async def test_a_grammar_that_grows_too_complex(stack: Stack) -> None:
    """A limit of the matcher's work ends the one request; the others go on."""
    hostile = pb.StructuredOutput(grammar='start: "a"{1000000000}')
    good = schema_of(PERSON)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(stack, hostile)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "too complex" in (caught.value.details() or "")
    check_ended(await ask(stack, good))


async def test_min_tokens_and_ignore_eos(stack: Stack) -> None:
    """They put the end off as far as the grammar goes on, and no further."""
    for sampling in ({"min_tokens": 30}, {"ignore_eos": True}, {"ignore_eos": True, "min_tokens": 30}):
        done = await ask(stack, pb.StructuredOutput(regex="a{1,20}"), temperature=0.0, **sampling)
        check_ended(done)
        assert done.text == "a" * 20
        done = await ask(stack, pb.StructuredOutput(choice=pb.Choices(values=["a", "ab"])), **sampling)
        check_ended(done)
        assert done.text == "ab"
    done = await ask(stack, pb.StructuredOutput(regex="a*"), ignore_eos=True, max_tokens=12)
    assert done.finish is not None
    assert done.finish.reason == pb.FINISH_REASON_LENGTH
    assert set(done.text) == {"a"}


async def test_other_ends(stack: Stack) -> None:
    """max_tokens, stop strings and stop tokens cut an answer off; the end itself may be the last token."""
    output = pb.StructuredOutput(regex="abcabc")
    whole = await ask(stack, output)
    check_ended(whole)
    assert whole.text == "abcabc"
    ids = whole.token_ids
    for count in range(1, len(ids)):
        done = await ask(stack, output, max_tokens=count)
        assert done.finish is not None
        assert (done.finish.reason, done.token_ids) == (pb.FINISH_REASON_LENGTH, ids[:count])
    check_ended(await ask(stack, output, max_tokens=len(ids)))
    done = await ask(stack, output, stop_strings=["ca"])
    assert done.finish is not None
    assert (done.finish.reason, done.text) == (pb.FINISH_REASON_STOP_STRING, "ab")
    done = await ask(stack, output, stop_token_ids=[ids[1]])
    assert done.finish is not None
    assert (done.finish.stop_token_id, done.token_ids) == (ids[1], ids[:2])


async def test_logprobs_are_the_models_own(stack: Stack) -> None:
    """Before the mask: those of the same tokens as a prompt."""
    output = pb.StructuredOutput(regex="[a-z]{6}")
    done = await ask(stack, output, logprobs=3)
    check_ended(done)
    again = await stack.generate([*PROMPT, *done.token_ids], max_tokens=1, prompt_logprobs=3)
    for token, other in zip(done.tokens, again.prompt_tokens[len(PROMPT) :], strict=True):
        assert token.id == other.id
        assert token.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [top.id for top in token.top_logprobs] == [top.id for top in other.top_logprobs]
    assert any(t.id not in {top.id for top in t.top_logprobs} for t in done.tokens)  # the model wants others


async def test_others_in_the_batch_are_as_alone(stack: Stack) -> None:
    """Requests without structured output get the same tokens and the same bits beside it; seeds hold."""

    async def plain(seed: int) -> Completion:
        return await ask(stack, None, seed=seed, max_tokens=24, logprobs=2, ignore_eos=True)

    alone = [await plain(seed) for seed in range(3)]
    output = schema_of(PERSON)
    answers = [await ask(stack, output, seed=seed) for seed in range(4)]
    mixed = await asyncio.gather(
        *(ask(stack, output, seed=seed) for seed in range(4)), *(plain(seed) for seed in range(3))
    )
    assert [done.token_ids for done in mixed[:4]] == [done.token_ids for done in answers]
    assert [done.token_ids for done in mixed[4:]] == [done.token_ids for done in alone]


async def test_samples(stack: Stack) -> None:
    """N answers, each by a matcher of its own."""
    output = schema_of(PERSON)
    request = make_request(PROMPT, structured_output=output, n=4, seed=3, temperature=1.5, max_tokens=200)
    texts = [""] * 4
    async for piece in stack.inference().Generate(request, metadata=stack.auth(), timeout=60):
        texts[piece.index] += piece.text_delta
    assert all(satisfies(text, output) for text in texts)
    assert len(set(texts)) > 1
    assert texts[0] == (await ask(stack, output, seed=3)).text


async def test_json_objects(stack: Stack) -> None:
    """Any object; a random model may not find its end, but what ends is one."""
    brace = TOKENIZER.encode("}", add_special_tokens=False)[0]
    output = pb.StructuredOutput(json_object=True, disable_any_whitespace=True)
    answers = await asyncio.gather(
        *(ask(stack, output, seed=seed, logit_bias={brace: 6.0}, max_tokens=120) for seed in range(8))
    )
    ended = [done for done in answers if done.finish and done.finish.reason == pb.FINISH_REASON_STOP_TOKEN]
    assert ended
    for done in ended:
        assert satisfies(done.text, output)
        assert not re.search(r"\s", re.sub(r'"(\\.|[^"\\])*"', "", done.text))
    spaced = await ask(stack, pb.StructuredOutput(json_object=True), max_tokens=40, logit_bias={brace: 20.0})
    assert satisfies(spaced.text, output)


@pytest.mark.parametrize(
    ("output", "field", "words"),
    [
        (pb.StructuredOutput(), "", "set one of"),
        (pb.StructuredOutput(regex="(a"), ".regex", "unclosed group"),
        (pb.StructuredOutput(grammar="start: x"), ".grammar", "unknown name"),
        (pb.StructuredOutput(json_schema="{"), ".json_schema", "line 1"),
        (
            pb.StructuredOutput(json_schema='{"$ref": "http://127.0.0.1/x.json"}'),
            ".json_schema",
            "retrieving it failed",
        ),
        (pb.StructuredOutput(json_schema='{"type": "sting"}'), ".json_schema", "sting"),
        (pb.StructuredOutput(choice=pb.Choices(values=[""])), ".choice.values[0]", "empty"),
        (pb.StructuredOutput(regex="a" * 300_000), ".regex", "max_constraint_bytes"),
    ],
)
async def test_refused_before_acceptance(
    stack: Stack, output: pb.StructuredOutput, field: str, words: str
) -> None:
    """INVALID_ARGUMENT with the field's name and llguidance's words."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(stack, output)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    details = caught.value.details() or ""
    assert details.startswith(f"sampling.structured_output{field} ")
    assert words in details


async def test_abort_and_disconnect(stack: Stack) -> None:
    """Nothing is left of requests that end in any state, compiling included."""
    for number in range(6):
        request = make_request(
            PROMPT,
            structured_output=pb.StructuredOutput(regex=f"[a-z]{{{500 + number}}}"),
            max_tokens=400,
            request_id=f"gone-{number}",
        )
        call = stack.inference().Generate(request, metadata=stack.auth(), timeout=60)
        if number % 2:
            await call.read()
        await stack.inference().Abort(pb.AbortRequest(request_id=f"gone-{number}"), metadata=stack.auth())
        call.cancel()
    check_ended(await ask(stack, pb.StructuredOutput(regex="ok")))
    deadline_s = time.monotonic() + 30
    while (status := await stack.status()).running_requests or status.waiting_requests:
        assert time.monotonic() < deadline_s, status
        await asyncio.sleep(0.02)
    assert status.kv_blocks_available == status.kv_blocks_total
