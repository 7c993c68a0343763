"""Structured output of a message: every kind, what is refused by field, what is above a limit."""

from typing import Any

import pytest

from inference_service.api import convert_constraint
from inference_service.api.convert_sampling import read_sampling
from inference_service.api.generation_request import RequestRules
from inference_service.domain.errors import InvalidRequestError, LimitExceededError
from inference_service.domain.structured_output import Constraint, ConstraintKind
from inference_service.text.sampling_defaults import SamplingDefaults
from lorikeet.inference.v1 import generation_pb2 as pb
from tests.support.fake_engine import make_info

RULES = RequestRules(make_info(), SamplingDefaults())


def read(**fields: Any) -> Constraint | None:
    """The constraint of a request."""
    message = pb.SamplingParams(structured_output=pb.StructuredOutput(**fields))
    return read_sampling(message, RULES).constraint


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"json_schema": '{"type": "null"}'}, Constraint(ConstraintKind.JSON_SCHEMA, '{"type": "null"}')),
        ({"json_object": True}, Constraint(ConstraintKind.JSON_OBJECT)),
        (
            {"json_object": True, "disable_any_whitespace": True},
            Constraint(ConstraintKind.JSON_OBJECT, allows_whitespace=False),
        ),
        ({"regex": "a+"}, Constraint(ConstraintKind.REGEX, "a+")),
        ({"grammar": "start: A"}, Constraint(ConstraintKind.GRAMMAR, "start: A")),
        (
            {"choice": pb.Choices(values=["b", "a", "b"])},
            Constraint(ConstraintKind.CHOICE, choices=("b", "a")),
        ),
    ],
)
def test_every_kind(fields: dict[str, Any], expected: Constraint) -> None:
    """As asked; a text that stands twice is one choice."""
    assert read(**fields) == expected


def test_none_is_none() -> None:
    """Requests without it have no constraint."""
    assert read_sampling(pb.SamplingParams(), RULES).constraint is None


def test_ignore_eos_with_a_constraint() -> None:
    """The end of a complete answer still ends the request, though late."""
    output = pb.StructuredOutput(regex="a+")
    request = read_sampling(pb.SamplingParams(structured_output=output, ignore_eos=True), RULES)
    assert request.ends_late
    assert set(RULES.info.eos_token_ids) <= set(request.params.stop_token_ids)
    assert not read_sampling(pb.SamplingParams(structured_output=output), RULES).ends_late


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, ""),
        ({"json_schema": ""}, ".json_schema"),
        ({"json_object": False}, ".json_object"),
        ({"regex": ""}, ".regex"),
        ({"grammar": ""}, ".grammar"),
        ({"choice": pb.Choices()}, ".choice"),
        ({"choice": pb.Choices(values=["a", ""])}, ".choice.values[1]"),
        ({"regex": "a", "disable_any_whitespace": True}, ".disable_any_whitespace"),
    ],
)
def test_refused_by_field(fields: dict[str, Any], field: str) -> None:
    """Empty ones, and options that mean nothing."""
    with pytest.raises(InvalidRequestError) as caught:
        read(**fields)
    assert caught.value.metadata["field"] == "sampling.structured_output" + field


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({"json_schema": "é" * (128 << 10) + "x"}, "max_constraint_bytes"),
        ({"regex": "a" * ((256 << 10) + 1)}, "max_constraint_bytes"),
        ({"choice": pb.Choices(values=["a" * (128 << 10), "b" * ((128 << 10) + 1)])}, "max_constraint_bytes"),
        ({"choice": pb.Choices(values=map(str, range(4097)))}, "max_choices"),
    ],
)
def test_limits_are_named(fields: dict[str, Any], limit: str) -> None:
    """Limit, value and maximum."""
    with pytest.raises(LimitExceededError) as caught:
        read(**fields)
    metadata = caught.value.metadata
    assert metadata["limit"] == limit
    assert int(metadata["value"]) == int(metadata["maximum"]) + 1


def test_shown_in_errors() -> None:
    """Field and value, short and printable."""
    field, value = convert_constraint.shown(Constraint(ConstraintKind.REGEX, "é" * 300))
    assert field == "sampling.structured_output.regex"
    assert value.isascii()
    assert len(value) == 80
    assert convert_constraint.shown(Constraint(ConstraintKind.JSON_OBJECT))[1] == "true"
