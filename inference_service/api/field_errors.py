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


def check_ids_known(field: str, ids: list[int], vocab_size: int) -> None:
    """Raise LimitExceededError where an id is outside the vocabulary; `ids` has at least one."""
    largest = max(ids)
    if largest >= vocab_size:
        where = f"{field}[{ids.index(largest)}]"
        raise limit_error(
            f"{where} is {largest}; the vocabulary ends at {vocab_size - 1}",
            where,
            "vocab_size",
            largest,
            vocab_size - 1,
        )
