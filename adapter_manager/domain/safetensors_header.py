"""A strict, bounded reader of safetensors headers. It reads nothing but the header and trusts no number.

Stricter than the reference library: no key twice, no tensor of zero size, no empty file of tensors, no bytes
that belong to no tensor, and names of plain characters only.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from adapter_manager.domain.errors import InvalidAdapterError
from adapter_manager.domain.shown_text import shown
from adapter_manager.domain.strict_json import check_not_lfs_pointer, parse_object

# The reference library allows 100 MB. 32 MiB hold some 180,000 tensors, more than any adapter known.
MAX_HEADER_BYTES = 32 << 20
MAX_TENSORS = 200_000
MAX_NAME_LENGTH = 512
MAX_DIMENSIONS = 8
_METADATA_ITEMS = 8192

DTYPE_BYTES = MappingProxyType(
    {
        "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1,
        "F8_E5M2FNUZ": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4,
        "C64": 8, "I64": 8, "U64": 8, "F64": 8,
    }
)  # fmt: skip
FLOAT_DTYPES = frozenset({"BF16", "F16", "F32", "F64"})

_NAME = re.compile(r"[A-Za-z0-9_.\-]+")
_ENTRY_KEYS = frozenset({"dtype", "shape", "data_offsets"})


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor; `offset` counts from the start of `file_name`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file_name: str
    offset: int
    num_bytes: int

    @property
    def itemsize(self) -> int:
        """Bytes an element."""
        return DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """The tensors of one file, in the order of their bytes."""

    tensors: tuple[TensorEntry, ...]


def read_header(read_at: Callable[[int, int], bytes], file_bytes: int, file_name: str) -> SafetensorsHeader:
    """Read and check the header of one file.

    Args:
        read_at: returns the bytes at (offset, length); called for the header only.
        file_bytes: the file's size.
        file_name: for messages and for the entries.

    Raises:
        InvalidAdapterError: anything that is not a whole and sound file.
    """
    if file_bytes == 0:
        raise _invalid(file_name, "is empty")
    check_not_lfs_pointer(read_at(0, min(file_bytes, 64)), file_name)
    if file_bytes < 8:
        raise _invalid(file_name, f"has {file_bytes} bytes, too few for a safetensors file")
    header_bytes = int.from_bytes(read_at(0, 8), "little")
    if header_bytes > file_bytes - 8:
        raise _invalid(
            file_name, f"is cut short: its header of {header_bytes} bytes does not fit {file_bytes} bytes"
        )
    if header_bytes > MAX_HEADER_BYTES:
        raise _invalid(
            file_name, f"has a header of {header_bytes} bytes; at most {MAX_HEADER_BYTES} are read"
        )
    data = read_at(8, header_bytes)
    if not data.startswith(b"{"):
        raise _invalid(file_name, "does not begin with a JSON header: it is not a safetensors file")
    num_tensors = data.count(b'"data_offsets"')
    if num_tensors > MAX_TENSORS:
        raise _invalid(file_name, f"holds {num_tensors} tensors; at most {MAX_TENSORS} are read")
    # An entry has three brackets and at most MAX_DIMENSIONS + 3 commas; metadata may hold texts of any kind.
    raw = parse_object(
        data,
        f"{file_name} header",
        max_depth=3,
        max_items=14 * num_tensors + _METADATA_ITEMS,
        max_objects=num_tensors + _METADATA_ITEMS,
    )
    _check_metadata(raw.pop("__metadata__", None), file_name)
    if not raw:
        raise _invalid(file_name, "holds no tensors")
    data_start = 8 + header_bytes
    entries = [_entry(name, value, file_name, data_start) for name, value in raw.items()]
    entries.sort(key=lambda e: e.offset)
    _check_ranges(entries, data_start, file_bytes, file_name)
    return SafetensorsHeader(tuple(entries))


def _check_metadata(metadata: Any, file_name: str) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _invalid(file_name, "has a __metadata__ that is not an object of strings")


def _entry(name: str, raw: Any, file_name: str, data_start: int) -> TensorEntry:
    if len(name) > MAX_NAME_LENGTH or not _NAME.fullmatch(name):
        raise _invalid(
            file_name,
            f"has a tensor named {shown(name)}: a name has at most {MAX_NAME_LENGTH} characters, of "
            "[A-Za-z0-9_.-]",
        )
    if not isinstance(raw, dict) or raw.keys() != _ENTRY_KEYS:
        raise _invalid(file_name, f"tensor {shown(name)} does not have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = raw["dtype"], raw["shape"], raw["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise _invalid(file_name, f"tensor {shown(name)} has the unknown dtype {shown(dtype)}")
    dims = _sizes(shape)
    if dims is None or len(dims) > MAX_DIMENSIONS:
        raise _invalid(
            file_name, f"tensor {shown(name)} needs a shape of at most {MAX_DIMENSIONS} whole numbers"
        )
    if 0 in dims:
        raise _invalid(file_name, f"tensor {shown(name)} of shape {list(dims)} has no elements")
    bounds = _sizes(offsets)
    if bounds is None or len(bounds) != 2 or bounds[0] > bounds[1]:
        raise _invalid(file_name, f"tensor {shown(name)} needs two ascending data_offsets")
    num_bytes = DTYPE_BYTES[dtype]
    for dim in dims:
        num_bytes *= dim
        if num_bytes >= 1 << 63:
            raise _invalid(file_name, f"tensor {shown(name)}: the product of its shape overflows 64 bits")
    if num_bytes != bounds[1] - bounds[0]:
        raise _invalid(
            file_name,
            f"tensor {shown(name)} of shape {list(dims)} and dtype {dtype} takes {num_bytes} bytes, "
            f"its data_offsets give it {bounds[1] - bounds[0]}",
        )
    return TensorEntry(name, dtype, dims, file_name, data_start + bounds[0], num_bytes)


def _sizes(raw: Any) -> tuple[int, ...] | None:
    """The list's numbers if each is an int in [0, 2**63), else None; True and False are no numbers."""
    if not isinstance(raw, list) or not all(type(d) is int and 0 <= d < 1 << 63 for d in raw):
        return None
    return tuple(raw)


def _check_ranges(entries: list[TensorEntry], data_start: int, file_bytes: int, file_name: str) -> None:
    """Each byte behind the header belongs to exactly one tensor."""
    end = data_start
    for entry in entries:
        if entry.offset < end:
            raise _invalid(file_name, f"tensor {shown(entry.name)} shares bytes with another tensor")
        if entry.offset > end:
            raise _invalid(
                file_name, f"has a hole of {entry.offset - end} bytes before tensor {shown(entry.name)}"
            )
        end = entry.offset + entry.num_bytes
        if end > file_bytes:
            raise _invalid(
                file_name,
                f"is cut short: tensor {shown(entry.name)} ends at byte {end}, the file at {file_bytes}",
            )
    if end != file_bytes:
        raise _invalid(file_name, f"has {file_bytes - end} bytes that belong to no tensor")


def _invalid(file_name: str, problem: str) -> InvalidAdapterError:
    return InvalidAdapterError(
        f"{file_name} {problem}", metadata={"problem": "SAFETENSORS", "file": file_name}
    )
