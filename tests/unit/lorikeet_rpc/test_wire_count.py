"""Counting a serialized message's parts without parsing it."""

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from lorikeet.inference.v1 import generation_pb2
from lorikeet_rpc.wire_count import TooManyPartsError, WireBounds, check_parts

REQUEST = generation_pb2.GenerateRequest.DESCRIPTOR
NOTHING = WireBounds(max_fields=10, max_packed_values=5)


def chat(num_turns: int) -> bytes:
    """A serialized request of so many turns."""
    turns = [generation_pb2.ChatMessage(role="u")] * num_turns
    return generation_pb2.GenerateRequest(
        chat=generation_pb2.ChatMessages(messages=turns)
    ).SerializeToString()


@pytest.mark.parametrize(("num_turns", "passes"), [(0, True), (4, True), (5, False)])
def test_nested_fields_are_counted(num_turns: int, passes: bool) -> None:
    """The chat is one field, each turn and its role two more."""
    if passes:
        check_parts(chat(num_turns), REQUEST, NOTHING)
        return
    with pytest.raises(TooManyPartsError) as caught:
        check_parts(chat(num_turns), REQUEST, NOTHING)
    assert (caught.value.limit, caught.value.maximum) == ("max_message_fields", 10)


@pytest.mark.parametrize("value", [1, 300, 2**32 - 1])
def test_packed_numbers_are_counted_by_number_not_by_byte(value: int) -> None:
    """As many as are allowed pass at any size, one more is refused with the true count."""
    ids = [generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=[value] * n)) for n in (5, 6)]
    check_parts(ids[0].SerializeToString(), REQUEST, NOTHING)
    with pytest.raises(TooManyPartsError) as caught:
        check_parts(ids[1].SerializeToString(), REQUEST, NOTHING)
    assert (caught.value.field, caught.value.value, caught.value.is_exact) == ("ids", 6, True)


def test_text_is_not_counted() -> None:
    """Long strings are one part each, repeated ones too."""
    sampling = generation_pb2.SamplingParams(stop_strings=["x" * 100] * 3)
    request = generation_pb2.GenerateRequest(prompt="y" * 1000, sampling=sampling)
    check_parts(request.SerializeToString(), REQUEST, NOTHING)


def test_parts_hidden_behind_a_group_or_before_an_error_are_counted() -> None:
    """Neither an unknown group nor a broken end lets what the parser will read go uncounted."""
    for raw in (b"\x9b\x06" + b"\x0a\x00" * 20, chat(20) + b"\xff"):
        with pytest.raises(TooManyPartsError):
            check_parts(raw, REQUEST, NOTHING)


@given(st.binary(max_size=200))
def test_any_bytes(raw: bytes) -> None:
    """Never another error than the bound's; what the parser takes within the bounds passes."""
    try:
        check_parts(raw, REQUEST, WireBounds(max_fields=300, max_packed_values=300))
        generation_pb2.GenerateRequest.FromString(raw)
    except DecodeError:
        return


@pytest.mark.parametrize(("tag", "part"), [(b"\x22", b"\x0a\x00"), (b"\x32", b"\x3a\x00")])
def test_counting_a_full_message_of_empty_parts_ends_at_the_bound(tag: bytes, part: bytes) -> None:
    """30 MB that take seconds to parse are refused after 20,000 parts, without a look at the rest."""
    num_parts = 0xF << 20
    raw = tag + encode_varint(len(part) * num_parts) + part * num_parts
    bounds = WireBounds()
    with pytest.raises(TooManyPartsError) as error:
        check_parts(raw, REQUEST, bounds)
    assert not error.value.is_exact
    assert error.value.value == bounds.max_fields + 1


def encode_varint(value: int) -> bytes:
    """Seven bits a byte, lowest first."""
    return bytes([value]) if value < 0x80 else bytes([value & 0x7F | 0x80]) + encode_varint(value >> 7)
