"""JSON of an upload: what is refused before it is parsed, and how little memory that takes."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapter_manager.domain.errors import InvalidAdapterError
from adapter_manager.domain.strict_json import parse_object
from lorikeet_bench.ingest.peak_memory import PeakMemory

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text('[]{}"\\,:ax\u00e9'),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('[]{}"\\,:ax'), inner, max_size=4),
    max_leaves=20,
)
LONG = {
    "text": b"x" * (8 << 20),
    "escapes": b"\\n" * (4 << 20),
    "escaped quotes": b'\\"' * (4 << 20),
    "mixed": b"a\\\\" * (3 << 20),
    "brackets": b"[{" * (1 << 10) + b"y" * (8 << 20),
}


def depth_of(value: object) -> int:
    """Brackets that are open at once."""
    if isinstance(value, dict):
        return 1 + max((depth_of(v) for v in value.values()), default=0)
    if isinstance(value, list):
        return 1 + max((depth_of(v) for v in value), default=0)
    return 0


@given(JSON)
def test_depth_is_that_of_the_document_whatever_stands_in_strings(value: object) -> None:
    """A document is taken at its depth, and refused for it at one less."""
    document = {"key": value}
    data, depth = json.dumps(document).encode(), depth_of(document)
    assert parse_object(data, "x", max_depth=depth, max_items=1000) == document
    if depth > 1:
        with pytest.raises(InvalidAdapterError, match=re.escape(f"nested more than {depth - 1} deep")):
            parse_object(data, "x", max_depth=depth - 1, max_items=1000)


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("is_closed", [True, False])
def test_a_long_string_takes_memory_of_its_own_size(name: str, is_closed: bool) -> None:
    """8 MiB in one string among brackets: a few copies at most, no bookkeeping for each character."""
    data = b'{"a": [[1]], "b": "' + LONG[name] + (b'"}' if is_closed else b"")
    memory = PeakMemory.of_this_process()
    if is_closed:
        assert parse_object(data, "x", max_depth=3, max_items=10_000)["a"] == [[1]]
    else:
        with pytest.raises(InvalidAdapterError, match="is not JSON"):
            parse_object(data, "x", max_depth=3, max_items=10_000)
    assert memory.highest_bytes() - memory.start_bytes < 100 << 20
