"""Generation streams of both clients: deltas, the whole, closing, broken streams, inputs."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

import lorikeet_client as lk
from lorikeet.inference.v1 import generation_pb2 as pb
from lorikeet_client import generation_messages
from lorikeet_contract.status import StatusCode
from lorikeet_rpc.errors import to_status
from tests.support.fake_services import TOKEN, FakeServices, service_error

PARAMS = lk.SamplingParams(
    temperature=0.0,
    top_p=0.5,
    top_k=3,
    seed=0,
    max_tokens=7,
    ignore_eos=True,
    stop_strings=["a", "b"],
    stop_token_ids=[5],
    include_stop_string=True,
    logprobs=0,
    prompt_logprobs=2,
    skip_special_tokens=False,
    presence_penalty=0.0,
    frequency_penalty=-0.5,
    repetition_penalty=1.5,
    min_p=0.25,
    logit_bias={3: -1.5, 0: 100.0},
    min_tokens=0,
    bad_words=["no"],
    n=1,
    structured_output=lk.StructuredOutput(regex="a+"),
)


async def _read(both: Any, **options: Any) -> tuple[list[lk.Delta], Any]:
    """All deltas of a stream and the stream itself, through either client."""
    if isinstance(both.client, lk.AsyncLorikeet):
        async with both.client.generate(**options) as stream:
            return [delta async for delta in stream], stream

    def run() -> tuple[list[lk.Delta], Any]:
        with both.client.generate(**options) as stream:
            return list(stream), stream

    return await asyncio.to_thread(run)


async def test_deltas_and_the_whole(both: Any, fakes: FakeServices) -> None:
    """Deltas come in order with tokens; the stream adds them up."""
    deltas, stream = await _read(both, prompt="one two three", adapter="a0", request_id="r1")
    assert [delta.text for delta in deltas] == ["one", "two", "three", ""]
    assert [delta.sequence for delta in deltas] == [0, 1, 2, 3]
    assert deltas[1].tokens[0] == lk.Token(1, b"two", -0.5, (lk.TokenLogprob(1, -0.5),))
    assert [delta.finish is None for delta in deltas] == [True, True, True, False]
    whole = stream.whole()
    assert (whole.text, whole.request_id, len(whole.tokens)) == ("onetwothree", "r1", 3)
    assert whole.finish.reason is lk.FinishReason.LENGTH
    assert whole.finish.stop_token_id is None
    assert whole.finish.usage == lk.Usage(prompt_tokens=3, cached_tokens=1, output_tokens=3)
    assert whole.finish.timings == lk.Timings(1, 2, 3, 4)
    assert whole.finish.adapter.tier_hit is lk.AdapterTier.HOST


async def test_completion_reads_to_the_end(fakes: FakeServices) -> None:
    """`completion` of an unread stream equals the sum of its deltas."""
    async with lk.AsyncLorikeet(fakes.address, token=TOKEN) as client:
        assert (await client.generate("x y").completion()).text == "xy"
    with lk.Lorikeet(fakes.address, token=TOKEN) as blocking:
        assert blocking.generate("x y").completion().text == "xy"


async def test_the_request_carries_every_parameter(both: Any, fakes: FakeServices) -> None:
    """Each sampling field arrives, zeros too."""
    await _read(both, prompt="x", sampling=PARAMS)
    assert fakes.inference.requests[0].sampling == pb.SamplingParams(
        temperature=0.0,
        top_p=0.5,
        top_k=3,
        seed=0,
        max_tokens=7,
        ignore_eos=True,
        stop_strings=["a", "b"],
        stop_token_ids=[5],
        include_stop_string=True,
        logprobs=0,
        prompt_logprobs=2,
        skip_special_tokens=False,
        presence_penalty=0.0,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        min_p=0.25,
        logit_bias={3: -1.5, 0: 100.0},
        min_tokens=0,
        bad_words=["no"],
        n=1,
        structured_output=pb.StructuredOutput(regex="a+"),
    )
    assert {field.name for field in pb.SamplingParams.DESCRIPTOR.fields} == set(PARAMS.__dataclass_fields__)


async def test_absent_stays_absent(both: Any, fakes: FakeServices) -> None:
    """No sampling, no adapter: the server's defaults, the base model. An empty adapter is sent as given."""
    await _read(both, prompt="x")
    await _read(both, prompt="x", sampling=lk.SamplingParams(), adapter="")
    first, second = fakes.inference.requests
    assert not first.HasField("adapter")
    assert not first.HasField("sampling")
    assert second.HasField("adapter")
    assert second.sampling == pb.SamplingParams()


async def test_inputs(both: Any, fakes: FakeServices) -> None:
    """A chat and token ids, an empty list of them too, arrive as what they are."""
    chat = [lk.ChatMessage("system", "s"), lk.ChatMessage("user", "u", {"z": "é", "a": [1, 2.0]})]
    arguments = {"tools": [{"name": "t"}], "reasoning_effort": "high"}
    await _read(both, chat=chat, add_generation_prompt=False, template_arguments=arguments)
    await _read(both, token_ids=[3, 1])
    await _read(both, token_ids=[])
    talk, ids, empty = fakes.inference.requests
    assert [(m.role, m.content) for m in talk.chat.messages] == [("system", "s"), ("user", "u")]
    assert talk.chat.HasField("add_generation_prompt")
    assert [m.fields_json for m in talk.chat.messages] == ["", '{"z": "é", "a": [1, 2.0]}']
    assert json.loads(talk.chat.template_arguments_json) == arguments
    assert list(ids.token_ids.ids) == [3, 1]
    assert empty.WhichOneof("input") == "token_ids"


@pytest.mark.parametrize("values", [{"a": {1, 2}}, {"a": float("nan")}])
async def test_what_json_cannot_say(both: Any, values: dict[str, Any]) -> None:
    """Is a mistake in the calling program, before anything is sent."""
    for options in ({"template_arguments": values}, {"chat": [lk.ChatMessage("user", "u", values)]}):
        with pytest.raises((TypeError, ValueError), match="JSON"):
            await _read(both, **{"chat": [lk.ChatMessage("user", "u")], **options})


@pytest.mark.parametrize("options", [{}, {"prompt": "x", "token_ids": [1]}, {"chat": [], "prompt": ""}])
async def test_exactly_one_input(both: Any, options: dict[str, Any]) -> None:
    """None or two inputs is a mistake in the calling program."""
    with pytest.raises(TypeError, match="exactly one of prompt, chat and token_ids"):
        await _read(both, **options)


async def test_leaving_the_block_stops_the_server(both: Any, fakes: FakeServices) -> None:
    """A stream left after its first delta ends on the server as well."""

    def endless(request: Any, context: Any) -> Iterator[Any]:
        sequence = 0
        while context.is_active():
            yield pb.GenerateResponse(request_id="r", sequence=sequence, text_delta="x")
            sequence += 1

    fakes.inference.script = endless
    if isinstance(both.client, lk.AsyncLorikeet):
        async with both.client.generate("x") as stream:
            await anext(stream)
    else:
        with both.client.generate("x") as stream:
            next(stream)
    assert await asyncio.to_thread(fakes.inference.ended.wait, 5)
    assert stream.text.startswith("x")
    assert stream.finish is None


async def test_an_error_in_mid_stream_keeps_what_came(both: Any, fakes: FakeServices) -> None:
    """The error is the call's status; the text before it stays readable."""

    def breaks(request: Any, context: Any) -> Iterator[Any]:
        yield pb.GenerateResponse(request_id="r", sequence=0, text_delta="so far")
        context.abort_with_status(to_status(service_error(StatusCode.UNAVAILABLE, retry_after_s=1)))

    fakes.inference.script = breaks
    stream = both.client.generate("x")
    with pytest.raises(lk.UnavailableError):
        if isinstance(both.client, lk.AsyncLorikeet):
            await stream.completion()
        else:
            stream.completion()
    assert stream.text == "so far"
    assert fakes.faults.calls == ["Generate"]  # never repeated by itself


def _samples(request: Any, context: Any) -> Iterator[Any]:
    """Three samples, interleaved; the second ends first."""
    usages = {0: pb.Usage(prompt_tokens=4, cached_tokens=1, output_tokens=2), 1: pb.Usage(output_tokens=1)}
    pieces = [(0, "a", False), (1, "b", True), (2, "c", False), (0, "A", True), (2, "C", True)]
    for sequence, (index, text, is_last) in enumerate(pieces):
        finish = pb.Finish(reason=pb.FINISH_REASON_LENGTH, usage=usages.get(index)) if is_last else None
        yield pb.GenerateResponse(
            request_id="r",
            sequence=sequence,
            index=index,
            text_delta=text,
            tokens=[pb.TokenInfo(id=sequence)],
            prompt_tokens=[pb.TokenInfo(id=9)] if sequence == 0 else [],
            finish=finish,
        )


async def test_samples_are_told_apart(both: Any, fakes: FakeServices) -> None:
    """Each has its text, tokens and finish; the stream's own are sample 0's; usages add up."""
    fakes.inference.script = _samples
    deltas, stream = await _read(both, prompt="x", sampling=lk.SamplingParams(n=3))
    assert [delta.index for delta in deltas] == [0, 1, 2, 0, 2]
    whole = stream.whole()
    assert [sample.text for sample in whole.samples] == ["aA", "b", "cC"]
    assert [[token.id for token in sample.tokens] for sample in whole.samples] == [[0, 3], [1], [2, 4]]
    assert (stream.text, stream.finish, [t.id for t in stream.tokens]) == ("aA", whole.finish, [0, 3])
    assert [token.id for token in whole.prompt_tokens] == [9]
    assert whole.usage == lk.Usage(prompt_tokens=4, cached_tokens=1, output_tokens=3)


def test_samples_of_a_reply() -> None:
    """`complete` gives the same values as the stream."""
    pieces = list(_samples(None, None))
    finish = pieces[3].finish
    reply = pb.CompleteResponse(request_id="r", text="aA", finish=finish)
    reply.further_samples.add(index=1, text="b", tokens=[pb.TokenInfo(id=1)], finish=pieces[1].finish)
    completion = generation_messages.completion(reply)
    assert completion.samples[0] == lk.Sample(0, "aA", (), completion.finish)
    assert (completion.samples[1].index, completion.samples[1].text) == (1, "b")
    assert completion.samples[1].tokens == (lk.Token(1, b"", None, ()),)
    assert completion.usage.prompt_tokens == 4


@pytest.mark.parametrize("count", [1, 2, 4])
async def test_samples_that_do_not_match_the_request(both: Any, fakes: FakeServices, count: int) -> None:
    """A piece of a sample that was not asked for, or a sample without its end, is a broken reply."""
    fakes.inference.script = _samples
    with pytest.raises(lk.BrokenReplyError, match="of sample"):
        await _read(both, prompt="x", sampling=lk.SamplingParams(n=count))


@pytest.mark.parametrize("sequences", [[0, 2], [1], [0, 0], []])
async def test_lost_pieces_are_noticed(both: Any, fakes: FakeServices, sequences: list[int]) -> None:
    """A gap, a repeat, a late start or an end without finish never pass for a whole text."""
    fakes.inference.script = lambda *_: iter([pb.GenerateResponse(sequence=n) for n in sequences])
    with pytest.raises(lk.BrokenReplyError):
        await _read(both, prompt="x")


async def test_deadline(both: Any, fakes: FakeServices) -> None:
    """timeout_s reaches the call."""

    def slow(request: Any, context: Any) -> Iterator[Any]:
        fakes.inference.ended.wait(10)
        yield pb.GenerateResponse()

    fakes.inference.script = slow
    with pytest.raises(lk.DeadlineError):
        await _read(both, prompt="x", timeout_s=0.1)


async def test_unknown_enum_numbers_are_unspecified(both: Any, fakes: FakeServices) -> None:
    """A newer server's reason does not break an older client."""
    finish = pb.Finish(reason=99)  # type: ignore[arg-type]
    fakes.inference.script = lambda *_: iter([pb.GenerateResponse(finish=finish)])
    _, stream = await _read(both, prompt="x")
    assert stream.finish.reason is lk.FinishReason.UNSPECIFIED
