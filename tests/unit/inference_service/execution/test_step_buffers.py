"""One buffer for a step's arrays: places, turns, fixed shapes."""

import numpy as np
import pytest
import torch

from inference_service.execution.decode_shapes import DecodeShapes, default_sizes
from inference_service.execution.step_buffers import HostArrays, StepBuffers, StepShape

CPU = torch.device("cpu")
LARGEST = StepShape(40, 8, 16, 8, pads=True)


def write_numbers(host: HostArrays) -> None:
    """Another number in every entry of every field."""
    first = 0
    for name in HostArrays.__slots__:
        values = getattr(host, name)
        values[...] = np.arange(first, first + values.size).reshape(values.shape)
        first += values.size


def test_every_field_arrives_and_is_aligned() -> None:
    """Odd sizes, a step after another, both kinds of shapes."""
    buffers = StepBuffers(LARGEST, 3, CPU)
    kept = StepShape(3, 3, 5, 3, pads=True)
    views = buffers.keep(kept)
    for shape in (StepShape(7, 2, 3, 1), kept, StepShape(40, 8, 16, 8, pads=True), kept):
        inputs = buffers.fill(shape, write_numbers)
        first = 0
        for name in HostArrays.__slots__:
            tensor = getattr(inputs, name)
            count = tensor.numel()
            assert tensor.flatten().tolist() == list(range(first, first + count)), name
            assert tensor.is_contiguous()
            assert (tensor.data_ptr() - inputs.token_ids.data_ptr()) % 16 == 0
            first += count
        assert inputs.source_rows.numel() == (shape.num_rows if shape.pads else 0)
    assert buffers.keep(kept) is views is buffers.fill(kept, write_numbers)


def test_host_buffers_take_turns() -> None:
    """Three fills write three buffers; the fourth writes the first again."""
    buffers = StepBuffers(LARGEST, 3, CPU)
    seen: list[int] = []
    for _ in range(4):
        buffers.fill(LARGEST, lambda host: seen.append(host.token_ids.ctypes.data))
    assert len(set(seen[:3])) == 3
    assert seen[3] == seen[0]


def test_a_shape_beyond_the_buffers_is_refused() -> None:
    """By name, rather than cut off."""
    with pytest.raises(ValueError, match="step buffers have"):
        StepBuffers(LARGEST, 2, CPU).fill(StepShape(400, 8, 16, 8), write_numbers)


def test_the_smallest_shape_that_fits_is_picked() -> None:
    """Sizes and contexts up to the limits; nothing beyond."""
    shapes = DecodeShapes.of((2, 1, 8, 99), max_requests=12, max_context_tokens=10_000, block_tokens=16)
    assert shapes.sizes == (1, 2, 8)
    assert shapes.contexts == (4096, 10_000)
    assert shapes.pick(1, 4096) == StepShape(1, 1, 256, 1)
    assert shapes.pick(2, 4097) == StepShape(2, 2, 625, 2)
    assert shapes.pick(3, 1) == StepShape(8, 8, 256, 8, pads=True)
    assert shapes.pick(9, 1) is None
    assert shapes.pick(1, 10_001) is None
    assert [(s.num_rows, s.table_width) for s in shapes.all()] == [
        (8, 625), (8, 256), (2, 625), (2, 256), (1, 625), (1, 256)
    ]  # fmt: skip
    short = DecodeShapes.of((4,), max_requests=4, max_context_tokens=100, block_tokens=16)
    assert short.contexts == (100,)
    assert all(shape.pads for shape in short.all())


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (32, [1, 2, 4, 8, 16, 24, 32]),
        (70, [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 70]),
    ],
)
def test_default_sizes_end_at_the_most_requests(most: int, sizes: list[int]) -> None:
    """So that every decode step has a shape."""
    assert list(default_sizes(most)) == sizes
    assert default_sizes(500)[-3:] == (448, 480, 500)
