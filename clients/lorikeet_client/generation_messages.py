"""Generation values from and to their messages. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import fields as fields_of
from typing import Any, Unpack

from lorikeet.inference.v1 import generation_pb2 as pb
from lorikeet.inference.v1 import model_pb2
from lorikeet_client.enums import from_number
from lorikeet_client.errors import BrokenReplyError
from lorikeet_client.generation import (
    AdapterTier,
    AdapterUsed,
    Chat,
    ChatMessage,
    Completion,
    Delta,
    Finish,
    FinishReason,
    GenerateOptions,
    Sample,
    SamplingParams,
    Timings,
    Token,
    Tokenized,
    TokenLogprob,
    Usage,
)
from lorikeet_client.keywords import refuse_unknown, texts
from lorikeet_client.message_fields import add_items, add_pairs, check_kind, json_text, set_field, shown
from lorikeet_client.model import EngineStatus, Limits, Model
from lorikeet_client.structured_output import structured_output
from lorikeet_rpc.schema_message import schema_from_message

# The message has the value's own field names; a test holds that all of them are carried.
_SCALARS = tuple(
    field.name
    for field in fields_of(SamplingParams)
    if field.name not in {"stop_strings", "stop_token_ids", "bad_words", "logit_bias", "structured_output"}
)


def generate_request(prompt: str | None, **options: Unpack[GenerateOptions]) -> pb.GenerateRequest:
    """The request.

    Raises:
        TypeError: not one of prompt, chat and token_ids; an unknown option; a value of another kind.
        InvalidValueError: a value outside its field's range.
    """
    refuse_unknown(options, GenerateOptions)
    message = pb.GenerateRequest()
    set_field(message, "request_id", options.get("request_id"))
    chat, token_ids = options.get("chat"), options.get("token_ids")
    if sum(given is not None for given in (prompt, chat, token_ids)) != 1:
        raise TypeError("give exactly one of prompt, chat and token_ids")
    if prompt is not None:
        set_field(message, "prompt", prompt)
    elif chat is not None:
        message.chat.CopyFrom(
            chat_messages(chat, options.get("add_generation_prompt"), options.get("template_arguments"))
        )
    else:
        message.token_ids.SetInParent()
        add_items(message.token_ids, "ids", token_ids or (), "token_ids")
    set_field(message, "adapter", options.get("adapter"))
    if (sampling := options.get("sampling")) is not None:
        message.sampling.CopyFrom(sampling_params(sampling))
    return message


def tokenize_request(
    prompt: str | None,
    chat: Chat | None,
    *,
    add_special_tokens: bool | None,
    template_arguments: Mapping[str, Any] | None = None,
) -> pb.TokenizeRequest:
    """The request; raises TypeError unless exactly one of prompt and chat is given."""
    if (prompt is None) == (chat is None):
        raise TypeError("give exactly one of prompt and chat")
    message = pb.TokenizeRequest(add_special_tokens=add_special_tokens)
    if prompt is not None:
        set_field(message, "prompt", prompt)
    elif chat is not None:
        message.chat.CopyFrom(chat_messages(chat, None, template_arguments))
    return message


def chat_messages(
    chat: Chat,
    add_generation_prompt: bool | None,
    template_arguments: Mapping[str, Any] | None = None,
) -> pb.ChatMessages:
    """A conversation; raises TypeError or ValueError for fields or arguments that JSON cannot say."""
    if isinstance(chat, str | Mapping):
        raise TypeError(f"chat: {shown(chat)} is not a list of messages")
    message = pb.ChatMessages()
    set_field(message, "add_generation_prompt", add_generation_prompt)
    if template_arguments:
        arguments = json_text(template_arguments, "template_arguments")
        set_field(message, "template_arguments_json", arguments, "template_arguments")
    for index, turn in enumerate(chat):
        _add_turn(message, turn, f"chat[{index}]")
    return message


def _add_turn(message: pb.ChatMessages, turn: ChatMessage | Mapping[str, Any], path: str) -> None:
    if isinstance(turn, Mapping):
        turn = _from_openai(turn, path)
    check_kind(turn, ChatMessage, path, 'a ChatMessage, or a mapping with "role" and "content"')
    added = message.messages.add()
    set_field(added, "role", turn.role, f"{path}.role")
    set_field(added, "content", turn.content, f"{path}.content")
    if turn.fields:
        set_field(added, "fields_json", json_text(turn.fields, f"{path}.fields"), f"{path}.fields")


def _from_openai(turn: Mapping[str, Any], path: str) -> ChatMessage:
    """A mapping's message. A content that is no text, or none, travels beside the other fields."""
    fields = dict(turn)
    if "role" not in fields:
        raise TypeError(f'{path}: {shown(fields)} has no "role"')
    role, content = fields.pop("role"), fields.pop("content", None)
    if isinstance(content, str):
        return ChatMessage(role, content, fields)
    return ChatMessage(role, "", {"content": content, **fields})


def sampling_params(params: SamplingParams) -> pb.SamplingParams:
    """None fields stay absent, so that the server's defaults apply. Raises as `generate_request`."""
    check_kind(params, SamplingParams, "sampling", "SamplingParams: write SamplingParams(temperature=0.5)")
    message = pb.SamplingParams()
    for name in _SCALARS:
        set_field(message, name, getattr(params, name), f"sampling.{name}")
    for name in ("stop_strings", "bad_words"):
        add_items(message, name, texts(getattr(params, name), name), f"sampling.{name}")
    add_items(message, "stop_token_ids", params.stop_token_ids, "sampling.stop_token_ids")
    add_pairs(message, "logit_bias", params.logit_bias, "sampling.logit_bias")
    if params.structured_output is not None:
        message.structured_output.CopyFrom(structured_output(params.structured_output))
    return message


def num_samples(request: pb.GenerateRequest) -> int:
    """How many samples a stream will bring."""
    return request.sampling.n if request.sampling.HasField("n") else 1


def delta(message: pb.GenerateResponse) -> Delta:
    """One piece of a stream."""
    return Delta(
        request_id=message.request_id,
        sequence=message.sequence,
        text=message.text_delta,
        tokens=_tokens(message.tokens),
        prompt_tokens=_tokens(message.prompt_tokens),
        finish=finish(message.finish) if message.HasField("finish") else None,
        index=message.index,
    )


def completion(message: pb.CompleteResponse) -> Completion:
    """A whole answer."""
    return Completion(
        request_id=message.request_id,
        text=message.text,
        tokens=_tokens(message.tokens),
        prompt_tokens=_tokens(message.prompt_tokens),
        finish=finish(message.finish),
        further_samples=tuple(
            Sample(sample.index, sample.text, _tokens(sample.tokens), finish(sample.finish))
            for sample in message.further_samples
        ),
    )


def finish(message: pb.Finish) -> Finish:
    """The end of a generation."""
    used = message.adapter
    return Finish(
        reason=from_number(FinishReason, pb.FinishReason, message.reason, "FINISH_REASON_"),
        stop_string=message.stop_string or None,
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        usage=Usage(
            prompt_tokens=message.usage.prompt_tokens,
            cached_tokens=message.usage.cached_tokens,
            output_tokens=message.usage.output_tokens,
        ),
        timings=Timings(
            queue_ms=message.timings.queue_ms,
            adapter_wait_ms=message.timings.adapter_wait_ms,
            prefill_ms=message.timings.prefill_ms,
            decode_ms=message.timings.decode_ms,
        ),
        adapter=AdapterUsed(
            revision=used.revision,
            digest=used.digest,
            tier_hit=from_number(AdapterTier, pb.AdapterTier, used.tier_hit, "ADAPTER_TIER_"),
        )
        if message.HasField("adapter")
        else None,
    )


def tokenized(message: pb.TokenizeResponse) -> Tokenized:
    """A prompt as the model reads it."""
    return Tokenized(tuple(message.ids), tuple(message.token_bytes), message.rendered)


def model(message: model_pb2.GetModelResponse) -> Model:
    """What the node serves; raises BrokenReplyError if its schema is not of this release."""
    try:
        schema = schema_from_message(message.lora_schema)
    except ValueError as error:
        raise BrokenReplyError(str(error)) from error
    return Model(
        name=message.name,
        architecture=message.architecture,
        instance_id=message.instance_id,
        base_digest=message.base_digest,
        dtype=message.dtype,
        vocab_size=message.vocab_size,
        limits=Limits(**{field.name: getattr(message.limits, field.name) for field in _LIMIT_FIELDS}),
        lora_schema=schema,
        status=EngineStatus(**{field.name: getattr(message.status, field.name) for field in _STATUS_FIELDS}),
    )


# Both records have the messages' own field names; a test holds that they are complete.
_LIMIT_FIELDS = model_pb2.Limits.DESCRIPTOR.fields
_STATUS_FIELDS = model_pb2.EngineStatus.DESCRIPTOR.fields


def _tokens(messages: Iterable[pb.TokenInfo]) -> tuple[Token, ...]:
    return tuple(
        Token(
            id=token.id,
            text_bytes=token.text_bytes,
            logprob=token.logprob if token.HasField("logprob") else None,
            top_logprobs=tuple(TokenLogprob(top.id, top.logprob) for top in token.top_logprobs),
        )
        for token in messages
    )
