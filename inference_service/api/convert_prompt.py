"""Prompts as messages to checked values. Lengths first: a message that is too long costs nothing more."""

from collections.abc import Sequence

from inference_service.api.field_errors import check_ids_known, limit_error, refuse
from inference_service.api.generation_request import ChatPrompt, Prompt, TextPrompt, TokenPrompt, too_long
from inference_service.domain.engine import EngineInfo
from inference_service.text.chat_template import ChatTurn
from lorikeet.inference.v1 import generation_pb2

# So many turns are read and rendered in some ten milliseconds.
MAX_CHAT_MESSAGES = 4096
MAX_ROLE_LENGTH = 64


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
    turns = tuple(ChatTurn(turn.role, turn.content) for turn in message.messages)
    for index, turn in enumerate(turns):
        _check_role(f"chat.messages[{index}].role", turn.role)
    optional = message.HasField("add_generation_prompt")
    return ChatPrompt(turns, message.add_generation_prompt if optional else True)


def _check_role(field: str, role: str) -> None:
    if not role:
        refuse(field, "empty", 'use "user", "assistant", "system" or the like')
    if len(role) > MAX_ROLE_LENGTH:
        raise limit_error(
            f"{field} has {len(role)} characters; this server's max_role_length is {MAX_ROLE_LENGTH}",
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
        raise too_long(len(ids), info.limits.max_context_tokens)
    known = list(ids)
    check_ids_known("token_ids", known, info.vocab_size)
    return TokenPrompt(tuple(known))
