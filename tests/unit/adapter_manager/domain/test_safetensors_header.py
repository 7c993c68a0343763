"""Safetensors headers: every malformation is refused with its reason, and nothing is allocated for it."""

import json
import struct
import tracemalloc

import pytest

from adapter_manager.domain.errors import InvalidAdapterError
from adapter_manager.domain.safetensors_header import MAX_HEADER_BYTES, SafetensorsHeader, read_header
from tests.support.adapter_directories import safetensors_bytes

ENTRY = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def parse(data: bytes, claimed: int | None = None) -> SafetensorsHeader:
    """Parse a file given as bytes; `claimed` is its size where that is not the bytes' own."""

    def read_at(offset: int, length: int) -> bytes:
        return data[offset : offset + length]

    return read_header(read_at, len(data) if claimed is None else claimed, "adapter_model.safetensors")


def two(first: object, second: object) -> bytes:
    """A file of two tensors with 48 bytes of data."""
    return safetensors_bytes({"a": first, "b": second}, bytes(48))


def test_sound_file_is_read_in_the_order_of_its_bytes() -> None:
    """Offsets count from the start of the file; metadata and padding are allowed."""
    header = {
        "__metadata__": {"format": "pt"},
        "z": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
        "a.b-c_1": ENTRY,
    }
    text = json.dumps(header).encode() + b"   "
    tensors = parse(safetensors_bytes(text, bytes(32))).tensors
    assert [(t.name, t.dtype, t.shape, t.num_bytes) for t in tensors] == [
        ("a.b-c_1", "F32", (2, 3), 24),
        ("z", "BF16", (4,), 8),
    ]
    assert [t.offset for t in tensors] == [8 + len(text), 8 + len(text) + 24]


BROKEN = {
    "empty": (b"", "is empty"),
    "seven bytes": (b"1234567", "too few"),
    "header length 2**62": (safetensors_bytes({}, length=1 << 62), "cut short"),
    "header length 2**64-1": (safetensors_bytes({}, length=(1 << 64) - 1), "cut short"),
    "not JSON": (safetensors_bytes(b"{nope"), "not JSON"),
    "no object": (safetensors_bytes(b"[1]"), "does not begin with a JSON header"),
    "not UTF-8": (safetensors_bytes(b'{"\xff": 1}'), "not UTF-8"),
    "empty header": (safetensors_bytes({}), "holds no tensors"),
    "metadata only": (safetensors_bytes({"__metadata__": {}}), "holds no tensors"),
    "metadata of numbers": (
        safetensors_bytes({"__metadata__": {"a": 1}, "t": ENTRY}, bytes(24)),
        "__metadata__",
    ),
    "git lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "git lfs pull"),
    "cut by one byte": (safetensors_bytes({"t": ENTRY}, bytes(23)), "cut short"),
    "four bytes too many": (safetensors_bytes({"t": ENTRY}, bytes(28)), "4 bytes that belong to no tensor"),
    "overlap": (two(ENTRY, ENTRY | {"data_offsets": [20, 44]}), "shares bytes"),
    "hole": (
        safetensors_bytes({"a": ENTRY, "b": ENTRY | {"data_offsets": [32, 56]}}, bytes(56)),
        "hole of 8 bytes",
    ),
    "hole at the start": (
        safetensors_bytes({"a": ENTRY | {"data_offsets": [8, 32]}}, bytes(32)),
        "hole of 8",
    ),
    "offsets descend": (two(ENTRY, ENTRY | {"data_offsets": [48, 24]}), "ascending"),
    "offset negative": (two(ENTRY, ENTRY | {"data_offsets": [-24, 0]}), "ascending"),
    "offset is a bool": (two(ENTRY, ENTRY | {"data_offsets": [False, 24]}), "ascending"),
    "three offsets": (two(ENTRY, ENTRY | {"data_offsets": [24, 48, 48]}), "ascending"),
    "offset past the end": (two(ENTRY, ENTRY | {"data_offsets": [24, 10**9]}), "its data_offsets give it"),
    "shape and bytes differ": (
        two(ENTRY, ENTRY | {"shape": [2, 4], "data_offsets": [24, 48]}),
        "takes 32 bytes",
    ),
    "shape overflows": (two(ENTRY, ENTRY | {"shape": [1 << 40, 1 << 40]}), "overflows 64 bits"),
    "shape of zero": (
        safetensors_bytes({"t": ENTRY | {"shape": [0, 32], "data_offsets": [0, 0]}}),
        "no elements",
    ),
    "shape of floats": (two(ENTRY, ENTRY | {"shape": [2.0, 3.0]}), "shape"),
    "shape of bools": (two(ENTRY, ENTRY | {"shape": [True, True]}), "shape"),
    "nine dimensions": (two(ENTRY, ENTRY | {"shape": [1] * 9}), "shape"),
    "huge integer": (safetensors_bytes(b'{"t": {"shape": [' + b"9" * 5000 + b"]}}"), "out of bounds"),
    "unknown dtype": (two(ENTRY, ENTRY | {"dtype": "F7"}), "unknown dtype 'F7'"),
    "dtype is a list": (two(ENTRY, ENTRY | {"dtype": []}), "unknown dtype"),
    "another field": (two(ENTRY, ENTRY | {"extra": 1}), "exactly dtype, shape and data_offsets"),
    "entry is a list": (two(ENTRY, []), "exactly dtype"),
    "deep": (safetensors_bytes(b'{"t": ' + b"[" * 4_000 + b"]" * 4_000 + b"}"), "nested"),
    "deeper": (safetensors_bytes(b'{"t": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "more values"),
    "repeated name": (
        safetensors_bytes(b'{"t": %b, "t": %b}' % ((json.dumps(ENTRY).encode(),) * 2), bytes(24)),
        "twice",
    ),
    "repeated field": (
        safetensors_bytes(
            b'{"t": {"dtype":"F32","dtype":"F32","shape":[6],"data_offsets":[0,24]}}', bytes(24)
        ),
        "'dtype' twice",
    ),
    "name with a path": (safetensors_bytes({"../../etc/passwd": ENTRY}, bytes(24)), "named"),
    "name with a control character": (safetensors_bytes({"a\x1b[31m\n": ENTRY}, bytes(24)), "named"),
    "empty name": (safetensors_bytes({"": ENTRY}, bytes(24)), "named"),
    "long name": (safetensors_bytes({"a" * 5000: ENTRY}, bytes(24)), "5000 characters"),
    "look-alike name": (safetensors_bytes({"m\u043edel": ENTRY}, bytes(24)), "named"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_file_is_refused_with_its_reason(case: str) -> None:
    """The message says what is wrong, in ASCII, without control characters, and briefly."""
    data, words = BROKEN[case]
    with pytest.raises(InvalidAdapterError) as caught:
        parse(data)
    message = caught.value.message
    assert words in message
    assert message.isascii()
    assert message.isprintable()
    assert len(message) < 400
    assert caught.value.metadata["problem"] in ("SAFETENSORS", "JSON")


def test_claimed_header_length_is_never_allocated() -> None:
    """A header said to be 101 MB of a file said to be that large is refused before it is read."""
    reads = list[int]()
    prefix = struct.pack("<Q", 101 << 20)

    def read_at(offset: int, length: int) -> bytes:
        reads.append(length)
        return (prefix + b"{}" * 40)[offset : offset + length]

    with pytest.raises(InvalidAdapterError, match=str(MAX_HEADER_BYTES)):
        read_header(read_at, 200 << 20, "adapter_model.safetensors")
    assert max(reads) <= 64


@pytest.mark.parametrize("filler", [b"[],", b"{},", b"0,", b'"":0,', b'"a":[[[['])
def test_memory_for_a_hostile_header_is_bounded(filler: bytes) -> None:
    """8 MiB of the smallest JSON values are refused before millions of objects are built."""
    data = safetensors_bytes(b'{"t": [' + filler * ((8 << 20) // len(filler)))
    tracemalloc.start()
    try:
        with pytest.raises(InvalidAdapterError):
            parse(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 40 << 20
