"""Constraints that nobody means well with: nonsense, damage, nesting, repetition, recursion."""

import json
import random
import string
from collections.abc import Iterator

from inference_service.domain.structured_output import Constraint, ConstraintKind
from tests.support.structured_cases import random_schema

_ALPHABET = string.printable + "é漢\x00\U0001f600"
_TEXTS = (ConstraintKind.JSON_SCHEMA, ConstraintKind.REGEX, ConstraintKind.GRAMMAR)
_STARTS = ("start: ", "start: A\nA: ", "", "%json ", "%llguidance ", "%regex ", "start[lazy]: ")
_LARK = (
    '"a"', "/x+/", "start", "A", "|", "(", ")", "[", "]", "{3,}", "{1,100000}", "~9..99999999", "*", "+", "?",
    "& ", "~", "<[*]>", "<[^1]>", "<|im_end|>", "<nobody>", '%json {"type":"object"}', "@x", "\n", "B: ",
    "!", '%regex {"substring_chars": "abcabc"}', "::", "_", "/(a|b|ab)*c{1,999}/", '"\\u0000"',
    "%ignore /a*/\n",
)  # fmt: skip
_EXPRESSIONS = (
    "(a|aa)+", "(.*a){50}", "[a-z]{1000}", "(x{1,300}){1,300}", "(?i)ß+", "\\p{L}{1,200}", "(?s:.)*", "(((",
    "[^\\x00-\\x7f]{1,99}", ")))", "a{9999999999}", "\\b", "(?P<n>a)(?P=n)", "(?<=a)", "[z-a]", "**", "|",
    "(", ")", "{2,40}",
)  # fmt: skip
_KEYWORDS = ("minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "multipleOf")
_NUMBERS = ("-1", "0", "1e308", "1e-9", "12345678901234567890123", "0.1", "97", "null", '"x"', "65537")
_NESTS = (
    ('{"items":', "}"), ('{"anyOf":[{},', "]}"), ('{"allOf":[', "]}"), ('{"not":', "}"),
    ('{"properties":{"a":', "}}"), ('{"additionalProperties":', "}"),
)  # fmt: skip
_REFERENCES = ("#/$defs/n0", "#", "#/nowhere", "file:///etc/passwd", "https://[::1]/x", "%")


def hostile_constraints(draw: random.Random) -> Iterator[Constraint]:
    """Without an end."""
    makers = (_nonsense, _lark, _expression, _damaged, _nested, _numbers, _recursive)
    while True:
        yield draw.choice(makers)(draw)


def _nonsense(draw: random.Random) -> Constraint:
    text = "".join(draw.choices(_ALPHABET, k=draw.randrange(1, 300)))
    return Constraint(draw.choice(_TEXTS), text)


def _lark(draw: random.Random) -> Constraint:
    text = draw.choice(_STARTS) + "".join(draw.choices(_LARK, k=draw.randrange(1, 40)))
    return Constraint(ConstraintKind.GRAMMAR, text)


def _expression(draw: random.Random) -> Constraint:
    return Constraint(ConstraintKind.REGEX, "".join(draw.choices(_EXPRESSIONS, k=draw.randrange(1, 9))))


def _damaged(draw: random.Random) -> Constraint:
    schema = json.dumps(random_schema(draw, 4))
    at, length = draw.randrange(len(schema)), draw.randrange(4)
    return Constraint(
        ConstraintKind.JSON_SCHEMA, schema[:at] + draw.choice(_ALPHABET) + schema[at + length :]
    )


def _nested(draw: random.Random) -> Constraint:
    depth, (opened, closed) = draw.choice((50, 120, 130, 3000)), draw.choice(_NESTS)
    return Constraint(ConstraintKind.JSON_SCHEMA, opened * depth + "{}" + closed * depth)


def _numbers(draw: random.Random) -> Constraint:
    pairs = [f'"{draw.choice(_KEYWORDS)}":{draw.choice(_NUMBERS)}' for _ in range(draw.randrange(1, 5))]
    kind = draw.choice(("string", "integer", "number", "array", "object"))
    return Constraint(ConstraintKind.JSON_SCHEMA, f'{{"type":"{kind}",{",".join(pairs)}}}')


def _recursive(draw: random.Random) -> Constraint:
    names = [f"n{i}" for i in range(draw.randrange(1, 6))]
    defs = {
        name: {
            draw.choice(("anyOf", "allOf", "oneOf")): [
                {"$ref": f"#/$defs/{draw.choice(names)}"} for _ in range(draw.randrange(1, 4))
            ]
        }
        for name in names
    }
    return Constraint(
        ConstraintKind.JSON_SCHEMA, json.dumps({"$defs": defs, "$ref": draw.choice(_REFERENCES)})
    )
