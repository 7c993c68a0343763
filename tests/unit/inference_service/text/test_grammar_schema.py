"""Schemas as texts: what is no JSON, what would be read as more than a schema, options in vain places."""

import json

import pytest

from inference_service.domain.structured_output import Constraint, ConstraintKind, GrammarRefusedError
from inference_service.text.grammar import serialized_grammar
from inference_service.text.grammar_schema import read_schema


@pytest.mark.parametrize(
    "text",
    [
        '{"type":"null"}, "name":"x"',
        '{"type":"null"}, "lark_grammar":"start: \\"hello\\""',
        '{"type":"null"}, "json_schema":{"type":"boolean"}',
        '{"type":"null"}},{"name":"b","lark_grammar":"start: \\"hello\\""',
        '{"type":"null"}}], "max_tokens": 1, "x":[{"a":1',
        '{"type":"null"}}],"grammars":[{"lark_grammar":"start: \\"hello\\""',
    ],
)
@pytest.mark.parametrize("allows_whitespace", [True, False])
def test_a_schema_is_one_value(text: str, allows_whitespace: bool) -> None:
    """Not the middle of a larger text; the column is the client's."""
    with pytest.raises(GrammarRefusedError, match=r"not JSON: Extra data: line 1 column 16 \(char 15\)"):
        serialized_grammar(Constraint(ConstraintKind.JSON_SCHEMA, text, allows_whitespace=allows_whitespace))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not JSON"),
        ('{"minimum": NaN}', "NaN is no number"),
        ('{"minimum": -Infinity}', "-Infinity is no number"),
        ('{"minimum": 1e999}', "not JSON: Out of range"),
        ('{"a": {"b": 1, "b": 2}}', 'the key "b" twice'),
        ("[1]", "this is an array"),
        ('"x"', "this is a string"),
        ("1", "this is a number"),
        ("1.5", "this is a number"),
        ("null", "this is null"),
        ("[" * 100_000, "120 levels"),
        ('{"a":' * 100_000, "120 levels"),
        ('{"items":' * 121 + "{}" + "}" * 121, "120 levels"),
        ('{"minimum": ' + "9" * 5000 + "}", "not JSON"),
        ('{"x-guidance": 1}', "x-guidance at the top has no effect"),
        ('{"items": {"x-guidance": {}}}', "x-guidance at /items has no effect"),
        ('{"anyOf": [{}, {"properties": {"x-guidance": {"x-guidance": {}}}}]}', "/anyOf/1/properties/x-guid"),
    ],
)
def test_refused(text: str, words: str) -> None:
    """By what is wrong, on one short line."""
    with pytest.raises(GrammarRefusedError) as caught:
        read_schema(text)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "schema",
    [
        True,
        False,
        {},
        {"properties": {"x-guidance": {"type": "null"}}, "required": ["x-guidance"]},
        {"x-guidance": {"lenient": True}, "const": {"x-guidance": 1}, "enum": [{"x-guidance": 1}]},
        {"multipleOf": 0.1, "maximum": 12345678901234567890123, "title": "é\u2028\ud800"},
    ],
)
def test_the_same_value_again(schema: object) -> None:
    """Order of keys, large integers and lone surrogates included."""
    text = json.dumps(schema, indent=3)
    assert json.loads(read_schema(text)) == schema
    if isinstance(schema, dict):
        assert list(json.loads(read_schema(text))) == list(schema)
    deepest = '{"items":' * 119 + "{}" + "}" * 119
    assert json.loads(read_schema(deepest)) == json.loads(deepest)
