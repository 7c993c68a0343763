"""What this machine does at most: the rates that an ingest cannot exceed."""

import hashlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_BUFFER_BYTES = 64 << 20
_REPEATS = 4
_WRITE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Floors:
    """Rates in MB/s (10**6 bytes): one core's sha256, a copy in memory, a file with and without fsync."""

    sha256_mb_s: float
    memory_copy_mb_s: float
    write_mb_s: float
    write_and_sync_mb_s: float


def measure_floors(directory: Path, num_bytes: int) -> Floors:
    """Measure; the file has `num_bytes`, lies in `directory` and is removed."""
    source = np.frombuffer(bytearray(os.urandom(1 << 20) * (_BUFFER_BYTES >> 20)), np.uint8)
    target = np.zeros_like(source)
    start_s = time.perf_counter()
    for _ in range(_REPEATS):
        hashlib.sha256(source.data).digest()
    hash_s = time.perf_counter() - start_s
    start_s = time.perf_counter()
    for _ in range(_REPEATS):
        np.copyto(target, source)
    copy_s = time.perf_counter() - start_s
    write_s, sync_s = _write(directory / "floor", source, num_bytes)
    return Floors(
        sha256_mb_s=_REPEATS * source.nbytes / 1e6 / hash_s,
        memory_copy_mb_s=_REPEATS * source.nbytes / 1e6 / copy_s,
        write_mb_s=num_bytes / 1e6 / write_s,
        write_and_sync_mb_s=num_bytes / 1e6 / (write_s + sync_s),
    )


def _write(path: Path, source: np.ndarray, num_bytes: int) -> tuple[float, float]:
    """Seconds for writing a new file, and for its fsync."""
    os.sync()
    try:
        with path.open("wb", buffering=0) as file:
            start_s = time.perf_counter()
            for offset in range(0, num_bytes, _WRITE_BYTES):
                begin = offset % source.nbytes
                file.write(source[begin : begin + min(_WRITE_BYTES, num_bytes - offset)].data)
            written_s = time.perf_counter()
            os.fsync(file.fileno())
            return written_s - start_s, time.perf_counter() - written_s
    finally:
        path.unlink(missing_ok=True)
