"""What every answer of the inference service must be like, whatever was asked, by the API's words alone."""

from collections.abc import Sequence
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from lorikeet.inference.v1 import generation_pb2 as pb

MAX_REPLY_BYTES = 4 << 20
REQUEST_TYPES: dict[str, Any] = {
    "Generate": pb.GenerateRequest, "Complete": pb.CompleteRequest, "Tokenize": pb.TokenizeRequest,
}  # fmt: skip
# What a single caller's requests may end with; never INTERNAL, UNKNOWN, UNAVAILABLE or a deadline.
_REASONS = {
    "INVALID_REQUEST": grpc.StatusCode.INVALID_ARGUMENT,
    "LIMIT_EXCEEDED": grpc.StatusCode.INVALID_ARGUMENT,
    "UNDECODABLE_REQUEST": grpc.StatusCode.INVALID_ARGUMENT,
    "ADAPTER_NOT_FOUND": grpc.StatusCode.NOT_FOUND,
    "DUPLICATE_REQUEST": grpc.StatusCode.ALREADY_EXISTS,
    "QUEUE_FULL": grpc.StatusCode.RESOURCE_EXHAUSTED,
    # Where bad words or biases leave no token that a grammar would take.
    "GRAMMAR_FAILED": grpc.StatusCode.FAILED_PRECONDITION,
}
_REASONS_THAT_END = {
    pb.FINISH_REASON_STOP_TOKEN, pb.FINISH_REASON_STOP_STRING, pb.FINISH_REASON_LENGTH,
    pb.FINISH_REASON_ABORTED,
}  # fmt: skip


def check_error(error: grpc.aio.AioRpcError) -> str:
    """A refusal with ErrorInfo that names the field; returns the reason."""
    status: Any = rpc_status.from_call(error)  # pyright: ignore[reportArgumentType]
    assert status is not None, f"no details: {error.code()} {error.details()}"
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert info.domain == "lorikeet"
    assert _REASONS.get(info.reason) is error.code(), f"{info.reason}: {error.code()} {error.details()}"
    assert error.details()
    assert info.metadata["field"], (
        info.reason,
        error.details(),
        dict(info.metadata),
    )
    if info.reason in {"LIMIT_EXCEEDED", "QUEUE_FULL"}:
        assert info.metadata["limit"], error.details()
        assert int(info.metadata["value"]) > int(info.metadata["maximum"]), dict(info.metadata)
    return info.reason


def check_too_long(error: grpc.aio.AioRpcError, num_bytes: int) -> None:
    """What gRPC refuses by itself, before a service sees it: no details, but how long it is and may be."""
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, error.code()
    assert f"({num_bytes} vs." in (error.details() or ""), error.details()


def check_undecodable(method: str, raw: bytes, reason: str | None) -> None:
    """Bytes that are no message are refused as that, and nothing else is."""
    try:
        REQUEST_TYPES[method].FromString(raw)
    except DecodeError:
        # The parts of a large one are counted before it is parsed.
        assert reason == "UNDECODABLE_REQUEST" or (reason == "LIMIT_EXCEEDED" and len(raw) > 32 << 10), reason
    else:
        assert reason != "UNDECODABLE_REQUEST"


def check_generate(request: pb.GenerateRequest, pieces: Sequence[pb.GenerateResponse], model: Any) -> None:
    """A stream that ended with OK."""
    count = request.sampling.n if request.sampling.HasField("n") else 1
    assert [piece.sequence for piece in pieces] == list(range(len(pieces)))
    assert len({piece.request_id for piece in pieces}) == 1
    assert all(piece.ByteSize() < MAX_REPLY_BYTES for piece in pieces)
    samples = {index: pb.Sample(index=index) for index in range(count)}
    prompt_tokens: list[pb.TokenInfo] = []
    for piece in pieces:
        sample = samples[piece.index]
        assert not sample.HasField("finish"), "a piece after the finish"
        sample.text += piece.text_delta
        sample.tokens.extend(piece.tokens)
        prompt_tokens += piece.prompt_tokens
        assert not piece.prompt_tokens or piece.index == 0
        if piece.HasField("finish"):
            sample.finish.CopyFrom(piece.finish)
    _check_answer(request, pieces[0].request_id, list(samples.values()), prompt_tokens, model)


def check_complete(request: pb.GenerateRequest, reply: pb.CompleteResponse, model: Any) -> None:
    """One reply."""
    assert reply.ByteSize() < MAX_REPLY_BYTES
    first = pb.Sample(text=reply.text, tokens=reply.tokens, finish=reply.finish)
    count = request.sampling.n if request.sampling.HasField("n") else 1
    samples = [first, *reply.further_samples]
    assert [sample.index for sample in samples] == list(range(count))
    _check_answer(request, reply.request_id, samples, list(reply.prompt_tokens), model)


def check_tokenize(reply: pb.TokenizeResponse, model: Any) -> None:
    """Ids of the vocabulary, each with its bytes."""
    assert reply.ByteSize() < MAX_REPLY_BYTES
    assert len(reply.ids) == len(reply.token_bytes)
    assert all(token_id < model.vocab_size for token_id in reply.ids)


def _check_answer(
    request: pb.GenerateRequest,
    request_id: str,
    samples: Sequence[pb.Sample],
    prompt_tokens: Sequence[pb.TokenInfo],
    model: Any,
) -> None:
    sampling, context = request.sampling, model.limits.max_context_tokens
    assert request_id == (request.request_id or request_id) != ""
    num_prompt = samples[0].finish.usage.prompt_tokens
    assert 0 < num_prompt < context
    if request.WhichOneof("input") == "token_ids":
        assert num_prompt == len(request.token_ids.ids)
    assert len(prompt_tokens) == (num_prompt if sampling.HasField("prompt_logprobs") else 0)
    _check_logprobs(prompt_tokens[1:], sampling.prompt_logprobs, model)
    room = min(sampling.max_tokens or context, context - num_prompt)
    for sample in samples:
        usage = sample.finish.usage
        assert (usage.prompt_tokens, usage.output_tokens) == (
            0 if sample.index else num_prompt, len(sample.tokens),
        )  # fmt: skip
        assert usage.cached_tokens < max(1, usage.prompt_tokens)
        assert len(sample.tokens) <= room
        assert sample.tokens or sample.finish.reason == pb.FINISH_REASON_ABORTED
        assert all(token.id < model.vocab_size for token in sample.tokens)
        if sampling.HasField("logprobs"):
            _check_logprobs(sample.tokens, sampling.logprobs, model)
        else:
            assert not any(token.HasField("logprob") for token in sample.tokens)
        _check_end(sample, sampling)


def _check_logprobs(tokens: Sequence[pb.TokenInfo], count: int, model: Any) -> None:
    for token in tokens:
        assert token.HasField("logprob")
        assert token.logprob <= 1e-3
        tops = [top.logprob for top in token.top_logprobs]
        assert len(tops) == min(count, model.vocab_size)
        assert tops == sorted(tops, reverse=True)


def _check_end(sample: pb.Sample, sampling: pb.SamplingParams) -> None:
    finish = sample.finish
    assert finish.reason in _REASONS_THAT_END
    assert finish.HasField("stop_token_id") == (finish.reason == pb.FINISH_REASON_STOP_TOKEN)
    assert bool(finish.stop_string) == (finish.reason == pb.FINISH_REASON_STOP_STRING)
    if finish.HasField("stop_token_id"):
        assert sample.tokens[-1].id == finish.stop_token_id
    if finish.stop_string:
        assert finish.stop_string in sampling.stop_strings
        assert sample.text.endswith(finish.stop_string) or not sampling.include_stop_string
    if finish.reason == pb.FINISH_REASON_LENGTH and sampling.max_tokens:
        assert len(sample.tokens) == sampling.max_tokens
    whole = b"".join(token.text_bytes for token in sample.tokens).decode("utf-8", "replace")
    if finish.reason == pb.FINISH_REASON_LENGTH and sampling.HasField("skip_special_tokens"):
        assert sampling.skip_special_tokens or sample.text == whole
    assert len(sample.text) <= len(whole)
