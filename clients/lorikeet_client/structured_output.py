"""What an answer must look like: a value, and its message. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lorikeet.inference.v1 import generation_pb2 as pb
from lorikeet_client.keywords import texts
from lorikeet_client.message_fields import add_items, check_kind, json_text, set_field

_PATH = "sampling.structured_output"


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
    """The message.

    Raises:
        TypeError: not exactly one constraint, or one of another kind, or what JSON cannot say.
        InvalidValueError: a number that JSON cannot say.
    """
    check_kind(output, StructuredOutput, _PATH, "StructuredOutput: write StructuredOutput(json_schema={})")
    check_kind(output.json_object, bool, f"{_PATH}.json_object", "True or False")
    choice = texts(output.choice, "choice")
    given = (output.json_schema, output.regex, output.grammar)
    if sum(value is not None for value in given) + output.json_object + bool(choice) != 1:
        raise TypeError("give exactly one of json_schema, json_object, regex, grammar and choice")
    schema = output.json_schema
    if schema is not None and not isinstance(schema, str):
        # The order of keys is that of the answer's.
        check_kind(schema, Mapping, f"{_PATH}.json_schema", "a mapping or JSON text")
        schema = json_text(schema, f"{_PATH}.json_schema")
    message = pb.StructuredOutput()
    set_field(
        message, "disable_any_whitespace", output.disable_any_whitespace, f"{_PATH}.disable_any_whitespace"
    )
    if schema is not None:
        set_field(message, "json_schema", schema, f"{_PATH}.json_schema")
    elif output.json_object:
        message.json_object = True
    elif output.regex is not None:
        set_field(message, "regex", output.regex, f"{_PATH}.regex")
    elif output.grammar is not None:
        set_field(message, "grammar", output.grammar, f"{_PATH}.grammar")
    else:
        add_items(message.choice, "values", choice, f"{_PATH}.choice")
    return message
