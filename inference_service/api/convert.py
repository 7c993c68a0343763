"""Inference messages to checked values, and values to messages. Pure; the one place that checks requests."""

import re
from collections.abc import Sequence
from typing import Any

from inference_service.api.convert_prompt import read_prompt
from inference_service.api.convert_sampling import read_sampling
from inference_service.api.field_errors import refuse
from inference_service.api.generation_piece import (
    MAX_REPLY_BYTES,
    GenerationFinish,
    GenerationPiece,
    TokenPiece,
)
from inference_service.api.generation_request import GenerationRequest, RequestRules
from inference_service.api.reply_limits import tokenize_reply_too_large
from inference_service.domain.adapter import ResidencyTier
from inference_service.domain.engine import EngineInfo, EngineLimits, EngineStatus
from inference_service.domain.request import FinishReason
from lorikeet.inference.v1 import generation_pb2, model_pb2
from lorikeet_contract.schema import LoraSchema
from lorikeet_rpc.schema_message import schema_to_message

_REQUEST_ID_RE = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_TOKENS_AT_ONCE = 16_384

_FINISH_REASONS = {
    FinishReason.STOP_TOKEN: generation_pb2.FINISH_REASON_STOP_TOKEN,
    FinishReason.STOP_STRING: generation_pb2.FINISH_REASON_STOP_STRING,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
    FinishReason.DEADLINE: generation_pb2.FINISH_REASON_DEADLINE,
    FinishReason.ABORTED: generation_pb2.FINISH_REASON_ABORTED,
}
_TIERS = {
    None: generation_pb2.ADAPTER_TIER_UNSPECIFIED,
    ResidencyTier.ABSENT: generation_pb2.ADAPTER_TIER_ABSENT,
    ResidencyTier.DISK: generation_pb2.ADAPTER_TIER_DISK,
    ResidencyTier.HOST: generation_pb2.ADAPTER_TIER_HOST,
    # On its way to the device: the request found it in host memory.
    ResidencyTier.COPYING: generation_pb2.ADAPTER_TIER_HOST,
    ResidencyTier.ACTIVE: generation_pb2.ADAPTER_TIER_ACTIVE,
}


def generation_request(message: generation_pb2.GenerateRequest, rules: RequestRules) -> GenerationRequest:
    """Check and read a request.

    Raises:
        InvalidRequestError: a field has a value it may not have.
        LimitExceededError: a field is above a limit, which is named.
    """
    if message.HasField("adapter") and not message.adapter:
        refuse("adapter", "''", "name an adapter, or leave the field out for the base model")
    return GenerationRequest(
        request_id=request_id(message.request_id) if message.request_id else None,
        adapter=message.adapter if message.HasField("adapter") else None,
        prompt=read_prompt(message, rules.info),
        sampling=read_sampling(message.sampling, rules),
    )


def request_id(text: str) -> str:
    """Check a request id."""
    if not _REQUEST_ID_RE.fullmatch(text):
        refuse("request_id", _shown(text), "use 1 to 128 characters of [A-Za-z0-9._:-]")
    return text


def generate_response(
    request_id: str, sequence: int, piece: GenerationPiece
) -> generation_pb2.GenerateResponse:
    """One message of a stream."""
    response = generation_pb2.GenerateResponse(
        request_id=request_id,
        sequence=sequence,
        index=piece.index,
        text_delta=piece.text,
        finish=_finish(piece.finish) if piece.finish else None,
    )
    for token in piece.tokens:
        _add_token(response.tokens, token)
    for token in piece.prompt_tokens:
        _add_token(response.prompt_tokens, token)
    return response


def complete_response(request_id: str, pieces: Sequence[GenerationPiece]) -> generation_pb2.CompleteResponse:
    """All pieces of all samples in one message."""
    samples: dict[int, list[GenerationPiece]] = {}
    for piece in pieces:
        samples.setdefault(piece.index, []).append(piece)
    response = generation_pb2.CompleteResponse(request_id=request_id)
    _fill(response, samples.pop(0))
    for index in sorted(samples):
        _fill(response.further_samples.add(index=index), samples[index])
    return response


def _fill(
    message: generation_pb2.CompleteResponse | generation_pb2.Sample, pieces: Sequence[GenerationPiece]
) -> None:
    """One sample's pieces, the last with its finish."""
    finish = pieces[-1].finish
    assert finish is not None
    message.text = "".join(piece.text for piece in pieces)
    message.finish.CopyFrom(_finish(finish))
    for piece in pieces:
        for token in piece.tokens:
            _add_token(message.tokens, token)
        if isinstance(message, generation_pb2.CompleteResponse):
            for token in piece.prompt_tokens:
                _add_token(message.prompt_tokens, token)


def tokenize_response(
    ids: Sequence[int], token_bytes: Sequence[bytes], rendered: str
) -> generation_pb2.TokenizeResponse:
    """Ids, their bytes and the rendered chat ("" for a prompt).

    Raises:
        LimitExceededError: the message would be larger than a client with default limits takes.
    """
    response = generation_pb2.TokenizeResponse(rendered=rendered)
    # In parts, since each call holds the interpreter lock to its end.
    for begin in range(0, len(ids), _TOKENS_AT_ONCE):
        response.ids.extend(ids[begin : begin + _TOKENS_AT_ONCE])
        response.token_bytes.extend(token_bytes[begin : begin + _TOKENS_AT_ONCE])
    size = response.ByteSize()
    if size > MAX_REPLY_BYTES:
        raise tokenize_reply_too_large(size)
    return response


def model_response(info: EngineInfo, instance_id: str, status: EngineStatus) -> model_pb2.GetModelResponse:
    """The model, its limits and sites, and the engine's counters."""
    return model_pb2.GetModelResponse(
        name=info.model_name,
        architecture=info.architecture,
        instance_id=instance_id,
        base_digest=info.base_digest,
        dtype=info.dtype,
        vocab_size=info.vocab_size,
        limits=_limits(info.limits),
        lora_schema=schema_to_message(LoraSchema.from_json(info.lora_schema)),
        status=_status(status),
    )


def _shown(text: str) -> str:
    return ascii(text if len(text) <= 80 else text[:77] + "...")


def _add_token(tokens: Any, piece: TokenPiece) -> None:
    """Append in place: a list of messages would be copied, at more than twice the time."""
    entry = piece.logprobs
    if entry is None:
        tokens.add(id=piece.id, text_bytes=piece.text_bytes)
        return
    info = tokens.add(id=piece.id, text_bytes=piece.text_bytes, logprob=entry.logprob)
    add = info.top_logprobs.add
    for token_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True):
        add(id=token_id, logprob=logprob)


def _finish(finish: GenerationFinish) -> generation_pb2.Finish:
    adapter = finish.adapter
    return generation_pb2.Finish(
        reason=_FINISH_REASONS[finish.reason],
        stop_string=finish.stop_string,
        stop_token_id=finish.stop_token_id,
        usage=generation_pb2.Usage(
            prompt_tokens=finish.prompt_tokens,
            cached_tokens=finish.cached_tokens,
            output_tokens=finish.output_tokens,
        ),
        timings=generation_pb2.Timings(
            queue_ms=finish.timings.queue_ms,
            adapter_wait_ms=finish.timings.adapter_wait_ms,
            prefill_ms=finish.timings.prefill_ms,
            decode_ms=finish.timings.decode_ms,
        ),
        adapter=None
        if adapter is None
        else generation_pb2.AdapterUsed(
            revision=adapter.name.revision(adapter.digest),
            digest=adapter.digest,
            tier_hit=_TIERS[finish.tier_hit],
        ),
    )


def _limits(limits: EngineLimits) -> model_pb2.Limits:
    return model_pb2.Limits(
        max_context_tokens=limits.max_context_tokens,
        max_running_requests=limits.max_running_requests,
        max_waiting_requests=limits.max_waiting_requests,
        max_step_tokens=limits.max_step_tokens,
        max_top_logprobs=limits.max_top_logprobs,
        max_stop_strings=limits.max_stop_strings,
        max_samples=limits.max_samples,
        max_rank=limits.max_rank,
        max_active_adapters=limits.max_active_adapters,
        adapter_arena_bytes=limits.adapter_arena_bytes,
        host_pool_bytes=limits.host_pool_bytes,
    )


def _status(status: EngineStatus) -> model_pb2.EngineStatus:
    return model_pb2.EngineStatus(
        running_requests=status.running_requests,
        waiting_requests=status.waiting_requests,
        kv_blocks_total=status.kv_blocks_total,
        kv_blocks_available=status.kv_blocks_available,
        adapter_leases=status.adapter_leases,
        active_adapters=status.active_adapters,
        host_adapters=status.host_adapters,
        arena_used_bytes=status.arena_used_bytes,
        host_used_bytes=status.host_used_bytes,
        steps=status.steps,
        preemptions=status.preemptions,
        adapter_loads=status.adapter_loads,
        adapter_evictions=status.adapter_evictions,
        prefix_hit_tokens=status.prefix_hit_tokens,
        compilations=status.compilations,
    )
