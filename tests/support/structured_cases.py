"""Constraints with bounded answers, and who judges an answer apart from llguidance: jsonschema, re, lark."""

import json
import random
import re
from typing import Any

import jsonschema
import lark

from lorikeet.inference.v1 import generation_pb2 as pb

# Each is a full match by `re` too; bounded, so that random models come to their end.
REGEXES = (
    r"[a-c]{1,8}",
    r"(yes|no|maybe)( sir)?",
    r"\([0-9]{3}\) [0-9]{3}-[0-9]{4}",
    r"#([0-9a-f]{3}|[0-9a-f]{6})",
    r"([A-Z][a-z]{0,5} ){0,3}[A-Z]\.",
    r"[äöü€漢]{1,4}\n?",
    r"\"[^\"\\\x00-\x1f]{0,12}\"",
    r"(0|[1-9][0-9]{0,3})(\.[0-9]{1,2})?",
    r"a?b?c?d?(ef){2,3}[^a-z]",
    r"[\x20-\x7e]{5,9}",
)
# The same text is a grammar to both parsers.
GRAMMARS = (
    'start: "a" | "b" "c"',
    'start: item ("," item)? ("," item)?\nitem: WORD | NUMBER\nWORD: /[a-z]{1,5}/\nNUMBER: /[0-9]{1,4}/',
    'start: pair\npair: "(" inner ")"\ninner: "x" | "(" "y" ")" | "[" /[a-b]{1,3}/ "]"',
    'start: A B?\nA: /[A-F]{2}/\nB: "é" | "漢字"',
    'start: sum\nsum: term ("+" term)?\nterm: /[0-9]{1,2}/ | "(" /[0-9]/ "*" /[0-9]/ ")"',
)
CHOICES = (
    ("yes", "no"),
    ("a", "ab", "abc", "b"),
    ('say "hi"', "back\\slash", "new\nline", "é漢😀", "/", "<|im_end|>"),
    tuple(f"option {i}" for i in range(40)),
)
SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "boolean"},
    {"enum": ["red", "green", 3, None, {"a": [1]}]},
    {"const": {"x": "y"}},
    {"type": "integer", "minimum": -20, "maximum": 300},
    {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25},
    {"type": "string", "maxLength": 6},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4},
    {"type": "array", "prefixItems": [{"type": "integer", "maximum": 9, "minimum": 0}, {"type": "null"}],
     "items": False, "minItems": 2},
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0,
                                                                         "maximum": 150}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}, "c": {"enum": ["ü", "漢"]}},
        "additionalProperties": False,
    },
    {
        "$defs": {"leaf": {"type": "string", "maxLength": 3}},
        "type": "object",
        "properties": {"left": {"$ref": "#/$defs/leaf"}, "right": {"anyOf": [{"$ref": "#/$defs/leaf"},
                                                                            {"type": "null"}]}},
        "required": ["left", "right"],
        "additionalProperties": False,
    },
    {"anyOf": [{"type": "null"}, {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 3},
                                  "maxItems": 3}]},
)  # fmt: skip


def random_schema(draw: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema whose answers are short."""
    kinds = ["boolean", "null", "integer", "string", "enum", "const", "pattern"]
    if depth:
        kinds += ["object", "array", "anyOf"] * 2
    match draw.choice(kinds):
        case "integer":
            low = draw.randrange(-1000, 1000)
            return {"type": "integer", "minimum": low, "maximum": low + draw.randrange(2000)}
        case "string":
            low = draw.randrange(3)
            return {"type": "string", "minLength": low, "maxLength": low + draw.randrange(6)}
        case "enum":
            return {"enum": draw.sample(["", "a", "b c", "é", 1, 2.5, -7, True, None, [], [1, "x"], {}], 3)}
        case "const":
            return {"const": draw.choice(["text", 12, ["a", {"b": None}], {"k": "v"}])}
        case "pattern":
            return {
                "type": "string",
                "pattern": draw.choice(["^[a-z]{1,4}$", "^(ab|cd){1,2}$", "^[0-9]{2}$"]),
            }
        case "object":
            names = draw.sample(["a", "b", "name", "Größe", "x-y", "with space", 'q"uote'], draw.randrange(4))
            return {
                "type": "object",
                "properties": {name: random_schema(draw, depth - 1) for name in names},
                "required": [name for name in names if draw.random() < 0.6],
                "additionalProperties": False,
            }
        case "array":
            low = draw.randrange(2)
            return {
                "type": "array",
                "items": random_schema(draw, depth - 1),
                "minItems": low,
                "maxItems": low + draw.randrange(3),
            }
        case "anyOf":
            return {"anyOf": [random_schema(draw, depth - 1) for _ in range(draw.randrange(1, 4))]}
        case kind:
            return {"type": kind}


def schema_of(schema: dict[str, Any], *, compact: bool = True) -> pb.StructuredOutput:
    """The message; compact, since random models love whitespace."""
    return pb.StructuredOutput(json_schema=json.dumps(schema), disable_any_whitespace=compact)


def constraints(draw: random.Random, count: int) -> list[pb.StructuredOutput]:
    """`count` constraints of all kinds, every fixed one at least once where there is room."""
    fixed = [
        *(schema_of(schema) for schema in SCHEMAS),
        *(pb.StructuredOutput(regex=regex) for regex in REGEXES),
        *(pb.StructuredOutput(grammar=grammar) for grammar in GRAMMARS),
        *(pb.StructuredOutput(choice=pb.Choices(values=values)) for values in CHOICES),
    ]
    draw.shuffle(fixed)
    return [*fixed, *(schema_of(random_schema(draw)) for _ in range(count - len(fixed)))][:count]


def satisfies(text: str, output: pb.StructuredOutput) -> bool:
    """Whether a whole answer is what was asked for."""
    match output.WhichOneof("constraint"):
        case "json_schema":
            return _is_valid(text, json.loads(output.json_schema))
        case "json_object":
            return _is_valid(text, {"type": "object"})
        case "regex":
            return re.fullmatch(output.regex, text) is not None
        case "choice":
            return text in output.choice.values
        case _:
            try:
                lark.Lark(output.grammar, parser="earley", lexer="dynamic").parse(text)
            except lark.exceptions.LarkError:
                return False
            return True


def _is_valid(text: str, schema: dict[str, Any]) -> bool:
    try:
        validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
        return validator.is_valid(json.loads(text))
    except json.JSONDecodeError:
        return False
