"""Mutations of safetensors headers and bodies: numbers, names, structure, lengths, bytes."""

import json
import random
import struct
from typing import Any

from tests.support.fuzz.adapter_draft import Draft, Mutation

_SIZES: tuple[Any, ...] = (
    0, -1, 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, 10**50, 10**4000, 1.0, 1.5, float("nan"), float("inf"),
    True,
    None, "1", [], [1],
)  # fmt: skip
_DTYPES: tuple[Any, ...] = (
    "F7", "f32", "", "F8_E8M0", "F4", "C64", "I32", "F16", "BF16", "F64", "BOOL", "../x", None, 7, [], {},
    "F32\x00",
    "F" * 100_000,
)  # fmt: skip
_SHAPES: tuple[Any, ...] = (
    [], [0], [0, 32], [1], [2**32, 2**32], [2**31, 2**31, 4], [1] * 9, [1] * 100_000, None, "x", {}, [[1]],
    [-1, -1],
    [2**62, 4], [True, 8],
)  # fmt: skip


def _entry(rng: random.Random, draft: Draft) -> tuple[str, str, dict[str, Any]]:
    """A file with its header, and a tensor of it."""
    file = rng.choice(list(draft.headers))
    # What an earlier mutation broke is left alone.
    whole = [n for n, e in draft.headers[file].items() if isinstance(e, dict) and _is_whole(e)]
    name = rng.choice(whole)
    return file, name, draft.headers[file][name]


_SMALL_ENTRY = b', "t%d": {"dtype":"F32","shape":[1],"data_offsets":[0,4]}'


def has_whole_entry(header: dict[str, Any]) -> bool:
    """Whether there is anything left to mutate."""
    return any(isinstance(e, dict) and _is_whole(e) for e in header.values())


def _is_whole(entry: dict[str, Any]) -> bool:
    lists = isinstance(entry.get("shape"), list) and isinstance(entry.get("data_offsets"), list)
    return lists and all(type(n) is int for n in [*entry["shape"], *entry["data_offsets"]])


def sizes(rng: random.Random, draft: Draft) -> None:
    """A number of a shape or an offset."""
    file, name, entry = _entry(rng, draft)
    key = rng.choice(["shape", "data_offsets"])
    numbers = list(entry[key]) or [1]
    place = rng.randrange(len(numbers))
    old = numbers[place]
    numbers[place] = rng.choice([*_SIZES, old + 1, old - 1, old * 2, old // 2, old + 4, old - 4])
    entry[key] = numbers
    draft.note(f"{file}: {name} {key}[{place}] changed", file, draft.module_of(name))


def field_of_entry(rng: random.Random, draft: Draft) -> None:
    """A whole field, one too few or one too many; or the entry itself."""
    file, name, entry = _entry(rng, draft)
    match rng.randrange(6):
        case 0:
            entry["dtype"] = rng.choice(_DTYPES)
        case 1:
            entry["shape"] = rng.choice(_SHAPES)
        case 2:
            entry["data_offsets"] = rng.choice(
                [[], [0], [0, 0, 0], [4, 0], None, "x", {}, [[0, 4]], [2**62, 2**63 - 1]]
            )
        case 3:
            del entry[rng.choice(list(entry))]
        case 4:
            entry[rng.choice(["extra", "Dtype", "__proto__", ""])] = 1
        case _:
            draft.headers[file][name] = rng.choice([None, 1, "x", [], [entry], True, {}, {"a": entry}])
    draft.note(f"{file}: entry of {name} changed", file, draft.module_of(name))


def offsets(rng: random.Random, draft: Draft) -> None:
    """Ranges that overlap, coincide, are exchanged, or leave a hole."""
    file, name, entry = _entry(rng, draft)
    _, other, second = _entry(rng, draft)
    start, end = (*entry["data_offsets"], 0, 4)[:2]
    match rng.randrange(4):
        case 0:
            entry["data_offsets"] = list(second["data_offsets"])
        case 1:
            entry["data_offsets"], second["data_offsets"] = second["data_offsets"], entry["data_offsets"]
        case 2:
            entry["data_offsets"] = [start + 4, end + 4]
        case _:
            draft.headers[file].pop(name)
    draft.note(f"{file}: ranges of {name} and {other}", file, draft.module_of(name), draft.module_of(other))


def metadata(rng: random.Random, draft: Draft) -> None:
    """What safetensors allows as free text, and what it does not."""
    file = rng.choice(list(draft.headers))
    draft.headers[file]["__metadata__"] = rng.choice(
        [
            None, [], "x", 1, {"a": 1}, {"a": None}, {"a": {"b": "c"}}, {"k" * 100_000: "v" * 100_000}, {},
            {str(n): "x" for n in range(3000)}, {str(n): "x" for n in range(20_000)}, {"a": "[{" * 50_000},
            {"\ud800": "x"},
            {"a": "x" * 5_000_000},
        ]
    )  # fmt: skip
    draft.note(f"{file}: another __metadata__", file)


def name_of_entry(rng: random.Random, draft: Draft) -> None:
    """A name that no file system, terminal or log should see."""
    file, name, entry = _entry(rng, draft)
    new = rng.choice(
        [
            "", " ", "../../etc/passwd", "/abs", "a\x00b", "a\nb", "\ud800", "\u202eevil", "x" * 513,
            "x" * 1_000_000, "é",
            "__metadata__", "__proto__", f"{name} ", f"{name}\x00", name.upper(), "base_model.model." * 40,
            "." * 400, f"{'.0' * 250}.lora_A.weight", "lora_A.weight", ".lora_A.weight", "%s%n{0}",
        ]
    )  # fmt: skip
    del draft.headers[file][name]
    draft.headers[file][new] = entry
    draft.note(f"{file}: {name} is called {new[:40]!a}", file, draft.module_of(name))


def header_text(rng: random.Random, draft: Draft) -> None:
    """The header's text and the length before it."""
    file = rng.choice(list(draft.headers))
    data = draft.files[file]
    (length,) = struct.unpack("<Q", data[:8])
    text, body = data[8 : 8 + length], data[8 + length :]
    kind, made = rng.choice(list(_texts(rng, text).items()))
    said = len(made)
    if rng.random() < 0.25:
        said = rng.choice(
            [
                0,
                1,
                7,
                length - 1,
                length + 1,
                length + len(body),
                len(data),
                2**31,
                2**40,
                2**62,
                2**63,
                2**64 - 1,
            ]
        )
    draft.files[file] = struct.pack("<Q", said) + made + body
    draft.note(f"{file}: header {kind}, said to be {said} bytes", file)


def _texts(rng: random.Random, text: bytes) -> dict[str, bytes]:
    try:
        first = json.loads(text)
        name = next(n for n in first if n != "__metadata__")
    except (ValueError, StopIteration, RecursionError):  # an earlier mutation was here, too
        first, name = {}, "x"
    again = json.dumps(first.get(name)).encode()
    depth = rng.choice([3, 4, 1000, 200_000])
    return {
        "as it was": text, "empty": b"", "{}": b"{}", "list": b"[]", "spaces after": text + b" " * 64,
        "spaces before": b"  " + text,
        "name twice": text[:-1] + b", " + json.dumps(name).encode() + b": " + again + b"}",
        "metadata twice": text[:-1] + b', "__metadata__": {}}', "bad UTF-8": text[:-1] + b', "\xff\xfe": 1}',
        "deep": b'{"a":' * depth + b"1" + b"}" * depth,
        "deep lists": text[:-1] + b', "x": ' + b"[" * depth + b"]" * depth + b"}",
        "many commas": text[:-1] + b', "x": [' + b"0," * 400_000 + b"0]}",
        "many objects": text[:-1] + b', "x": [' + b"{}," * 100_000 + b"{}]}",
        "many small entries": text[:-1] + b"".join(_SMALL_ENTRY % n for n in range(5000)) + b"}",
        "said offsets": text[:-1] + b', "x": "' + b'\\"data_offsets\\"' * 3000 + b'"}',
        "NUL": text + b"\x00", "cut": text[: rng.randrange(len(text) + 1)],
        "NaN": text.replace(b'"shape": [', b'"shape": [NaN, ', 1),
        "LFS": b"version https://git-lfs.github.com/spec/v1\n",
        "BOM": b"\xef\xbb\xbf" + text, "quotes": text[:-1] + b', "' + b"\\" * 100_001,
        "single quotes": text.replace(b'"', b"'"),
    }  # fmt: skip


def body(rng: random.Random, draft: Draft) -> None:
    """Bytes too few, too many, or others."""
    file = rng.choice(list(draft.headers))
    data = bytearray(draft.files[file])
    match rng.randrange(5):
        case 0:
            del data[-rng.choice([1, 1, 2, 4, 100]) :]
        case 1:
            data += bytes(rng.choice([1, 4, 256]))
        case 2:
            del data[rng.randrange(len(data)) :]
        case 3:
            for _ in range(rng.choice([1, 3, 50])):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        case _:
            data[rng.randrange(min(len(data), 400))] = rng.randrange(256)
    draft.files[file] = bytes(data)
    draft.note(
        f"{file}: bytes changed", file, "tensor", "experts", "layers", "rank", "weights", "orientation"
    )


# Of the header's values before the files are made; and of the files' bytes.
HEADER_VALUES: tuple[Mutation, ...] = (sizes, sizes, field_of_entry, offsets, metadata, name_of_entry)
HEADER_TEXTS: tuple[Mutation, ...] = (header_text, body)
