"""Structured output from a value to its message."""

import json
from typing import Any

import pytest

from lorikeet.inference.v1 import generation_pb2 as pb
from lorikeet_client import SamplingParams, StructuredOutput
from lorikeet_client.generation_messages import sampling_params
from lorikeet_client.structured_output import structured_output


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (StructuredOutput(json_schema='{"type":"null"}'), pb.StructuredOutput(json_schema='{"type":"null"}')),
        (
            StructuredOutput(json_object=True, disable_any_whitespace=True),
            pb.StructuredOutput(json_object=True, disable_any_whitespace=True),
        ),
        (StructuredOutput(regex=""), pb.StructuredOutput(regex="")),
        (StructuredOutput(grammar="start: A"), pb.StructuredOutput(grammar="start: A")),
        (StructuredOutput(choice=["b", "a"]), pb.StructuredOutput(choice=pb.Choices(values=["b", "a"]))),
    ],
)
def test_every_kind_arrives(value: StructuredOutput, expected: pb.StructuredOutput) -> None:
    """As one of the message's constraints."""
    message = sampling_params(SamplingParams(structured_output=value))
    assert message.structured_output == expected
    assert message.structured_output.WhichOneof("constraint") == expected.WhichOneof("constraint")


def test_a_schema_keeps_its_order() -> None:
    """Keys come in the order of the mapping: it is that of the answer's properties."""
    schema = {"type": "object", "properties": {"z": {"type": "null"}, "ä": {}}}
    message = structured_output(StructuredOutput(json_schema=schema))
    assert list(json.loads(message.json_schema)["properties"]) == ["z", "ä"]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"disable_any_whitespace": True},
        {"regex": "a", "json_object": True},
        {"choice": "yes"},
        {"json_schema": {}, "choice": ["a"]},
    ],
)
def test_exactly_one_constraint(fields: dict[str, Any]) -> None:
    """None, two, and one text in place of a list."""
    with pytest.raises(TypeError):
        structured_output(StructuredOutput(**fields))


def test_no_structured_output() -> None:
    """It stays absent."""
    assert not sampling_params(SamplingParams()).HasField("structured_output")
