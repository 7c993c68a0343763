"""Prompts as messages to checked values. Lengths first: a message that is too long costs nothing more."""

from collections.abc import Collection, Sequence
from typing import Any, cast

import msgspec

from inference_service.api.field_errors import check_ids_known, limit_error, refuse
from inference_service.api.generation_request import ChatPrompt, Prompt, TextPrompt, TokenPrompt, too_long
from inference_service.domain.engine import EngineInfo
from inference_service.text.chat_template import RESERVED_ARGUMENTS, RESERVED_FIELDS, ChatTurn
from lorikeet.inference.v1 import generation_pb2

# So many turns are read and rendered in some ten milliseconds.
MAX_CHAT_MESSAGES = 4096
MAX_ROLE_LENGTH = 64
# Parsed in a few milliseconds.
MAX_CHAT_JSON_BYTES = 1 << 20


def read_prompt(message: generation_pb2.GenerateRequest, info: EngineInfo) -> Prompt:
    """Check and read the input of a generation.

    Raises:
        InvalidRequestError: there is none, or it is empty.
        LimitExceededError: it has too many tokens or turns, or a token that the model does not know.
    """
    match message.WhichOneof("input"):
        case "prompt":
            if not message.prompt:
                refuse("prompt", "empty", "send at least one character")
            return TextPrompt(message.prompt)
        case "chat":
            return _chat(message.chat)
        case "token_ids":
            return _token_prompt(message.token_ids.ids, info)
        case _:
            return refuse("input", "not set", "set prompt, chat or token_ids")


def tokenize_prompt(message: generation_pb2.TokenizeRequest) -> TextPrompt | ChatPrompt:
    """Check and read the input of Tokenize; an empty prompt has no tokens and is fine."""
    match message.WhichOneof("input"):
        case "prompt":
            optional = message.HasField("add_special_tokens")
            return TextPrompt(message.prompt, message.add_special_tokens if optional else True)
        case "chat":
            return _chat(message.chat)
        case _:
            return refuse("input", "not set", "set prompt or chat")


def _chat(message: generation_pb2.ChatMessages) -> ChatPrompt:
    num_turns = len(message.messages)
    if not num_turns:
        refuse("chat.messages", "empty", "send at least one message")
    if num_turns > MAX_CHAT_MESSAGES:
        raise limit_error(
            f"chat.messages has {num_turns} messages; this server's max_chat_messages is "
            f"{MAX_CHAT_MESSAGES}: join the older ones",
            "chat.messages",
            "max_chat_messages",
            num_turns,
            MAX_CHAT_MESSAGES,
        )
    num_json_bytes = _json_bytes(message)
    turns: list[ChatTurn] = []
    for index, turn in enumerate(message.messages):
        where = f"chat.messages[{index}]"
        _check_role(f"{where}.role", turn.role)
        # A list of parts, or none at all, has no other place than the fields.
        reserved = RESERVED_FIELDS if turn.content else RESERVED_FIELDS - {"content"}
        fields = _json_object(f"{where}.fields_json", turn.fields_json, reserved)
        turns.append(ChatTurn(turn.role, turn.content, fields))
    optional = message.HasField("add_generation_prompt")
    where = "chat.template_arguments_json"
    arguments = _json_object(where, message.template_arguments_json, RESERVED_ARGUMENTS)
    _check_objects(where, "tools", arguments.get("tools"))
    _check_objects(where, "documents", arguments.get("documents"))
    return ChatPrompt(
        tuple(turns), message.add_generation_prompt if optional else True, arguments, num_json_bytes
    )


def _json_bytes(message: generation_pb2.ChatMessages) -> int:
    """The size of a chat's JSON texts, which is checked before one of them is parsed."""
    texts = [message.template_arguments_json, *(turn.fields_json for turn in message.messages)]
    total = sum(len(text.encode()) for text in texts if text)
    if total > MAX_CHAT_JSON_BYTES:
        raise limit_error(
            f"chat has {total} bytes in template_arguments_json and its messages' fields_json; this server's "
            f"max_chat_json_bytes is {MAX_CHAT_JSON_BYTES}: shorten them",
            "chat",
            "max_chat_json_bytes",
            total,
            MAX_CHAT_JSON_BYTES,
        )
    return total


def _json_object(field: str, text: str, reserved: Collection[str]) -> dict[str, Any]:
    """The object in `text`, in its own order; an empty text is an empty object."""
    if not text:
        return {}
    try:
        value = cast("object", msgspec.json.decode(text))
    except (msgspec.DecodeError, RecursionError) as error:
        refuse(field, "not JSON", str(error))
    if not isinstance(value, dict):
        refuse(field, "not a JSON object", "send an object of names and values")
    found = cast("dict[str, Any]", value)
    for name in sorted(reserved & found.keys()):
        refuse(
            field, f"an object with the reserved name {name!r}", "it has a place of its own in the message"
        )
    return found


def _check_objects(field: str, name: str, value: object) -> None:
    """What transformers refuses, too: templates would make nonsense of anything else, in silence."""
    if value is None:
        return
    items = cast("list[object]", value) if isinstance(value, list) else [None]
    if not all(isinstance(item, dict) for item in items):
        refuse(field, f"an object whose {name} are no list of objects", f"send a list of objects as {name}")


def _check_role(field: str, role: str) -> None:
    if not role:
        refuse(field, "empty", 'use "user", "assistant", "system" or the like')
    if len(role) > MAX_ROLE_LENGTH:
        raise limit_error(
            f"{field} has {len(role)} characters; this server's max_role_length is {MAX_ROLE_LENGTH}: "
            "shorten it",
            field,
            "max_role_length",
            len(role),
            MAX_ROLE_LENGTH,
        )


def _token_prompt(ids: Sequence[int], info: EngineInfo) -> TokenPrompt:
    if not ids:
        refuse("token_ids", "empty", "send at least one token")
    # First the length, so that two million ids cost nothing more.
    if len(ids) >= info.limits.max_context_tokens:
        raise too_long("token_ids", len(ids), info.limits.max_context_tokens)
    known = list(ids)
    check_ids_known("token_ids", known, info.vocab_size)
    return TokenPrompt(tuple(known))
