"""Proto enums to our StrEnums and back, by name: members are the proto's less its prefix."""

from enum import StrEnum
from typing import Any, TypeVar

EnumT = TypeVar("EnumT", bound=StrEnum)


def from_number(enum: type[EnumT], wrapper: Any, number: int, prefix: str) -> EnumT:
    """The member for a message's number; UNSPECIFIED for one that a newer server added."""
    try:
        return enum[wrapper.Name(number).removeprefix(prefix)]
    except (ValueError, KeyError):
        return enum["UNSPECIFIED"]


def to_number(member: StrEnum, wrapper: Any, prefix: str) -> Any:
    """The proto's number of a member."""
    return wrapper.Value(prefix + member.name)
