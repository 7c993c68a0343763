"""What an answer must look like: a value, and its message. Pure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lorikeet.inference.v1 import generation_pb2 as pb
from lorikeet_client.keywords import texts


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """Exactly one of the first five is given; the answer keeps to it from its first token on.

    Args:
        json_schema: a JSON Schema, as a mapping or as JSON text.
        json_object: any JSON object.
        regex: a regular expression that the whole answer matches.
        grammar: a grammar in llguidance's form of Lark's syntax; its first rule is `start`.
        choice: one of these texts.
        disable_any_whitespace: with JSON: none between its tokens.
    """

    json_schema: Mapping[str, Any] | str | None = None
    json_object: bool = False
    regex: str | None = None
    grammar: str | None = None
    choice: Sequence[str] = ()
    disable_any_whitespace: bool = False


def structured_output(output: StructuredOutput) -> pb.StructuredOutput:
    """The message; raises TypeError unless exactly one constraint is given, or for what JSON cannot say."""
    choice = texts(output.choice, "choice")
    given = (output.json_schema, output.regex, output.grammar)
    if sum(value is not None for value in given) + output.json_object + bool(choice) != 1:
        raise TypeError("give exactly one of json_schema, json_object, regex, grammar and choice")
    schema = output.json_schema
    if schema is not None and not isinstance(schema, str):
        # The order of keys is that of the answer's.
        schema = json.dumps(dict(schema), ensure_ascii=False, allow_nan=False)
    message = pb.StructuredOutput(disable_any_whitespace=output.disable_any_whitespace)
    if schema is not None:
        message.json_schema = schema
    elif output.json_object:
        message.json_object = True
    elif output.regex is not None:
        message.regex = output.regex
    elif output.grammar is not None:
        message.grammar = output.grammar
    else:
        message.choice.values.extend(choice)
    return message
