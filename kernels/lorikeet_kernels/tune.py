"""`python -m lorikeet_kernels.tune`: time tiles on this GPU and write its table.

Prints each result, writes the table after each, so an interrupted run resumes where it stopped; ends at
--minutes. With --processes candidates are compiled beside each other first, into Triton's disk cache. With
--check-rule it writes no table but prints what the rule of `tiling.select` loses against it.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from lorikeet_kernels.benchmarking.bench_problem import DENSE, MODELS
from lorikeet_kernels.benchmarking.graph_timing import time_interleaved
from lorikeet_kernels.benchmarking.list_options import counts
from lorikeet_kernels.benchmarking.rule_check import (
    UNMEASURED,
    RuleRow,
    check,
    checked_points,
    line,
    rows_as_json,
    summary,
    tiles_to_time,
)
from lorikeet_kernels.benchmarking.tune_cases import Case, Launch, compiles, dense_cases, moe_cases
from lorikeet_kernels.benchmarking.tune_plan import (
    TunePoint,
    candidates,
    is_done,
    points_of,
    points_of_trace,
    to_json,
)
from lorikeet_kernels.tiling import select_tiles
from lorikeet_kernels.tiling.tile_table import TileEntry, TileTable, file_of, parse


def fastest(case: Case, stage: str, block_m: int) -> tuple[dict[str, Any], float, float]:
    """The tiles with the lowest time, that time, and that of the rule's tiles (NaN where they do not fit).

    Tiles that do not fit the card are passed over.
    """
    timed: dict[str, list[Launch]] = {}
    known: dict[str, dict[str, Any]] = {}
    rule = select_tiles(stage, case.shape, block_m, UNMEASURED)
    for tiles in (rule, *candidates(stage, case.shape, block_m)):
        launches = case.launches(tiles)
        if compiles(launches[0], str(tiles)):
            timed[str(tiles)] = launches
            known[str(tiles)] = {k: v for k, v in asdict(tiles).items() if k != "slot_scan"}
    times = time_interleaved(timed)
    best = min(times, key=times.__getitem__)
    return known[best], times[best], times.get(str(rule), float("nan"))


def tune_case(case: Case, table: TileTable) -> TileTable:
    """Measure what the table lacks of `case` and return it with the new entries."""
    for stage, block_m in case.stages():
        if is_done(table, stage, case.shape, block_m):
            continue
        tiles, us, rule_us = fastest(case, stage, block_m)
        by_rule = f"the rule's tiles {rule_us / us - 1:+.0%}"
        sys.stdout.write(f"{case.name} {stage} {case.shape}: {tiles} {us:.1f} us, {by_rule}\n")
        sys.stdout.flush()
        entry = TileEntry(stage, case.shape, block_m, tiles, round(us, 2))
        table = replace(table, entries=(*table.entries, entry))
    return table


def compile_share(cases: Iterable[Case], table: TileTable, share: int, shares: int) -> None:
    """Launch each candidate that is this share's once."""
    number = 0
    for case in cases:
        for stage, block_m in case.stages():
            if is_done(table, stage, case.shape, block_m):
                continue
            rule = select_tiles(stage, case.shape, block_m, UNMEASURED)
            for tiles in (rule, *candidates(stage, case.shape, block_m)):
                number += 1
                if number % shares == share:
                    compiles(case.launches(tiles)[0], str(tiles))


def _check_rule(options: argparse.Namespace, table: TileTable, points: Sequence[TunePoint]) -> None:
    """Print what the rule loses at the points that the table holds, until done or out of minutes."""
    deadline = time.monotonic() + options.minutes * 60
    names = options.model or [shape.name for shape in (*MODELS, *DENSE)]
    rows: list[RuleRow] = []
    share, shares = map(int, (options.share or "0/0").split("/"))
    number = 0
    for name, point in checked_points(table, names, points):
        cases = _cases([name], point, options.adapters, cold=not shares)
        if shares:
            for case in cases:
                for stage, block_m in case.stages():
                    for tiles in tiles_to_time(case, stage, block_m, table.device, every=options.every):
                        number += 1
                        if number % shares == share:
                            compiles(case.launches(tiles)[0], str(tiles))
            continue
        if time.monotonic() > deadline:
            sys.stdout.write("out of time\n")
            break
        for row in check(cases, table, every=options.every):
            rows.append(row)
            sys.stdout.write(line(row) + "\n")
            sys.stdout.flush()
    if not shares:
        sys.stdout.write(summary(rows) + "\n")
        if options.times:
            options.times.write_text(rows_as_json(rows))


def _cases(names: Sequence[str], point: TunePoint, num_slots: int, *, cold: bool) -> Iterator[Case]:
    for model in MODELS:
        if model.name in names:
            yield from moe_cases(model, point, num_slots, cold=cold)
    for dense in DENSE:
        if dense.name in names:
            yield from dense_cases(dense, point, num_slots, cold=cold)


def _compile_beside_each_other(arguments: Sequence[str], processes: int) -> None:
    command = [sys.executable, "-m", "lorikeet_kernels.tune", *arguments]
    shares = [
        subprocess.Popen([*command, "--share", f"{i}/{processes}"])  # noqa: S603 (our own interpreter and module)
        for i in range(processes)
    ]
    for share in shares:
        share.wait()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lorikeet_kernels.tune", description=__doc__)
    known = [shape.name for shape in (*MODELS, *DENSE)]
    parser.add_argument("--model", action="append", choices=known, help="repeatable; default gpt-oss-20b")
    parser.add_argument("--tokens", type=counts, default="1,4,16,64,256,1024,4096")
    parser.add_argument("--ranks", type=counts, default="16")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--from-trace", type=Path, help="JSON histograms of tokens and ranks; heaviest first")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--processes", type=int, default=0, help="compile first, in so many processes")
    parser.add_argument("--out", type=Path, help="the table; by default the shipped one of this device")
    parser.add_argument("--check-rule", action="store_true", help="time the rule against the table instead")
    parser.add_argument("--every", action="store_true", help="with it: time all candidates too")
    parser.add_argument("--times", type=Path, help="with it: write all times as JSON")
    parser.add_argument("--share", help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Tune until done or out of minutes; exit status 2 for bad arguments or no GPU."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(arguments)
    if not torch.cuda.is_available():
        sys.stderr.write("tune: needs a GPU, torch.cuda.is_available() is False here\n")
        return 2
    deadline = time.monotonic() + options.minutes * 60
    names = options.model or ["gpt-oss-20b"]
    device = torch.cuda.get_device_name()
    path: Path = options.out or file_of(device)
    table = parse(path.read_text()) if path.exists() else TileTable(device, "", ())
    points = points_of(options.tokens, options.ranks)
    if options.from_trace:
        points = points_of_trace(options.from_trace.read_text())
    if options.check_rule:
        if options.processes and not options.share:
            _compile_beside_each_other(arguments, options.processes)
        _check_rule(options, table, points)
        return 0
    if options.share:
        share, shares = map(int, options.share.split("/"))
        every = (case for point in points for case in _cases(names, point, options.adapters, cold=False))
        compile_share(every, table, share, shares)
        return 0
    if options.processes:
        _compile_beside_each_other(arguments, options.processes)
    for number, point in enumerate(points, 1):
        if time.monotonic() > deadline:
            sys.stdout.write(f"out of time after {number - 1} of {len(points)} points: run again to go on\n")
            break
        sys.stdout.write(f"[{number}/{len(points)}] {point}\n")
        for case in _cases(names, point, options.adapters, cold=True):
            table = tune_case(case, table)
            table = replace(table, measured=datetime.now(UTC).date().isoformat())
            path.write_text(to_json(table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
