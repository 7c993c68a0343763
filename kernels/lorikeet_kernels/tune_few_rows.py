"""`python -m lorikeet_kernels.tune_few_rows`: tiles of dense projections of few rows, beside cuBLAS.

Prints what each choice takes, and last the table's text: tiling/<device>_few_rows.json.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import torch

from lorikeet_kernels.benchmarking.compile_candidates import compile_candidates
from lorikeet_kernels.benchmarking.few_rows_points import SIZES, FewRowsPoint, few_rows_point, with_rows
from lorikeet_kernels.benchmarking.graph_timing import time_interleaved
from lorikeet_kernels.benchmarking.list_options import counts, names_among
from lorikeet_kernels.launch.device_name import device_name
from lorikeet_kernels.tiling.few_rows_tiles import (
    MAX_LANE_ROWS,
    PRODUCT_COLUMNS,
    FewRowsShape,
    FewRowsTiles,
    num_chunks,
    rule,
)

FLOOR_BYTES_PER_US = 4.3e6
CUBLAS = "cuBLAS"
REGISTERS = 65536  # of a multiprocessor
REGISTERS_BESIDE = (
    68  # a lane's, beside the weight's: what ptxas takes for the products, and the least that it can
)
MIN_REGISTERS_BESIDE = 30


def candidates(shape: FewRowsShape) -> list[FewRowsTiles]:
    """The rule's tiles first; then others with 4 to 20 loads a lane and few sums, and the tensor cores'."""
    tiles = [rule(shape)]
    for num_warps in (2, 4, 8):
        for rows in (1, 2, 4, 8):
            loads = rows * num_chunks(shape.in_features, num_warps)
            if 4 <= loads <= 20 and rows * shape.num_rows <= 8 and shape.num_rows <= MAX_LANE_ROWS:
                tiles.append(FewRowsTiles(rows, num_warps))
    for rows, num_warps in ((8, 4), (8, 8)) if shape.num_rows > 1 else ():
        loads = rows // 8 * 2 * -(-shape.in_features // (PRODUCT_COLUMNS * num_warps))
        if 6 <= loads <= 32:
            tiles.append(FewRowsTiles(rows, num_warps, products=True))
            # a program more than its registers would leave room for, where that needs no spills
            programs = REGISTERS // (32 * num_warps * (REGISTERS_BESIDE + 4 * loads)) + 1
            cap = REGISTERS // (32 * num_warps * programs) // 8 * 8
            if cap >= 4 * loads + MIN_REGISTERS_BESIDE:
                tiles.append(FewRowsTiles(rows, num_warps, cap, products=True))
    return list(dict.fromkeys(tiles))


def tune(point: FewRowsPoint, launches: Mapping[str, Sequence[Callable[[], None]]]) -> dict[str, Any]:
    """Time one point by all ways, print them, and return the table's entry."""
    ways = {CUBLAS: point.cublas(), **launches}
    times = time_interleaved(ways, rounds=5, sample_s=3e-4)
    order = sorted(launches, key=lambda name: times[name])
    floor = point.num_bytes / FLOOR_BYTES_PER_US
    text = "  ".join(f"{name} {times[name]:.2f}" for name in order[:8])
    own = rule(point.shape)
    sys.stdout.write(
        f"{point.name:18} T={point.shape.num_rows} floor {floor:6.2f}  cuBLAS {times[CUBLAS]:6.2f}  "
        f"rule {_text(own)} {times[_text(own)]:.2f} | {text}\n"
    )
    sys.stdout.flush()
    best = next(tiles for tiles in candidates(point.shape) if _text(tiles) == order[0])
    return {
        "shape": asdict(point.shape),
        "tiles": asdict(best),
        "us": round(times[order[0]], 2),
        "cublas_us": round(times[CUBLAS], 2),
    }


def _text(tiles: FewRowsTiles) -> str:
    cap = "" if tiles.max_registers is None else f"/{tiles.max_registers}"
    return f"{tiles.rows}x{tiles.num_warps}w{cap}{'p' if tiles.products else ''}"


def _points(names: Sequence[str], rows: Sequence[int]) -> Iterator[FewRowsPoint]:
    for name in names:
        point = few_rows_point(name, rows[0])
        for num_rows in rows:
            yield point if num_rows == rows[0] else with_rows(point, num_rows)


def _compile(names: Sequence[str], rows: Sequence[int]) -> None:
    """All candidates, on all cores."""

    def ask() -> None:
        for name in names:
            weight = torch.empty(SIZES[name], dtype=torch.bfloat16, device="cuda")
            for num_rows in rows:
                shape = FewRowsShape(num_rows, *weight.shape)
                out, x = (weight.new_empty(num_rows, size) for size in weight.shape)
                point = FewRowsPoint(name, shape, [weight], out[0], [x], [out])
                for tiles in candidates(shape):
                    point.own(tiles)[0]()

    compile_candidates(ask)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 2 where there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m lorikeet_kernels.tune_few_rows", description=__doc__)
    parser.add_argument(
        "--sizes", type=names_among(SIZES), default=",".join(SIZES), help="with commas; default: %(default)s"
    )
    parser.add_argument("--rows", type=counts, default="1,2,4,8,16")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--only-compile", action="store_true", help="into Triton's cache, for a later run")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.stderr.write("tune_few_rows: needs a GPU, torch.cuda.is_available() is False here\n")
        return 2
    until = time.monotonic() + options.seconds
    names, rows = options.sizes, options.rows
    _compile(names, rows)
    if options.only_compile:
        return 0
    entries: list[dict[str, Any]] = []
    for point in _points(names, rows):
        if time.monotonic() > until:
            sys.stdout.write("out of time\n")
            break
        launches = {_text(tiles): point.own(tiles) for tiles in candidates(point.shape)}
        entries.append(tune(point, launches))
    lines = ",\n".join(f"    {json.dumps(entry)}" for entry in entries)
    name = device_name(torch.empty(0, device="cuda"))
    head = f'  "device": {json.dumps(name)},\n  "measured": "{datetime.now(UTC).date()}",\n'
    sys.stdout.write(f'{{\n{head}  "entries": [\n{lines}\n  ]\n}}\n')
    return 0


if __name__ == "__main__":
    sys.exit(main())
