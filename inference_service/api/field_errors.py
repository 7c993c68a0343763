"""Errors that name a field of a request, its value, and what to do or which limit it passes."""

from typing import NoReturn

from inference_service.domain.errors import InvalidRequestError, LimitExceededError


def refuse(field: str, value: str, advice: str) -> NoReturn:
    """Raise InvalidRequestError."""
    raise InvalidRequestError(f"{field} is {value}: {advice}", metadata={"field": field, "value": value})


def limit_error(message: str, field: str, limit: str, value: int, maximum: int) -> LimitExceededError:
    """The error whose metadata says which limit was passed by how much."""
    return LimitExceededError(
        message, metadata={"field": field, "limit": limit, "value": str(value), "maximum": str(maximum)}
    )


def check_ids_known(field: str, ids: list[int], vocab_size: int, *, are_keys: bool = False) -> None:
    """Raise LimitExceededError where an id is outside the vocabulary; `ids` has at least one.

    `are_keys`: the field is a map by id, and its entries are named so.
    """
    largest = max(ids)
    if largest >= vocab_size:
        where = f"{field}[{largest if are_keys else ids.index(largest)}]"
        raise limit_error(
            f"{where} {'is for token' if are_keys else 'is'} {largest}; the vocabulary ends at "
            f"{vocab_size - 1}: send ids of this model's own tokenizer",
            where,
            "vocab_size",
            largest,
            vocab_size - 1,
        )
