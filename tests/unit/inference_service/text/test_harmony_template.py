"""A Harmony template through our renderer and through transformers': the same text, ids and refusals."""

from datetime import datetime
from typing import Any

import pytest

from inference_service.domain.errors import InvalidRequestError
from inference_service.text.chat_template import ChatTemplate, ChatTurn
from inference_service.text.tokenizer import Tokenizer
from tests.support.harmony import CASES, EXPECTED, HARMONY, NOW

TEMPLATE = ChatTemplate(
    (HARMONY / "chat_template.jinja").read_text(), {}, now=lambda: datetime.fromisoformat(NOW)
)
TOKENIZER = Tokenizer.from_directory(HARMONY)


def render(case: dict[str, Any]) -> str:
    """The case's messages; what a message has beside role and content goes with it."""
    turns = [
        ChatTurn(m["role"], m["content"], {k: v for k, v in m.items() if k not in ("role", "content")})
        for m in case["messages"]
    ]
    return TEMPLATE.render(
        turns,
        add_generation_prompt=case["add_generation_prompt"],
        max_characters=100_000,
        arguments=case["arguments"],
    )


@pytest.mark.parametrize(
    "case", [c for c in CASES if "rendered" in EXPECTED[c["name"]]], ids=lambda c: c["name"]
)
def test_renders_as_transformers_does(case: dict[str, Any]) -> None:
    """System, developer, user, assistant and tool messages, tools as TypeScript, efforts and a fixed date."""
    rendered = render(case)
    assert rendered == EXPECTED[case["name"]]["rendered"]
    assert TOKENIZER.encode(rendered, add_special_tokens=False) == EXPECTED[case["name"]]["ids"]


@pytest.mark.parametrize(
    "case", [c for c in CASES if "error" in EXPECTED[c["name"]]], ids=lambda c: c["name"]
)
def test_refuses_what_transformers_refuses(case: dict[str, Any]) -> None:
    """In the template's own words, as the caller's error."""
    with pytest.raises(InvalidRequestError) as caught:
        render(case)
    assert str(caught.value).endswith(f"refuses these messages: {EXPECTED[case['name']]['error']}")


def test_both_kinds_of_case_are_there() -> None:
    """Neither list above is empty by accident."""
    assert sum("rendered" in e for e in EXPECTED.values()) >= 14
    assert sum("error" in e for e in EXPECTED.values()) >= 7
