"""Chats with tools, calls, results and parts for several templates, as transformers renders them."""

import json
from typing import Any

from inference_service.text.chat_template import ChatTurn
from tests.support.fixtures import FIXTURES

TEMPLATES = FIXTURES / "chats"
CASES: list[dict[str, Any]] = json.loads((TEMPLATES / "cases.json").read_text())
_DOCUMENT: dict[str, Any] = json.loads((TEMPLATES / "expected.json").read_text())
NOW: str = _DOCUMENT["now"]
EXPECTED: dict[str, dict[str, str]] = _DOCUMENT["expected"]
# As the fixture's generator has them.
SPECIAL_TOKENS = {"bos_token": "<|start|>", "eos_token": "<|end|>"}


def turns_of(case: dict[str, Any]) -> list[ChatTurn]:
    """A case's messages in our form: a content that is no text, or none, goes with the fields."""
    turns: list[ChatTurn] = []
    for message in case["messages"]:
        content = message.get("content")
        own = {"role", "content"} if isinstance(content, str) else {"role"}
        fields = {"content": None, **message} if content is None else message
        turns.append(
            ChatTurn(
                message["role"],
                content if isinstance(content, str) else "",
                {name: value for name, value in fields.items() if name not in own},
            )
        )
    return turns
