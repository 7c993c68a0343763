"""`python -m lorikeet_kernels.tune_latent`: tiles of latent attention, all checked against float64.

Prints for each kernel what it takes with each number of splits, a chunk's with one, and last the fastest of
every case, for the rules in tiling/latent_tiles.py.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from lorikeet_kernels.attention.latent_attention import NEVER_FRESH
from lorikeet_kernels.attention.latent_decode import latent_decode
from lorikeet_kernels.attention.latent_prefill import latent_prefill
from lorikeet_kernels.benchmarking.bench_problem import COLD_BYTES
from lorikeet_kernels.benchmarking.compile_candidates import compile_candidates
from lorikeet_kernels.benchmarking.graph_timing import time_interleaved
from lorikeet_kernels.benchmarking.latent_points import LATENT, ROPE
from lorikeet_kernels.benchmarking.latent_problem import (
    LatentProblem,
    exact_latent_attention,
    make_latent_problem,
)
from lorikeet_kernels.benchmarking.list_options import names_among
from lorikeet_kernels.testing import relative_error
from lorikeet_kernels.tiling.latent_tiles import (
    FEW_ROWS,
    MAX_SPLITS,
    LatentDecodeTiles,
    LatentPrefillTiles,
    select_latent_decode,
    select_latent_prefill,
)

FLOOR_BYTES_PER_US = 4.3e6
FLOOR_FLOP_PER_US = 790e6
TOLERANCE = 5e-3  # of bfloat16, as the tests have it
MULTIPROCESSORS = 132
MOST_PROGRAMS = 4  # tried on a multiprocessor
MIN_TOKENS = 64  # a split

# (rows, block_n, warps, stages, key stages: none of Triton's pipeline) that ptxas compiles for sm_90 without
# spills, of at most 227 KB. Those of Triton's pipeline are the fastest of 18 that were measured on an H200.
KERNELS_OF_FEW_ROWS = (
    (16, 64, 4, 3, 1), (16, 64, 4, 2, 2), (16, 64, 4, 2, 1), (16, 64, 4, 1, 1), (16, 32, 4, 5, 0),
    (16, 64, 4, 4, 0),
)  # fmt: skip
KERNELS_OF_MANY_ROWS = ((64, 64, 8, 2, 1), (32, 64, 4, 2, 2), (64, 64, 8, 3, 0), (64, 32, 8, 5, 0))
PREFILL_KERNELS = ((64, 64, 8, 2, 1), (32, 64, 4, 2, 2), (64, 64, 8, 3, 0), (64, 32, 8, 5, 0))


@dataclass(frozen=True, slots=True)
class LatentCase:
    """`requests` of `tokens` latents each, for `queries` of `heads` heads, those of the last tokens."""

    requests: int
    tokens: int
    heads: int
    queries: int = 1

    @property
    def floor_us(self) -> float:
        """The latents', queries' and sums' bytes, or the products where those take longer."""
        values = self.tokens * (LATENT + ROPE) + self.queries * self.heads * (2 * LATENT + ROPE)
        pairs = self.requests * self.queries * (self.tokens - (self.queries - 1) / 2)
        flop = 2.0 * self.heads * (2 * LATENT + ROPE) * pairs
        return max(2.0 * self.requests * values / FLOOR_BYTES_PER_US, flop / FLOOR_FLOP_PER_US)


CASES = {
    "32x4k 16 heads": LatentCase(32, 4096, 16),
    "8x32k 16 heads": LatentCase(8, 32768, 16),
    "1x4k 16 heads": LatentCase(1, 4096, 16),
    "32x4k 128 heads": LatentCase(32, 4096, 128),
    "chunk 2k of 8k 16 heads": LatentCase(1, 8192, 16, 2048),
}

Tiles = LatentDecodeTiles | LatentPrefillTiles


def candidates(case: LatentCase) -> list[Tiles]:
    """The rule's tiles first; then each kernel, a decode's with one to MOST_PROGRAMS a multiprocessor."""
    if case.queries > 1:
        tiles: list[Tiles] = [select_latent_prefill(case.heads, 2, rings=True)]
        tiles += [
            LatentPrefillTiles(rows, block_n, num_warps, num_stages, num_key_stages=key_stages)
            for rows, block_n, num_warps, num_stages, key_stages in PREFILL_KERNELS
        ]
        return list(dict.fromkeys(tiles))
    own = select_latent_decode(case.requests, case.heads, case.tokens, 2, rings=True)
    tiles = [own]
    for rows, block_n, num_warps, num_stages, key_stages in (
        KERNELS_OF_FEW_ROWS if case.heads <= FEW_ROWS else KERNELS_OF_MANY_ROWS
    ):
        programs = case.requests * -(-case.heads // rows)
        for room in range(MULTIPROCESSORS, MOST_PROGRAMS * MULTIPROCESSORS + 1, MULTIPROCESSORS):
            splits = max(1, min(room // programs, case.tokens // MIN_TOKENS, MAX_SPLITS))
            tiles.append(LatentDecodeTiles(rows, block_n, splits, num_warps, num_stages, key_stages))
        tiles.append(LatentDecodeTiles(rows, block_n, own.splits, num_warps, num_stages, key_stages))
    return list(dict.fromkeys(tiles))


def splits_of(tiles: Tiles) -> int:
    """Programs along the sequence."""
    return tiles.splits if isinstance(tiles, LatentDecodeTiles) else 1


def tune(case: LatentCase, launches: Mapping[Tiles, Sequence[Callable[[], None]]]) -> dict[Tiles, float]:
    """Microseconds of each way, printed a kernel a line, the fastest kernel first."""
    ways = {json.dumps(asdict(tiles)): calls for tiles, calls in launches.items()}
    by_name = time_interleaved(ways, rounds=5, sample_s=6e-4)
    times = {tiles: by_name[json.dumps(asdict(tiles))] for tiles in launches}
    kernels: dict[Tiles, dict[int, float]] = {}
    for tiles, us in times.items():
        kernel = replace(tiles, splits=0) if isinstance(tiles, LatentDecodeTiles) else tiles
        kernels.setdefault(kernel, {})[splits_of(tiles)] = us
    for kernel in sorted(kernels, key=lambda kernel: min(kernels[kernel].values())):
        by_splits = "  ".join(f"{splits}: {us:.1f}" for splits, us in sorted(kernels[kernel].items()))
        best = case.floor_us / min(kernels[kernel].values())
        stages = f"ring {kernel.num_stages} keys {kernel.num_key_stages}"
        if not kernel.is_ring:
            stages = f"stages {kernel.num_stages}"
        sys.stdout.write(
            f"  rows {kernel.rows} n {kernel.block_n} warps {kernel.num_warps} {stages}"
            f"  {best:4.0%} of the floor | splits {by_splits}\n"
        )
    return times


def _problem(case: LatentCase, seed: int = 0) -> LatentProblem:
    return make_latent_problem(
        [(case.tokens - case.queries, case.queries)] * case.requests,
        heads=case.heads, latent_dim=LATENT, rope_dim=ROPE, dtype=torch.bfloat16, device="cuda", seed=seed,
    )  # fmt: skip


def _launch(problem: LatentProblem, out: torch.Tensor, tiles: Tiles) -> None:
    metadata = problem.metadata
    where = (
        problem.q, problem.cache, metadata.query_starts, metadata.sequence_lens, metadata.block_tables,
        problem.scale, out,
    )  # fmt: skip
    if isinstance(tiles, LatentDecodeTiles):
        latent_decode(*where, tiles)
    else:
        latent_prefill(*where, tiles, most_fresh=NEVER_FRESH)


def _search(name: str, case: LatentCase) -> dict[str, Any]:
    """Check and time all candidates of a case; the entry of the fastest."""
    own = candidates(case)[0]
    num_sets = max(2, -(-COLD_BYTES // (2 * case.requests * case.tokens * (LATENT + ROPE))))
    problems = [_problem(case, seed) for seed in range(num_sets)]
    outs = [problem.empty_out() for problem in problems]
    exact = exact_latent_attention(problems[0])
    launches: dict[Tiles, Sequence[Callable[[], None]]] = {}
    errors: dict[Tiles, float] = {}
    sys.stdout.write(f"{name}, floor {case.floor_us:.1f} us\n")
    for tiles in candidates(case):
        outs[0].fill_(float("nan"))
        _launch(problems[0], outs[0], tiles)
        errors[tiles] = relative_error(outs[0], exact)
        if not errors[tiles] < TOLERANCE:
            sys.stdout.write(f"  wrong by {errors[tiles]}: {tiles}\n")
            continue
        launches[tiles] = [
            lambda p=problem, o=out, t=tiles: _launch(p, o, t)
            for problem, out in zip(problems, outs, strict=True)
        ]
    times = tune(case, launches)
    best = min(times, key=lambda tiles: times[tiles])
    rule_us = f"{times[own]:.2f} us" if own in times else "wrong"
    sys.stdout.write(
        f"  rule {splits_of(own)} splits {rule_us}, fastest {splits_of(best)} splits {times[best]:.2f} us\n"
    )
    sys.stdout.flush()
    return {
        "case": asdict(case),
        "tiles": asdict(best),
        "us": round(times[best], 2),
        "rule_us": round(times[own], 2) if own in times else None,
        "floor_us": round(case.floor_us, 2),
        "error": errors[best],
    }


def _compile(names: Sequence[str]) -> None:
    """All candidates, on all cores: sequences' number and length make no other kernels."""

    def ask() -> None:
        for name in names:
            case = CASES[name]
            queries = min(2, case.queries)
            problem = _problem(replace(case, requests=1, tokens=MIN_TOKENS, queries=queries))
            out = problem.empty_out()
            for tiles in candidates(case):
                _launch(problem, out, tiles)

    compile_candidates(ask)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 2 where there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m lorikeet_kernels.tune_latent", description=__doc__)
    parser.add_argument(
        "--cases", type=names_among(CASES), default=",".join(CASES), help="with commas; default: %(default)s"
    )
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--only-compile", action="store_true", help="into Triton's cache, for a later run")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.stderr.write("tune_latent: needs a GPU, torch.cuda.is_available() is False here\n")
        return 2
    until = time.monotonic() + options.seconds
    _compile(options.cases)
    if options.only_compile:
        return 0
    entries: list[dict[str, Any]] = []
    for name in options.cases:
        if time.monotonic() > until:
            sys.stdout.write("out of time\n")
            break
        entries.append(_search(name, CASES[name]))
        torch.cuda.empty_cache()
    for entry in entries:
        sys.stdout.write(f"{json.dumps(entry)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
