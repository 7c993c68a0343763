"""Writes the canonical payload of a plan, tensor after tensor, in bounded memory."""

from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import replace

import numpy as np

from adapter_manager.application.ingest.payload_sink import PayloadSink
from adapter_manager.application.ingest.weight_reader import (
    PAYLOAD_TYPES,
    WINDOW_BYTES,
    AnyArray,
    WeightReader,
    converted,
)
from adapter_manager.domain.errors import InvalidAdapterError
from adapter_manager.domain.shown_text import shown
from adapter_manager.domain.site_plan import FactorCopy, LayerPlan
from lorikeet_contract.manifest import PayloadDtype, PayloadLayer, TensorRange, place_layer

# What is assembled at a time. A canonical tensor larger than this is made in several passes over its source.
BLOCK_BYTES = 16 << 20

_LARGEST = {"float32": float(np.finfo(np.float32).max), "float16": 65504.0, "bfloat16": 3.3895313892515355e38}

Box = tuple[tuple[int, int], tuple[int, int], tuple[int, int]]


class PayloadWriter:
    """Writes layers one after another."""

    def __init__(
        self, reader: WeightReader, dtype: PayloadDtype, sink: PayloadSink, compute_dtype: str = ""
    ) -> None:
        """Write to `sink`, which nothing else uses.

        Args:
            reader: gives the weights.
            dtype: the payload's.
            sink: takes the payload.
            compute_dtype: what the node computes in; weights and scaled weights must lie in its range.
        """
        self._reader = reader
        self._dtype = dtype
        self._sink = sink
        self._largest = _LARGEST.get(compute_dtype, _LARGEST["float32"])
        self._compute_dtype = compute_dtype or "float32"
        self.is_all_zero = True

    def write(self, plans: Iterable[LayerPlan]) -> tuple[PayloadLayer, ...]:
        """Write all layers; returns when every byte is written.

        Raises:
            InvalidAdapterError: a weight is NaN, infinite or beyond the range that is computed in.
            OSError: the file does not take the bytes.
        """
        pending = [self._write_layer(plan) for plan in plans]
        self._sink.flush()
        return tuple(replace(layer, sha256=digest.result()) for layer, digest in pending)

    def _write_layer(self, plan: LayerPlan) -> tuple[PayloadLayer, "Future[str]"]:
        start = self._sink.offset
        placed, end = place_layer(
            start, [(s.site, s.rank, s.num_a, s.scales) for s in plan.sites], self._dtype.itemsize
        )
        for site_plan, site in zip(plan.sites, placed, strict=True):
            self._write_tensor(site.a, site_plan.a_copies)
            self._write_tensor(site.b, site_plan.b_copies)
            self._check_range(site_plan.a_copies)
            if self._check_range(site_plan.b_copies) > 0:
                self.is_all_zero = False
        self._sink.pad(end)
        return PayloadLayer(plan.layer, start, end - start, "", placed), self._sink.end_layer()

    def _write_tensor(self, place: TensorRange, copies: tuple[FactorCopy, ...]) -> None:
        self._sink.pad(place.offset)
        groups, rows, columns = place.shape if len(place.shape) == 3 else (1, *place.shape)
        element = PAYLOAD_TYPES[self._dtype]
        for (g0, g1), (r0, r1) in _blocks(groups, rows, columns * element.itemsize):
            shape = (g1 - g0, r1 - r0, columns)
            buffer = self._sink.borrow(shape[0] * shape[1] * columns * element.itemsize)
            block = buffer.view(element).reshape(shape)
            for copy in copies:
                self._copy(copy, block, g0, r0)
            self._sink.append(buffer)

    def _copy(self, copy: FactorCopy, block: AnyArray, first_group: int, first_row: int) -> None:
        """Fill the part of `block` that `copy` covers; `block` begins at (first_group, first_row)."""
        groups, rows, columns = copy.extents
        num_groups, num_rows, _ = block.shape
        g0, g1 = max(0, first_group - copy.group), min(groups, first_group + num_groups - copy.group)
        r0 = max(0, -(-(first_row - copy.row) // copy.row_step))
        r1 = min(rows, -(-(first_row + num_rows - copy.row) // copy.row_step))
        if g0 >= g1 or r0 >= r1:
            return
        strides, entry = copy.source.strides, copy.source.entry
        max_elements = WINDOW_BYTES // entry.itemsize
        for (wg0, wg1), (wr0, wr1), (wc0, wc1) in _windows(
            ((g0, g1), (r0, r1), (0, columns)), strides, max_elements
        ):
            shape = (wg1 - wg0, wr1 - wr0, wc1 - wc0)
            first = wg0 * strides[0] + wr0 * strides[1] + wc0 * strides[2]
            span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
            window = self._reader.read(entry, first, span)
            itemsize = window.itemsize
            source = np.lib.stride_tricks.as_strided(window, shape, [s * itemsize for s in strides])
            row = copy.row + wr0 * copy.row_step - first_row
            group = copy.group + wg0 - first_group
            last_row = row + (shape[1] - 1) * copy.row_step
            target = block[group : group + shape[0], row : last_row + 1 : copy.row_step, wc0:wc1]
            np.copyto(target, converted(source, entry.dtype, self._dtype))

    def _check_range(self, copies: tuple[FactorCopy, ...]) -> float:
        """The largest scaled magnitude, which must be computable."""
        largest = 0.0
        for copy in copies:
            entry = copy.source.entry
            magnitude = self._reader.largest(entry)
            if max(magnitude, magnitude * copy.scale) > self._largest:
                raise InvalidAdapterError(
                    f"tensor {shown(entry.name)} holds {magnitude:g}, times its scale {copy.scale:g}: "
                    f"that is beyond the range of {self._compute_dtype}, in which it would be computed",
                    metadata={"problem": "RANGE", "tensor": entry.name},
                )
            largest = max(largest, magnitude)
        return largest


def _blocks(groups: int, rows: int, row_bytes: int) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """A tensor in pieces of at most BLOCK_BYTES, in byte order: whole groups, or rows of one group."""
    group_bytes = rows * row_bytes
    if group_bytes <= BLOCK_BYTES:
        step = max(1, BLOCK_BYTES // group_bytes)
        for g in range(0, groups, step):
            yield (g, min(groups, g + step)), (0, rows)
        return
    step = max(1, BLOCK_BYTES // row_bytes)
    for g in range(groups):
        for r in range(0, rows, step):
            yield (g, g + 1), (r, min(rows, r + step))


def _windows(box: Box, strides: tuple[int, int, int], max_elements: int) -> Iterator[Box]:
    """Cut `box` along its slowest axes until each part spans at most `max_elements` of the source."""
    spans = [(stop - start - 1) * stride for (start, stop), stride in zip(box, strides, strict=True)]
    span = 1 + sum(spans)
    axis = max(range(3), key=lambda i: strides[i] if spans[i] else -1)
    if span <= max_elements or not spans[axis]:
        yield box
        return
    start, stop = box[axis]
    rest = span - spans[axis]
    step = max(1, (max_elements - rest) // strides[axis] + 1)
    for first in range(start, stop, step):
        part = (first, min(stop, first + step))
        cut = tuple(part if i == axis else box[i] for i in range(3))
        yield from _windows((cut[0], cut[1], cut[2]), strides, max_elements)
