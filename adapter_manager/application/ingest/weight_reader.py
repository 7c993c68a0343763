"""Weights as numpy arrays, read window by window: never a whole tensor at once, every element checked.

bfloat16 has no numpy type: such elements travel as uint16, and become float32 where the payload is float32.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from adapter_manager.application.ingest.adapter_files import AdapterFiles
from adapter_manager.domain.errors import InvalidAdapterError
from adapter_manager.domain.safetensors_header import TensorEntry
from adapter_manager.domain.shown_text import shown
from lorikeet_contract.manifest import PayloadDtype

AnyArray = npt.NDArray[np.generic]

# A window stays in the L2 cache while it is checked and scattered.
WINDOW_BYTES = 1 << 20

_STORED = {"BF16": np.dtype("<u2"), "F16": np.dtype("<f2"), "F32": np.dtype("<f4"), "F64": np.dtype("<f8")}
_BITS = {2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}
# Sign cleared, a float's bits order like its magnitude, and all from this pattern on are infinite or NaN.
_NOT_FINITE = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000, "F64": 0x7FF0000000000000}
PAYLOAD_TYPES = {
    PayloadDtype.FLOAT32: np.dtype("<f4"),
    PayloadDtype.FLOAT16: np.dtype("<f2"),
    PayloadDtype.BFLOAT16: np.dtype("<u2"),
}


class WeightReader:
    """Reads ranges of tensors through one reused window, and keeps the largest magnitude seen of each."""

    def __init__(self, files: AdapterFiles) -> None:
        self._files = files
        self._window = bytearray(WINDOW_BYTES)
        self._scratch = np.empty(WINDOW_BYTES, np.uint8)
        self._largest: dict[str, int] = {}

    def read(self, entry: TensorEntry, first: int, count: int) -> AnyArray:
        """Elements [first, first + count) of a tensor; valid until the next call.

        Raises:
            InvalidAdapterError: one of them is NaN or infinite.
        """
        num_bytes = count * entry.itemsize
        if num_bytes > len(self._window):
            self._window = bytearray(num_bytes)
            self._scratch = np.empty(num_bytes, np.uint8)
        self._files.read_into(
            entry.file_name, entry.offset + first * entry.itemsize, memoryview(self._window)[:num_bytes]
        )
        self._check(entry, num_bytes)
        return np.frombuffer(self._window, _STORED[entry.dtype], count)

    def windows(self, entry: TensorEntry) -> Iterator[AnyArray]:
        """A whole tensor, piece by piece; each piece valid until the next."""
        step, total = WINDOW_BYTES // entry.itemsize, entry.num_bytes // entry.itemsize
        for first in range(0, total, step):
            yield self.read(entry, first, min(step, total - first))

    def largest(self, entry: TensorEntry) -> float:
        """The largest magnitude among the elements read so far."""
        bits = self._largest.get(entry.name, 0)
        if entry.dtype == "BF16":
            return float(np.array(bits << 16, np.uint32).view(np.float32))
        stored = _STORED[entry.dtype]
        return float(np.array(bits, _BITS[stored.itemsize]).view(stored))

    def _check(self, entry: TensorEntry, num_bytes: int) -> None:
        bits = np.frombuffer(self._window, _BITS[entry.itemsize], num_bytes // entry.itemsize)
        magnitudes = self._scratch[:num_bytes].view(bits.dtype)
        np.bitwise_and(bits, (1 << (8 * entry.itemsize - 1)) - 1, out=magnitudes)
        largest = int(magnitudes.max())
        if largest >= _NOT_FINITE[entry.dtype]:
            raise InvalidAdapterError(
                f"tensor {shown(entry.name)} holds NaN or infinity: training diverged, or the file is bad",
                metadata={"problem": "NOT_FINITE", "tensor": entry.name},
            )
        if largest > self._largest.get(entry.name, -1):
            self._largest[entry.name] = largest


def converted(source: AnyArray, dtype: str, payload: PayloadDtype) -> AnyArray:
    """`source`, stored as safetensors `dtype`, as the payload's type: unchanged, or exactly as float32.

    Only float64 loses digits here; the writer refuses magnitudes beyond float32's range.
    """
    if payload is not PayloadDtype.FLOAT32 or dtype == "F32":
        return source
    if dtype == "BF16":
        return np.left_shift(source, 16, dtype=np.uint32).view(np.float32)
    with np.errstate(over="ignore"):
        return source.astype(np.float32)
