"""`python -m lorikeet_kernels.tune_fp8_linear`: ways of dense FP8 projections of few rows, with quantising.

Prints what each takes, with its share of the matrix's floor, the rule's choice marked; a result that differs
from the reference says by how much. They decide the rules of `tiling/dense_tiles.py`.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from lorikeet_kernels.benchmarking.bench_problem import COLD_BYTES
from lorikeet_kernels.benchmarking.compile_candidates import compile_candidates
from lorikeet_kernels.benchmarking.expert_projections import fp8_weight
from lorikeet_kernels.benchmarking.graph_timing import call_each, time_interleaved
from lorikeet_kernels.benchmarking.list_options import counts, names_among
from lorikeet_kernels.dense.fp8_few_rows import fp8_few_rows
from lorikeet_kernels.dense.fp8_gemm import dense_fp8_gemm
from lorikeet_kernels.dense.fp8_linear import torch_product
from lorikeet_kernels.dense.fp8_weight import Fp8Weight, WeightScaling, dequantize_fp8
from lorikeet_kernels.dense.quantize_rows import GROUP, dequantize_rows, quantize_rows
from lorikeet_kernels.launch.hopper import is_hopper
from lorikeet_kernels.tiling.dense_tiles import (
    LINE_BYTES,
    MAX_LANE_ROWS,
    DenseTiles,
    lines_ahead,
    select_dense,
    select_lanes,
    uses_torch,
)
from lorikeet_kernels.tiling.few_rows_tiles import WARP_BYTES, FewRowsTiles

SIZES = {
    "llama-3.3-70b qkv": (10240, 8192),
    "llama-3.3-70b o": (8192, 8192),
    "llama-3.3-70b gate_up": (57344, 8192),
    "llama-3.3-70b down": (8192, 28672),
    "qwen3-30b-a3b qkv": (5120, 2048),
    "qwen3-30b-a3b o": (2048, 4096),
}
"""Outputs and inputs."""
FLOOR_BYTES_PER_US = 4.3e6
TOLERANCE = 5e-3  # of results in bfloat16
MIN_TORCH_ROWS = 16
MATRIX_FIRST = ((64, 128, 8, 4), (64, 128, 4, 4), (64, 256, 4, 4), (128, 128, 4, 8))
"""The matrix's rows of a program, columns of a step, stages, warps."""
SHARED_BYTES = 220_000
ON_WAY_BYTES = 5_000_000
"""Of the matrix, at once, by all programs: some 4.3 TB/s times 1 us."""
BY_TORCH = "torch"

Way = DenseTiles | FewRowsTiles | str


def candidates(num_rows: int, out_features: int, in_features: int, kind: WeightScaling) -> Iterator[Way]:
    """What may serve so many rows, the rule's choice among them."""
    if num_rows <= MAX_LANE_ROWS:
        yield from filter(None, [select_lanes(1, out_features, in_features)])
        for num_warps in (4, 8):
            chunks = -(-in_features // (WARP_BYTES * num_warps))
            for rows in (1, 2, 4, 8):
                is_spread = num_warps == 4 or chunks > 1  # no lane idle, no more warps than reach along a row
                if is_spread and 4 <= rows * chunks <= 8 and rows * num_rows <= 8:
                    yield FewRowsTiles(rows, num_warps)
    if num_rows >= MIN_TORCH_ROWS:
        yield BY_TORCH
    yield select_dense(num_rows, out_features, in_features, kind)
    yield from _matrix_first(num_rows, out_features, in_features, kind)


def _matrix_first(
    num_rows: int, out_features: int, in_features: int, kind: WeightScaling
) -> Iterator[DenseTiles]:
    """Tiles that have enough of the matrix on its way, split no further than that takes."""
    block_m = max(16, 1 << (num_rows - 1).bit_length())
    size = out_features * in_features
    for block_n, step, stages, num_warps in MATRIX_FIRST:
        fits = stages * step * (block_m + block_n) <= SHARED_BYTES and in_features >= step * stages
        if not fits or (kind == "block" and step > GROUP):
            continue
        for splits in (1, 2, 4):
            programs = -(-out_features // block_n) * splits
            on_way = programs * block_n * step * (stages - 1)
            is_enough = on_way >= min(ON_WAY_BYTES, 0.4 * size)
            is_split_well = splits == 1 or (
                on_way <= 3 * ON_WAY_BYTES and in_features >= 8 * LINE_BYTES * splits
            )
            if is_enough and is_split_well:
                ahead = lines_ahead(programs, block_n)
                yield DenseTiles(
                    block_m, block_n, step, stages, num_warps, splits, ahead, is_matrix_first=True
                )


def run(way: Way, x: torch.Tensor, weight: Fp8Weight) -> torch.Tensor:
    """The projection that way."""
    if isinstance(way, str):
        return torch_product(quantize_rows(x, weight.activations, by_group=True), weight, None)[: x.shape[0]]
    rows, out = quantize_rows(x, weight.activations), x.new_empty((x.shape[0], weight.shape[0]))
    if isinstance(way, FewRowsTiles):
        return fp8_few_rows(rows, weight, out, way, None)
    return dense_fp8_gemm(rows, weight, out, way, None)


def name_of(way: Way) -> str:
    """As it is printed."""
    if isinstance(way, str):
        return way
    if isinstance(way, FewRowsTiles):
        return f"lanes {way.rows}x{way.num_warps}w"
    first = f"matrix first, step {way.step} ahead {way.ahead} " if way.is_matrix_first else ""
    return f"{first}n {way.block_n} stages {way.stages} splits {way.splits}"


def tune(
    name: str, kind: WeightScaling, num_rows: int, weights: Sequence[Fp8Weight]
) -> list[dict[str, object]]:
    """Check and time a point's ways, print them, and return them as rows."""
    out_features, in_features = weights[0].shape
    x = torch.randn(num_rows, in_features, device="cuda").bfloat16()
    wide = dequantize_rows(quantize_rows(x, weights[0].activations))
    expected = wide @ dequantize_fp8(weights[0], torch.float32).T
    ways: dict[str, list[Callable[[], None]]] = {}
    remarks: dict[str, str] = {}
    size = out_features, in_features
    is_torch = uses_torch(num_rows, *size, kind, on_hopper=is_hopper(x))
    chosen = BY_TORCH if is_torch else select_lanes(num_rows, *size) or select_dense(num_rows, *size, kind)
    for way in dict.fromkeys(candidates(num_rows, out_features, in_features, kind)):
        try:
            off = float((run(way, x, weights[0]).float() - expected).norm() / expected.norm())
        except (RuntimeError, ValueError) as error:  # tiles that do not fit, sizes that torch does not take
            sys.stdout.write(f"  {name_of(way)}: {error}\n")
            continue
        calls: list[Callable[[], None]] = [partial(_silent, way, x, weight) for weight in weights]
        ways[name_of(way)] = calls
        wrong = "" if off < TOLERANCE else f" WRONG by {off:.2g}"
        remarks[name_of(way)] = (" (rule)" if way == chosen else "") + wrong
    del expected
    times = time_interleaved(ways, rounds=5, sample_s=3e-4)
    floor = (out_features * in_features + 2.0 * num_rows * (out_features + in_features)) / FLOOR_BYTES_PER_US
    rows: list[dict[str, object]] = []
    for way in sorted(times, key=lambda one: times[one]):
        share = floor / times[way]
        label = f"fp8 {kind} {name} T={num_rows} {way}{remarks[way]}"
        sys.stdout.write(f"{label:72} {times[way]:7.2f} us floor {floor:6.2f} {share:4.0%}\n")
        rows.append({"name": label, "value": round(times[way], 2), "unit": "us", "floor": round(floor, 2)})
    sys.stdout.flush()
    return rows


def _silent(way: Way, x: torch.Tensor, weight: Fp8Weight) -> None:
    run(way, x, weight)


def _compile(sizes: Sequence[str], kinds: Sequence[WeightScaling], rows: Sequence[int]) -> None:
    def ask() -> None:
        for size in sizes:
            for kind in kinds:
                weight = fp8_weight(SIZES[size], kind)
                for num_rows in rows:
                    x = torch.zeros(num_rows, SIZES[size][1], dtype=torch.bfloat16, device="cuda")
                    ways = candidates(num_rows, *SIZES[size], kind)
                    call_each(partial(run, way, x, weight) for way in ways if not isinstance(way, str))

    compile_candidates(ask)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 2 where there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m lorikeet_kernels.tune_fp8_linear", description=__doc__)
    parser.add_argument(
        "--sizes", type=names_among(SIZES), default=",".join(SIZES), help="with commas; default: %(default)s"
    )
    parser.add_argument("--kinds", type=names_among(("channel", "block")), default="channel,block")
    parser.add_argument("--rows", type=counts, default="1,2,4,16,32,64,128")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--only-compile", action="store_true", help="into Triton's cache, for a later run")
    parser.add_argument("--json", type=Path, help="write what was measured")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.stderr.write("tune_fp8_linear: needs a GPU, torch.cuda.is_available() is False here\n")
        return 2
    until = time.monotonic() + options.seconds
    _compile(options.sizes, options.kinds, options.rows)
    if options.only_compile:
        return 0
    rows: list[dict[str, object]] = []
    for size in options.sizes:
        for kind in options.kinds:
            count = max(2, -(-COLD_BYTES // (SIZES[size][0] * SIZES[size][1])))
            weights = [fp8_weight(SIZES[size], kind) for _ in range(count)]
            for num_rows in options.rows:
                if time.monotonic() > until:
                    sys.stdout.write("out of time\n")
                    return 0
                rows += tune(size, kind, num_rows, weights)
                if options.json:
                    options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
