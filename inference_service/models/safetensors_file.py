"""One safetensors file, open and mapped into memory; its header is checked before anything is believed."""

import hashlib
import json
import math
import mmap
import os
import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from inference_service.models.errors import CheckpointError
from inference_service.models.weight_reader import FilePart, read_exactly

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_HASHED_BYTES = 1 << 20
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file. `begin` and `end` are byte offsets from the file's start."""

    name: str
    dtype_name: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """Names, shapes and bytes of one file. Tensors are views of the mapping, valid while this object lives.

    Raises:
        CheckpointError: the file is missing, cut short or no safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._fd)
            # A private writable mapping: torch warns of read-only buffers, and nobody writes to it.
            self._bytes = mmap.mmap(self._fd, 0, access=mmap.ACCESS_COPY)
        except FileNotFoundError:
            raise CheckpointError(f"{path} does not exist") from None
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        self.header = self._read_header()
        self.tensors = self._read_index()

    def part(self, name: str) -> FilePart:
        """Where the tensor's bytes are, for a reader; the file stays open while this object lives."""
        stored = self.tensors[name]
        return FilePart(self.path, self._fd, stored.begin, stored.end, _DTYPES[stored.dtype_name])

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor as a view of the file; do not write to it."""
        stored = self.tensors[name]
        dtype = _DTYPES[stored.dtype_name]
        if stored.begin == stored.end:
            return torch.empty(stored.shape, dtype=dtype)
        flat = torch.frombuffer(
            self._bytes, dtype=torch.uint8, offset=stored.begin, count=stored.end - stored.begin
        )
        if stored.begin % dtype.itemsize:
            flat = flat.clone()  # only unaligned headers come here; a view needs alignment
        return flat.view(dtype).view(stored.shape)

    def raw(self, name: str, max_bytes: int | None = None) -> memoryview:
        """The tensor's bytes as stored, or the first `max_bytes` of them."""
        stored = self.tensors[name]
        end = stored.end if max_bytes is None else min(stored.end, stored.begin + max_bytes)
        return memoryview(self._bytes)[stored.begin : end]

    def sha256(self, name: str) -> str:
        """Of the tensor's bytes as stored, in hex. Read, not mapped: pages would count as this process's."""
        part = self.part(name)
        digest, buffer = hashlib.sha256(), torch.empty(_HASHED_BYTES, dtype=torch.uint8)
        for begin in range(part.begin, part.end, _HASHED_BYTES):
            piece = replace(part, begin=begin, end=min(begin + _HASHED_BYTES, part.end))
            filled = buffer[: piece.end - begin]
            read_exactly(piece, filled)
            digest.update(filled.numpy().data)
        return digest.hexdigest()

    def _read_header(self) -> bytes:
        size = len(self._bytes)
        length = int.from_bytes(self._bytes[:8], "little") if size >= 8 else size
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise CheckpointError(
                f"{self.path} is no safetensors file or was cut short: its header of {length} bytes does not "
                f"fit its {size} bytes"
            )
        return self._bytes[8 : 8 + length]

    def _read_index(self) -> dict[str, StoredTensor]:
        try:
            raw = cast("dict[str, dict[str, Any]]", json.loads(self.header))
            entries = {name: entry for name, entry in raw.items() if name != "__metadata__"}
            return {name: self._entry(name, entry) for name, entry in entries.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{self.path}: the safetensors header is damaged: {error!r}") from error

    def _entry(self, name: str, entry: dict[str, Any]) -> StoredTensor:
        shape = tuple(int(n) for n in entry["shape"])
        start = 8 + len(self.header)
        begin, end = (start + int(offset) for offset in entry["data_offsets"])
        dtype_name = str(entry["dtype"])
        if dtype_name not in _DTYPES:
            raise CheckpointError(f"{self.path}: tensor {name!r} has the unknown dtype {dtype_name!r}")
        wanted = math.prod(shape) * _DTYPES[dtype_name].itemsize
        if begin < start or end - begin != wanted or end > len(self._bytes) or min(shape, default=0) < 0:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} of shape {shape} and dtype {dtype_name} needs {wanted} bytes, "
                f"but the header gives it bytes {begin} to {end} of a file of {len(self._bytes)}"
            )
        return StoredTensor(name, dtype_name, shape, begin, end)
