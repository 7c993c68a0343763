"""Values that no request can carry: refused before anything is sent, by field and value."""

import json
from dataclasses import fields
from typing import Any

import pytest

from lorikeet.inference.v1 import generation_pb2 as pb
from lorikeet_client import ChatMessage, InvalidValueError, LorikeetError, SamplingParams, StructuredOutput
from lorikeet_client.generation_messages import generate_request, sampling_params

OUT_OF_RANGE = [
    ({"max_tokens": -1}, "sampling.max_tokens: -1 is not a whole number from 0 to 4294967295"),
    ({"top_k": -1}, "sampling.top_k: -1 is not"),
    ({"n": -1}, "sampling.n: -1 is not"),
    ({"logprobs": -1}, "sampling.logprobs: -1 is not"),
    (
        {"seed": 2**64},
        "sampling.seed: 18446744073709551616 is not a whole number from 0 to 18446744073709551615",
    ),
    ({"stop_token_ids": [3, -7]}, "sampling.stop_token_ids: -7 is not"),
    ({"logit_bias": {1: 0.5, -2: 1.0}}, "sampling.logit_bias: {-2: 1.0} is not a whole number from 0"),
    ({"stop_strings": ["\ud800"]}, "sampling.stop_strings: '\\ud800' is not a text"),
    ({"structured_output": StructuredOutput(json_schema={"minimum": float("nan")})}, "json_schema: "),
]
OF_ANOTHER_KIND = [
    ({"temperature": "1"}, "sampling.temperature: '1' is not a number"),
    ({"max_tokens": 1.5}, "sampling.max_tokens: 1.5 is not"),
    ({"stop_token_ids": 4}, "sampling.stop_token_ids: 4 is not a list"),
    ({"stop_strings": 4}, "stop_strings: 4 is not a list of texts"),
    ({"stop_strings": ["a", 4]}, "sampling.stop_strings: 4 is not a text"),
    ({"logit_bias": [1, 2]}, "sampling.logit_bias: [1, 2] is not a mapping"),
    (
        {"structured_output": {"regex": "a"}},
        "sampling.structured_output: {'regex': 'a'} is not StructuredOutput",
    ),
    (
        {"structured_output": StructuredOutput(json_schema=5)},  # type: ignore[arg-type]
        "sampling.structured_output.json_schema: 5 is not a mapping or JSON text",
    ),
    (
        {"structured_output": StructuredOutput(json_object="yes")},  # type: ignore[arg-type]
        "sampling.structured_output.json_object: 'yes' is not True or False",
    ),
]


@pytest.mark.parametrize(("values", "words"), OUT_OF_RANGE)
def test_out_of_range(values: dict[str, Any], words: str) -> None:
    """An error of the client's tree and a ValueError at once; the command shows it as any other."""
    with pytest.raises(InvalidValueError) as caught:
        generate_request("x", sampling=SamplingParams(**values))
    assert words in str(caught.value)
    assert isinstance(caught.value, LorikeetError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(("values", "words"), OF_ANOTHER_KIND)
def test_of_another_kind(values: dict[str, Any], words: str) -> None:
    """A TypeError, as Python's own."""
    with pytest.raises(TypeError) as caught:
        generate_request("x", sampling=SamplingParams(**values))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sampling": {"temperature": 0}}, "sampling: {'temperature': 0} is not SamplingParams"),
        ({"chat": "Hello"}, "chat: 'Hello' is not a list of messages"),
        ({"chat": {"role": "user"}}, "is not a list of messages"),
        ({"chat": ["Hello"]}, "chat[0]: 'Hello' is not a ChatMessage"),
        ({"chat": [{"content": "Hello"}]}, "chat[0]: {'content': 'Hello'} has no \"role\""),
        ({"chat": [ChatMessage("user", 5)]}, "chat[0].content: 5 is not a text"),  # type: ignore[arg-type]
        ({"chat": [ChatMessage("user", "", {"a": {1}})]}, "chat[0].fields: Object of type set"),
        ({"chat": [], "template_arguments": {"a": {1}}}, "template_arguments: Object of type set"),
        ({"token_ids": ["a"]}, "token_ids: 'a' is not a whole number"),
    ],
)
def test_input_of_another_kind(options: dict[str, Any], words: str) -> None:
    """The rest of a request, by its own names."""
    with pytest.raises(TypeError) as caught:
        generate_request(None if "sampling" not in options else "x", **options)
    assert words in str(caught.value)


def test_token_ids_out_of_range() -> None:
    """By the first that no token has."""
    with pytest.raises(InvalidValueError, match="token_ids: -1 is not a whole number"):
        generate_request(None, token_ids=[1, -1, -2])


def test_messages_of_openais_form() -> None:
    """Further fields stay beside role and content, in order; a content that is no text is one of them."""
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    request = generate_request(
        None,
        chat=[
            {"role": "user", "content": "Hello", "name": "ann"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"content": "", "role": "tool"},
            ChatMessage("user", "Bye"),
        ],
    )
    sent = [(turn.role, turn.content, json.loads(turn.fields_json or "{}")) for turn in request.chat.messages]
    assert sent == [
        ("user", "Hello", {"name": "ann"}),
        ("assistant", "", {"content": None, "tool_calls": [call]}),
        ("assistant", "", {"content": None, "tool_calls": [call]}),
        ("user", "", {"content": [{"type": "text", "text": "a"}]}),
        ("tool", "", {}),
        ("user", "Bye", {}),
    ]


def test_every_parameter_is_carried() -> None:
    """Each field of the value has the message's name and arrives; absent ones stay absent."""
    values: dict[str, Any] = dict.fromkeys((field.name for field in fields(SamplingParams)), 1)
    values |= {"stop_strings": ["a"], "bad_words": ["b"], "stop_token_ids": [1], "logit_bias": {1: 1.0}}
    values |= dict.fromkeys(("ignore_eos", "include_stop_string", "skip_special_tokens"), True)
    values["structured_output"] = StructuredOutput(regex="a")
    message = sampling_params(SamplingParams(**values))
    assert {field.name for field, _ in message.ListFields()} == set(values)
    assert set(values) == set(pb.SamplingParams.DESCRIPTOR.fields_by_name)
    assert sampling_params(SamplingParams()) == pb.SamplingParams()
