"""JSON from an upload: bounded before it is parsed, no key twice. Callers check the values."""

import json
import re
from typing import Any

from adapter_manager.domain.errors import InvalidAdapterError
from adapter_manager.domain.shown_text import shown

_GIT_LFS = b"version https://git-lfs.github.com/spec/"
# All up to the next bracket that stands in no string, or up to the end. Possessive: a loop that could step
# back keeps 100 bytes for each character of a string, 3.6 GB for a header of 32 MiB.
_UP_TO_BRACKET = re.compile(rb'(?:[^"\[\]{}]++|"(?:[^"\\]++|\\.)*+"?)*+(?:([\[{])|([\]}])|\Z)', re.DOTALL)


def parse_object(
    data: bytes, what: str, *, max_depth: int, max_items: int, max_objects: int | None = None
) -> dict[str, Any]:
    """The JSON object in `data`.

    Args:
        data: the document; the caller has bounded its length.
        what: how messages call the document.
        max_depth: brackets that may be open at once.
        max_items: commas and opening brackets allowed, which bound the memory that the parsed values take.
        max_objects: opening braces allowed, each of which costs a call; `max_items` if it is not given.

    Raises:
        InvalidAdapterError: not UTF-8, not JSON, no object, too deep, too many values, or a key twice.
    """
    num_objects = data.count(b"{")
    num_items = data.count(b",") + data.count(b"[") + num_objects
    if num_items > max_items or (max_objects is not None and num_objects > max_objects):
        raise _invalid(what, "has more values than such a document can need")
    # The depth is counted first: the parser recurses, and its own limit is the interpreter's.
    if data.count(b"[") + data.count(b"{") > max_depth and _is_deeper(data, max_depth):
        raise _invalid(what, f"is nested more than {max_depth} deep")
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_int=_bounded_int)
    except UnicodeDecodeError as error:
        raise _invalid(what, f"is not UTF-8 at byte {error.start}") from None
    except _RepeatedKeyError as error:
        raise _invalid(what, f"has the key {shown(error.key)} twice") from None
    except json.JSONDecodeError as error:
        raise _invalid(what, f"is not JSON: {error.msg} at character {error.pos}") from None
    except (ValueError, RecursionError):
        raise _invalid(what, "holds a value that is out of bounds") from None
    if not isinstance(value, dict):
        raise _invalid(what, "is not a JSON object")
    return value


def check_not_lfs_pointer(data: bytes, what: str) -> None:
    """Raise InvalidAdapterError if `data` begins a Git LFS pointer instead of the file itself."""
    if data.startswith(_GIT_LFS):
        raise _invalid(
            what, "is a Git LFS pointer, not the file itself: run `git lfs pull` where you cloned it"
        )


class _RepeatedKeyError(ValueError):
    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen = set[str]()
        for key, _ in pairs:
            if key in seen:
                raise _RepeatedKeyError(key)
            seen.add(key)
    return result


def _bounded_int(text: str) -> int:
    if len(text) > 40:
        msg = "integer too long"
        raise ValueError(msg)
    return int(text)


def _is_deeper(data: bytes, max_depth: int) -> bool:
    depth = 0
    for token in _UP_TO_BRACKET.finditer(data):
        match token.lastindex:
            case 1:
                depth += 1
                if depth > max_depth:
                    return True
            case 2:
                depth -= 1
            case _:
                break
    return False


def _invalid(what: str, problem: str) -> InvalidAdapterError:
    return InvalidAdapterError(f"{what} {problem}", metadata={"problem": "JSON", "file": what})
