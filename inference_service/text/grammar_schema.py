"""JSON schemas as texts of clients: read strictly, so that what is compiled is what the client wrote."""

import json
from collections.abc import Iterator
from typing import Any, NoReturn

from inference_service.domain.structured_output import GrammarRefusedError

# llguidance's parser takes 128, a few of which are its own around the schema.
_MAX_DEPTH = 120
_OPTIONS = "x-guidance"
# Keywords whose values are not schemas, and those whose values have schemas under names of the client's.
_DATA = frozenset({"enum", "const", "default", "examples", _OPTIONS})
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})


def read_schema(text: str) -> str:
    """The schema again, as JSON of one value and no more: it becomes part of a larger text.

    Raises:
        GrammarRefusedError: it is no JSON, repeats a key, has a number that JSON has not or no float64 can
            hold, is nested too deeply, is neither object nor boolean, or has options of llguidance's where
            it does not read them. Lines and columns are those of `text`.
    """
    try:
        schema = json.loads(text, object_pairs_hook=_object, parse_constant=_no_number)
        again = json.dumps(schema, allow_nan=False)
    except RecursionError:
        raise GrammarRefusedError(_TOO_DEEP) from None
    except GrammarRefusedError:
        raise
    except ValueError as error:
        raise GrammarRefusedError(f"it is not JSON: {error}") from error
    _check_depth(schema)
    if not isinstance(schema, dict | bool):
        raise GrammarRefusedError(f"a schema is an object or a boolean, this is {_KINDS[type(schema)]}")
    for path, options in _options(schema, "", is_schema=True):
        if path or not isinstance(options, dict):
            where = f"at {path}" if path else "at the top"
            raise GrammarRefusedError(
                f"{_OPTIONS} {where} has no effect: it is an object at the top of the schema"
            )
    return again


_TOO_DEEP = f"it is nested more than {_MAX_DEPTH} levels deep"
_KINDS = {list: "an array", str: "a string", int: "a number", float: "a number", type(None): "null"}


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for key, value in pairs:
        if key in members:
            raise GrammarRefusedError(f"an object of it has the key {json.dumps(key[:100])} twice")
        members[key] = value
    return members


def _no_number(name: str) -> NoReturn:
    raise GrammarRefusedError(f"it is not JSON: {name} is no number there")


def _check_depth(schema: Any) -> None:
    level = [schema]
    for _ in range(_MAX_DEPTH + 1):
        level = [child for value in level for child in _children(value)]
        if not level:
            return
    raise GrammarRefusedError(_TOO_DEEP)


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _options(value: Any, path: str, *, is_schema: bool) -> Iterator[tuple[str, Any]]:
    """Where options of llguidance's stand, by JSON pointer to the object around them, with their value."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _options(item, f"{path}/{index}", is_schema=True)
    elif isinstance(value, dict):
        if is_schema and _OPTIONS in value:
            yield path, value[_OPTIONS]
        for key, child in value.items():
            if not (is_schema and key in _DATA):
                yield from _options(child, f"{path}/{key}", is_schema=not (is_schema and key in _NAMED))
