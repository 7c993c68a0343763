"""Callers' values into a message's fields; what does not fit is refused by field and value. Pure."""

import json
import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import NoReturn

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from lorikeet_client.errors import InvalidValueError

_KINDS = {
    FieldDescriptor.CPPTYPE_UINT32: f"a whole number from 0 to {2**32 - 1}",
    FieldDescriptor.CPPTYPE_UINT64: f"a whole number from 0 to {2**64 - 1}",
    FieldDescriptor.CPPTYPE_FLOAT: "a number",
    FieldDescriptor.CPPTYPE_BOOL: "True or False",
    FieldDescriptor.CPPTYPE_STRING: "a text",
}


def set_field(message: Message, name: str, value: object, path: str = "") -> None:
    """Set a scalar; None leaves it absent.

    Args:
        message: what to change.
        name: the field's.
        value: the caller's.
        path: what the caller calls the field, where that is not its name.

    Raises:
        InvalidValueError: a value outside the field's range.
        TypeError: one of another kind.
    """
    if value is None:
        return
    try:
        setattr(message, name, value)
    except (TypeError, ValueError) as error:
        _refuse(error, path or name, value, _kind(message, name))


def add_items(message: Message, name: str, values: Iterable[object], path: str = "") -> None:
    """Append to a repeated scalar; raises as `set_field`, for the first item that does not fit."""
    field, path = getattr(message, name), path or name
    check_kind(values, Iterable, path, "a list")
    items = tuple(values)
    try:
        field.extend(items)
    except (TypeError, ValueError) as error:
        bad = next((item for item in items if not _is_taken(type(message)(), name, item)), items)
        _refuse(error, path, bad, _kind(message, name))


def add_pairs(message: Message, name: str, pairs: Mapping[int, float] | None, path: str = "") -> None:
    """Fill a map of scalars; raises as `set_field`, for the first key or value that does not fit."""
    if pairs is None:
        return
    path = path or name
    check_kind(pairs, Mapping, path, "a mapping")
    field = getattr(message, name)
    entry = message.DESCRIPTOR.fields_by_name[name].message_type
    assert entry is not None, name
    kinds = entry.fields_by_name
    for key, value in pairs.items():
        try:
            field[key] = value
        except (TypeError, ValueError) as error:
            wanted = " to ".join(_KINDS[kinds[part].cpp_type] for part in ("key", "value"))
            _refuse(error, path, {key: value}, wanted)


def check_kind(value: object, kind: type, path: str, wanted: str) -> None:
    """Raise TypeError where a value is not of a class."""
    if not isinstance(value, kind):
        raise TypeError(f"{path}: {shown(value)} is not {wanted}")


def json_text(values: Mapping[str, object], path: str) -> str:
    """As JSON, keys in their order; raises TypeError or InvalidValueError for what JSON cannot say."""
    check_kind(values, Mapping, path, "a mapping")
    try:
        return json.dumps(dict(values), ensure_ascii=False, allow_nan=False)
    except TypeError as error:
        raise TypeError(f"{path}: {error}") from error
    except ValueError as error:
        raise InvalidValueError(f"{path}: {error}") from error


def shown(value: object) -> str:
    """A value in messages: as Python writes it, cut to a readable length."""
    return reprlib.repr(value)


def _kind(message: Message, name: str) -> str:
    return _KINDS[message.DESCRIPTOR.fields_by_name[name].cpp_type]


def _is_taken(scratch: Message, name: str, item: object) -> bool:
    append: Callable[[object], None] = getattr(scratch, name).append
    try:
        append(item)
    except (TypeError, ValueError):
        return False
    return True


def _refuse(error: Exception, path: str, value: object, wanted: str) -> NoReturn:
    kind = TypeError if isinstance(error, TypeError) else InvalidValueError
    raise kind(f"{path}: {shown(value)} is not {wanted}") from error
