"""Counts the parts of a serialized message before it is parsed, and stops counting at a bound.

Parsing takes time for each part and holds the interpreter lock all along: 16 million empty strings, 32 MB,
take seconds. Counting 20,000 parts takes about ten milliseconds and then ends.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

# Wire types of the encoding: 0 varint, 1 and 5 fixed, 2 with a length, 3 and 4 around a group.
_MAX_VARINT_BYTES = 10
_WITH_LENGTH = {FieldDescriptor.TYPE_MESSAGE, FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES}
# Deleting these from packed varints leaves the last byte of each.
_CONTINUED = bytes(range(0x80, 0x100))


@dataclass(frozen=True, slots=True)
class WireBounds:
    """Most fields of a message, nested ones counted, and most numbers of its packed fields.

    The first is far above what a request of many chat messages has (three a message). The second is what
    parses in some ten milliseconds; requests below it are refused for their own reasons, in better words.
    """

    max_fields: int = 20_000
    max_packed_values: int = 4_000_000


class TooManyPartsError(ValueError):
    """More than the bound. `value` is what was counted so far, or all where `is_exact`."""

    def __init__(
        self, field: str, what: str, limit: str, value: int, maximum: int, *, is_exact: bool
    ) -> None:
        super().__init__(f"{field}: {value} {what}, at most {maximum}")
        self.field, self.what, self.limit = field, what, limit
        self.value, self.maximum, self.is_exact = value, maximum, is_exact


class _MalformedError(ValueError):
    """The parser will refuse it at the same place, having read only what was counted."""


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    message: Any
    is_packed: bool


def check_parts(raw: bytes, descriptor: Any, bounds: WireBounds) -> None:
    """Raise TooManyPartsError if `raw`, a message of type `descriptor`, has more parts than `bounds` allow.

    Bytes that are no such message pass: the parser says what is wrong with them.
    """
    try:
        _Counter(raw, bounds).count(descriptor)
    except (_MalformedError, IndexError):
        return


class _Counter:
    """Reads fields in their order, nested messages where they stand, as the parser does."""

    def __init__(self, raw: bytes, bounds: WireBounds) -> None:
        self._raw = raw
        self._bounds = bounds
        self._position = 0
        self._num_fields = 0
        self._num_packed = 0

    def count(self, descriptor: Any) -> None:
        """Count everything. Only known fields nest, so the depth is the schema's."""
        outer: list[tuple[Mapping[int, _Field], int]] = []
        fields, end, open_groups = _fields(descriptor), len(self._raw), 0
        while True:
            while self._position >= end:
                if not outer:
                    return
                fields, end = outer.pop()
            self._num_fields += 1
            if self._num_fields > self._bounds.max_fields:
                raise TooManyPartsError(
                    "request", "fields", "max_message_fields", self._num_fields, self._bounds.max_fields,
                    is_exact=False,
                )  # fmt: skip
            tag = self._varint()
            match tag & 7:
                case 0:
                    self._varint()
                case 1:
                    self._position += 8
                case 5:
                    self._position += 4
                case 3:
                    open_groups += 1
                case 4:
                    open_groups -= 1
                case 2:
                    length = self._varint()
                    # A group's numbers are its own: nothing in it is one of our fields.
                    field = None if open_groups else fields.get(tag >> 3)
                    if field is not None and field.message is not None:
                        outer.append((fields, end))
                        fields, end = _fields(field.message), self._position + length
                        continue
                    if field is not None and field.is_packed:
                        self._count_packed(field, length)
                    self._position += length
                case _:
                    raise _MalformedError

    def _count_packed(self, field: _Field, length: int) -> None:
        if self._num_packed + length <= self._bounds.max_packed_values:
            self._num_packed += length  # no number is shorter than a byte
            return
        values = self._raw[self._position : self._position + length]
        self._num_packed += len(values.translate(None, _CONTINUED))
        if self._num_packed > self._bounds.max_packed_values:
            raise TooManyPartsError(
                field.name, "values", "max_packed_values", self._num_packed, self._bounds.max_packed_values,
                is_exact=True,
            )  # fmt: skip

    def _varint(self) -> int:
        value = shift = 0
        for _ in range(_MAX_VARINT_BYTES):
            byte = self._raw[self._position]
            self._position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
        raise _MalformedError


@functools.cache
def _fields(descriptor: Any) -> Mapping[int, _Field]:
    return {
        field.number: _Field(
            field.name, field.message_type, field.is_repeated and field.type not in _WITH_LENGTH
        )
        for field in descriptor.fields
    }
