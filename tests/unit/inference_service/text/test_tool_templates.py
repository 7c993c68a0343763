"""Chats with tools in templates like Qwen3's, Llama 3.1's and DeepSeek's, as transformers renders them."""

import json
import tracemalloc
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from inference_service.domain.errors import InvalidRequestError, LimitExceededError
from inference_service.text.chat_template import ChatTemplate, ChatTurn
from tests.support.chat_cases import CASES, EXPECTED, NOW, SPECIAL_TOKENS, TEMPLATES, turns_of


def source(name: str) -> str:
    """A template of the fixture."""
    return (TEMPLATES / f"{name}.jinja").read_text()


def template_of(case: dict[str, Any]) -> ChatTemplate:
    """The model's template; "named" has one for chats with tools."""
    is_named = case["template"] == "named"
    return ChatTemplate(
        source("plain_named" if is_named else case["template"]),
        SPECIAL_TOKENS,
        now=lambda: datetime.fromisoformat(NOW),
        tool_source=source("tool_use_named") if is_named else None,
    )


def render(case: dict[str, Any]) -> str:
    """As our API renders a case."""
    return template_of(case).render(
        turns_of(case),
        add_generation_prompt=case["add_generation_prompt"],
        max_characters=100_000,
        arguments=case["arguments"],
    )


@pytest.mark.parametrize(
    "case", [c for c in CASES if "rendered" in EXPECTED[c["name"]]], ids=lambda c: c["name"]
)
def test_renders_as_transformers_does(case: dict[str, Any]) -> None:
    """Tools, calls and results, contents of every kind, reasoning, dates and documents: letter by letter."""
    assert render(case) == EXPECTED[case["name"]]["rendered"]


@pytest.mark.parametrize(
    "case", [c for c in CASES if "error" in EXPECTED[c["name"]]], ids=lambda c: c["name"]
)
def test_refuses_what_transformers_refuses(case: dict[str, Any]) -> None:
    """The template's own words, or Python's, as the caller's error."""
    with pytest.raises(InvalidRequestError) as caught:
        render(case)
    assert str(caught.value).endswith(f"refuses these messages: {EXPECTED[case['name']]['error']}")


def test_both_kinds_of_case_are_there() -> None:
    """Neither list above is empty by accident, and no case was left out when expectations were made."""
    assert {case["name"] for case in CASES} == set(EXPECTED)
    assert sum("rendered" in e for e in EXPECTED.values()) >= 45
    assert sum("error" in e for e in EXPECTED.values()) >= 4


def test_indented_tools_are_bounded_as_they_are_written() -> None:
    """A megabyte of nested lists, indented by the template, would be hundreds of megabytes of spaces."""
    nested: Any = 1
    for _ in range(100):
        nested = [nested]
    tools = [{"x": [nested] * 5000}]
    template = ChatTemplate(source("llama3_like"), SPECIAL_TOKENS)
    tracemalloc.start()
    try:
        with pytest.raises(LimitExceededError, match="no text above 100000 can fit"):
            template.render(
                [ChatTurn("user", "hi")],
                add_generation_prompt=True,
                max_characters=100_000,
                arguments={"tools": tools},
            )
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10 << 20


@pytest.mark.parametrize("form", ["files", "tokenizer_config.json"])
def test_a_template_for_tools_of_its_own(tmp_path: Path, form: str) -> None:
    """Found where transformers saves it; a chat without tools takes the default one."""
    named = {"default": source("plain_named"), "tool_use": source("tool_use_named")}
    if form == "files":
        (tmp_path / "chat_template.jinja").write_text(named["default"])
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(named["tool_use"])
        (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "wrong"}')
    else:
        entries = [{"name": name, "template": text} for name, text in named.items()]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": entries}))
    template = ChatTemplate.from_directory(tmp_path)
    for arguments, rendered in (
        ({}, "PLAIN True|user=hi"),
        ({"tools": [{"function": {"name": "f"}}]}, "TOOLS f|user=hi"),
    ):
        assert (
            template.render(
                [ChatTurn("user", "hi")], add_generation_prompt=True, max_characters=99, arguments=arguments
            )
            == rendered
        )


def test_special_tokens_of_the_models_own(tmp_path: Path) -> None:
    """Any "..._token" of the configuration, as transformers hands them to templates; flags are none."""
    config = {"image_token": "<img>", "add_bos_token": True, "extra_special_tokens": {"eoi_token": "</img>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text(
        "{{ image_token }}{{ eoi_token }}{{ add_bos_token is defined }}"
    )
    template = ChatTemplate.from_directory(tmp_path)
    rendered = template.render([ChatTurn("user", "hi")], add_generation_prompt=True, max_characters=99)
    assert rendered == "<img></img>False"
