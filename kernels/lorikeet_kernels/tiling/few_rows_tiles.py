"""Dense projections of few rows: which the own kernel takes, and with what tiles. Pure functions.

Which is a matter of measurement: without a table of the device there is none, and all are cuBLAS's.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lorikeet_kernels.tiling.measured import MEASURED
from lorikeet_kernels.tiling.tile_table import read_table

FOLDER = Path(__file__).parent
MAX_FEW_ROWS = 16
MAX_LANE_ROWS = 8  # by lanes' own multiplications; more take the tensor cores
MAX_LANE_RULE_ROWS = 4  # up to which they are the faster way
PRODUCT_COLUMNS = 64  # of a warp's product: 16 bytes a lane twice
VECTOR_BYTES = 16  # what a lane loads at once
WARP_BYTES = 32 * VECTOR_BYTES
MULTIPROCESSORS = 132
NEAREST = 1.0  # an entry speaks for weights of half to twice its bytes (log2)
MAX_NEAR_ROWS = 8  # for 16 rows the rule's tiles lost to cuBLAS where the best ones won
MIN_GAIN = 1.03  # how often cuBLAS's time must hold the own one: repeated runs differ by 1 to 2 %


@dataclass(frozen=True, slots=True)
class FewRowsTiles:
    """A program takes `rows` rows of the weight, whole, its warps side by side along them.

    `max_registers` caps the compiler's choice, so that more programs fit a multiprocessor. With `products`
    the tensor cores multiply, and `rows` is a multiple of 8.
    """

    rows: int
    num_warps: int
    max_registers: int | None = None
    products: bool = False


@dataclass(frozen=True, slots=True)
class FewRowsShape:
    """Rows of x, and the weight's sizes."""

    num_rows: int
    out_features: int
    in_features: int


@dataclass(frozen=True, slots=True)
class FewRowsEntry:
    """The fastest tiles seen at one shape, and microseconds of both ways."""

    tiles: FewRowsTiles
    us: float
    cublas_us: float

    @property
    def is_faster(self) -> bool:
        """Whether the own kernel is, by more than runs differ."""
        return self.us * MIN_GAIN <= self.cublas_us


def rule(shape: FewRowsShape) -> FewRowsTiles:
    """Tiles of a shape that no table has.

    For one row of x 12 to 16 loads of 16 bytes are on their way for each lane. With more rows of x their sums
    want the registers, and fewer rows of the weight leave room for more programs. Rows become fewer, too,
    where multiprocessors would be left without work. Measured on an H200: 8 instead of 4 warps save 4 % from
    2,880 inputs on and cost as much below; for 4 rows of x, 4 rows of the weight take 13 to 55 % longer
    than 2. For more rows the tensor cores multiply: with 8 rows of x, 168 registers a lane keep the third
    program resident, which takes 10.4 instead of 13.4 us (2880 x 4096), lanes' multiplications 14.7.
    """
    if shape.num_rows > MAX_LANE_RULE_ROWS:
        if shape.in_features <= 4096:
            return FewRowsTiles(8, 4, 168, products=True)
        return FewRowsTiles(8, 8 if shape.in_features <= 8192 else 16, products=True)
    row_bytes = 2 * shape.in_features
    if shape.num_rows == 1:
        num_warps = 4 if row_bytes < 11 * WARP_BYTES else 8 if row_bytes <= 64 * WARP_BYTES else 16
        rows = 4
    else:
        num_warps = 4 if row_bytes <= 32 * WARP_BYTES else 8 if row_bytes <= 64 * WARP_BYTES else 16
        rows = 2
    chunks = num_chunks(shape.in_features, num_warps)
    while rows > 1 and (rows * chunks > 16 or shape.out_features < rows * 4 * MULTIPROCESSORS):
        rows //= 2
    return FewRowsTiles(rows, num_warps)


def num_chunks(in_features: int, num_warps: int) -> int:
    """How often a program's warps together reach along a row, 16 bytes a lane each time."""
    return -(-2 * in_features // (WARP_BYTES * num_warps))


@MEASURED.decide
@cache
def load_few_rows_table(device: str) -> Mapping[FewRowsShape, FewRowsEntry]:
    """The shipped table of `device` ("NVIDIA H200" lies in nvidia_h200_few_rows.json), or an empty one."""
    path = FOLDER / f"{device.lower().replace(' ', '_').replace('/', '_')}_few_rows.json"
    return read_table(path, device, parse_few_rows_table) if MEASURED.are_used and path.exists() else {}


def parse_few_rows_table(text: str) -> Mapping[FewRowsShape, FewRowsEntry]:
    """A table from its JSON text; raises KeyError, TypeError or ValueError on anything else."""
    entries: list[dict[str, Any]] = json.loads(text)["entries"]
    return {
        FewRowsShape(**e["shape"]): FewRowsEntry(FewRowsTiles(**e["tiles"]), e["us"], e["cublas_us"])
        for e in entries
    }


@MEASURED.decide
@cache
def select_few_rows(num_rows: int, out_features: int, in_features: int, device: str) -> FewRowsTiles | None:
    """The own kernel's tiles where that is the faster way, None where cuBLAS is.

    A shape that was not measured does as the one whose sizes are nearest, if it has about as many bytes, with
    the rule's tiles. Both sizes count: cuBLAS is slow where sums are long and rows few.
    """
    shape = FewRowsShape(num_rows, out_features, in_features)
    table = load_few_rows_table(device)
    if shape in table:
        return table[shape].tiles if table[shape].is_faster else None
    if num_rows > MAX_NEAR_ROWS:
        return None
    best: FewRowsEntry | None = None
    best_distance = math.inf
    for at, entry in table.items():
        longer, wider = math.log2(at.out_features / out_features), math.log2(at.in_features / in_features)
        distance = abs(longer) + abs(wider)
        if at.num_rows == num_rows and abs(longer + wider) <= NEAREST and distance < best_distance:
            best, best_distance = entry, distance
    return rule(shape) if best is not None and best.is_faster else None
