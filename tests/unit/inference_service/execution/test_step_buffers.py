"""One buffer for a step's arrays: places, turns, fixed shapes."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from inference_service.execution.step_buffers import HostArrays, StepBuffers, StepShape
from inference_service.execution.step_shapes import StepShapes, default_sizes, default_token_counts

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
    limits = {"max_requests": 12, "max_step_tokens": 64, "block_tokens": 16}
    shapes = StepShapes.of((2, 1, 8, 99), max_context_tokens=10_000, **limits)
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
    assert shapes.pick_mixed(3, 1) is None
    short = StepShapes.of((4,), max_context_tokens=100, **limits)
    assert short.contexts == (100,)
    assert all(shape.pads for shape in short.all())


def test_a_step_with_prompts_has_room_for_all_requests() -> None:
    """More tokens than requests, at most as many as a step may have; long contexts have fewer counts."""
    shapes = StepShapes.of(
        (1,), (96, 64, 12, 13, 500, 100), max_requests=12, max_step_tokens=100, max_context_tokens=9000,
        block_tokens=16,
    )  # fmt: skip
    assert shapes.token_counts == (13, 64, 96, 100)
    assert shapes.pick_mixed(14, 4096) == StepShape(64, 12, 256, 0, pads=True)
    assert shapes.pick_mixed(2, 12) == StepShape(13, 12, 256, 0, pads=True)
    assert shapes.pick_mixed(65, 4097) == StepShape(100, 12, 563, 0, pads=True)
    assert shapes.pick_mixed(14, 4097) == StepShape(64, 12, 563, 0, pads=True)
    assert shapes.pick_mixed(101, 1) is None
    assert shapes.pick_mixed(1, 9001) is None
    assert [(s.num_rows, s.table_width) for s in shapes.all()] == [
        (100, 563), (100, 256), (96, 256), (64, 563), (64, 256), (13, 256), (1, 563), (1, 256)
    ]  # fmt: skip


@pytest.mark.parametrize(("most", "last"), [(100, (64, 100)), (2048, (1920, 2048)), (9999, (3840, 4096))])
def test_default_token_counts_end_at_the_largest_step(most: int, last: tuple[int, ...]) -> None:
    """And at 4,096; a step is filled up by a quarter at most from 256 tokens on, an eighth from 1,024."""
    counts = default_token_counts(most)
    assert counts[-2:] == last
    assert all(b - a <= max(64, a / (8 if a >= 1024 else 4)) for a, b in pairwise(counts))


def test_the_forward_pass_reads_the_same_places_whatever_is_sampled() -> None:
    """A captured step's fields do not move with the number of rows that are sampled from."""
    buffers = StepBuffers(LARGEST, 2, CPU)
    shape = StepShape(40, 8, 16, 0, pads=True)
    kept = buffers.keep(shape)
    other = buffers.fill(replace(shape, num_samples=5), write_numbers)
    assert other.shape.of_forward == shape
    for name in ("token_ids", "slot_mapping", "source_rows", "query_starts", "block_tables"):
        assert getattr(kept, name).data_ptr() == getattr(other, name).data_ptr()
        assert getattr(kept, name).shape == getattr(other, name).shape


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
