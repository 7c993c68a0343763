"""What a chat carries beside its messages: JSON texts, parsed and bounded before the template sees them."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_service.api.convert_prompt import MAX_CHAT_JSON_BYTES, tokenize_prompt
from inference_service.api.generation_request import ChatPrompt
from inference_service.domain.errors import InvalidRequestError, LimitExceededError
from inference_service.text.chat_template import ChatTemplate
from lorikeet.inference.v1 import generation_pb2

_TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**60), 2**60),
    st.floats(allow_nan=False, allow_infinity=False),
    _TEXTS,
)
_KEYS = st.text("abcdez", min_size=1, max_size=3)
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=4),
    max_leaves=8,
)
_OBJECTS = st.dictionaries(_KEYS, _VALUES, max_size=5)


def read(arguments: str = "", fields: str = "") -> ChatPrompt:
    """The parsed chat of one message."""
    turn = generation_pb2.ChatMessage(role="user", content="hi", fields_json=fields)
    chat = generation_pb2.ChatMessages(messages=[turn], template_arguments_json=arguments)
    prompt = tokenize_prompt(generation_pb2.TokenizeRequest(chat=chat))
    assert isinstance(prompt, ChatPrompt)
    return prompt


@given(_OBJECTS, _OBJECTS)
def test_objects_arrive_in_their_own_order(arguments: dict[str, Any], fields: dict[str, Any]) -> None:
    """Values and, at every depth, the order of keys: a template prints both."""
    texts = [json.dumps(value, ensure_ascii=False) for value in (arguments, fields)]
    prompt = read(*texts)
    assert json.dumps(prompt.arguments, ensure_ascii=False) == texts[0]
    assert json.dumps(prompt.turns[0].fields, ensure_ascii=False) == texts[1]
    assert prompt.num_json_bytes == sum(len(text.encode()) for text in texts)


def test_absent_is_empty() -> None:
    """No text, no variables."""
    prompt = read()
    assert (prompt.arguments, prompt.turns[0].fields, prompt.num_json_bytes) == ({}, {}, 0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("{'a': 1}", "not JSON"),
        ('{"a": NaN}', "not JSON"),
        ("nope", "not JSON"),
        ("[1]", "not a JSON object"),
        ("null", "not a JSON object"),
        ('"text"', "not a JSON object"),
        ('{"a":' + "[" * 200_000 + "]" * 200_000 + "}", "not JSON"),
        ('{"a": "\\ud800"}', "not JSON"),
    ],
)
@pytest.mark.parametrize(
    ("give", "field"),
    [
        (lambda text: read(arguments=text), "chat.template_arguments_json"),
        (lambda text: read(fields=text), "chat.messages[0].fields_json"),
    ],
)
def test_what_is_no_object_is_refused(
    give: Callable[[str], object], field: str, text: str, words: str
) -> None:
    """By the name of the field; deep nesting neither crashes nor hangs."""
    with pytest.raises(InvalidRequestError, match=words) as caught:
        give(text)
    assert caught.value.metadata["field"] == field


@pytest.mark.parametrize(
    ("arguments", "fields", "name"),
    [
        ('{"messages": []}', "", "messages"),
        ('{"add_generation_prompt": false}', "", "add_generation_prompt"),
        ("", '{"role": "system"}', "role"),
        ("", '{"content": "x"}', "content"),
    ],
)
def test_what_has_its_own_place_is_refused(arguments: str, fields: str, name: str) -> None:
    """Two values for one thing: which one counts would be a guess."""
    with pytest.raises(InvalidRequestError, match=f"reserved name '{name}'"):
        read(arguments, fields)


@pytest.mark.parametrize("value", ['{"a": 1}', '"x"', "[1]", "[{}, null]", "0", "[[]]", "true"])
@pytest.mark.parametrize("name", ["tools", "documents"])
def test_tools_and_documents_are_lists_of_objects(name: str, value: str) -> None:
    """A template would loop over the letters of a text or the keys of an object."""
    with pytest.raises(InvalidRequestError, match=f"{name} are no list of objects") as caught:
        read(f'{{"{name}": {value}}}')
    assert caught.value.metadata["field"] == "chat.template_arguments_json"
    for fine in ("null", "[]", '[{"a": 1}]'):
        assert read(f'{{"{name}": {fine}}}').arguments == {name: json.loads(fine)}


@pytest.mark.parametrize("content", ["null", '[{"type": "text", "text": "x"}]', '""'])
def test_a_content_that_is_no_text(content: str) -> None:
    """Takes the place of an empty one."""
    turn = generation_pb2.ChatMessage(role="user", fields_json=f'{{"content": {content}}}')
    prompt = tokenize_prompt(
        generation_pb2.TokenizeRequest(chat=generation_pb2.ChatMessages(messages=[turn]))
    )
    assert isinstance(prompt, ChatPrompt)
    assert prompt.turns[0].fields == {"content": json.loads(content)}


def test_the_sum_is_bounded() -> None:
    """Arguments and all messages' fields together; the limit itself passes."""
    half = '{"a": "' + "x" * (MAX_CHAT_JSON_BYTES // 2 - 9) + '"}'
    assert read(half, half).num_json_bytes == MAX_CHAT_JSON_BYTES
    with pytest.raises(LimitExceededError) as caught:
        read(half, half + " ")
    assert caught.value.metadata["limit"] == "max_chat_json_bytes"
    assert caught.value.metadata["value"] == str(MAX_CHAT_JSON_BYTES + 1)


def test_a_template_that_recurses_ends_with_the_callers_error() -> None:
    """What is nested deeper than a template's macro can follow is refused, not an internal error."""
    template = ChatTemplate("{% macro m(x) %}[{{ m(x[0]) if x else '' }}]{% endmacro %}{{ m(x) }}", {})
    deep = read('{"x": ' + "[" * 400 + "]" * 400 + "}")
    with pytest.raises(InvalidRequestError, match="refuses these messages"):
        template.render(
            deep.turns, add_generation_prompt=True, max_characters=10_000, arguments=deep.arguments
        )
    flat = read('{"x": [[]]}')
    rendered = template.render(
        flat.turns, add_generation_prompt=True, max_characters=99, arguments=flat.arguments
    )
    assert rendered == "[[]]"
