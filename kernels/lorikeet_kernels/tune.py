"""`python -m lorikeet_kernels.tune`: time tiles on this GPU and write its table.

Prints each result, writes the table after each, so an interrupted run resumes where it stopped; ends at
--minutes.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from lorikeet_kernels.bench_problem import MODELS, MoeInputs, MoeModel, make_inputs, make_layers, num_sets
from lorikeet_kernels.graph_timing import time_interleaved
from lorikeet_kernels.grouped_expand import grouped_expand
from lorikeet_kernels.grouped_shrink import grouped_shrink
from lorikeet_kernels.lora_tables import LoraTables
from lorikeet_kernels.lora_workspace import LoraWorkspace
from lorikeet_kernels.moe_groups import make_moe_groups
from lorikeet_kernels.output_lanes import PairLane, gate_up_lanes, site_lanes
from lorikeet_kernels.pair_lora import pair_lora
from lorikeet_kernels.tiling import ExpandTiles, OpShape, PairTiles, ShrinkTiles, is_ungrouped, select_block_m
from lorikeet_kernels.tiling.tile_table import TileEntry, TileTable, file_of, parse
from lorikeet_kernels.tune_plan import (
    TunePoint,
    expand_candidates,
    is_done,
    pair_candidates,
    points_of,
    points_of_trace,
    shrink_candidates,
    to_json,
)


@dataclass(frozen=True, slots=True)
class Case:
    """One op of a model at one point: its inputs by set, as launches need them."""

    op: str
    model: MoeModel
    tables: LoraTables
    sets: Sequence[MoeInputs]
    shape: OpShape

    def tensors(self, inputs: MoeInputs) -> tuple[torch.Tensor, torch.Tensor, int, tuple[PairLane, ...]]:
        """(out, x, site, lanes) of one set."""
        if self.op == "gate_up":
            lanes = gate_up_lanes(2 * self.model.inner, self.model.row_order)
            return inputs.gate_up, inputs.x, inputs.gate_up_site, lanes
        return inputs.down, inputs.act, inputs.down_site, site_lanes((self.model.hidden,), (1,))

    @property
    def interleaved(self) -> bool:
        """Whether columns of gate and up alternate."""
        return self.op == "gate_up" and self.model.row_order == "interleaved"


def _pair_call(case: Case, inputs: MoeInputs, tiles: PairTiles) -> Callable[[], None]:
    out, x, site, lanes = case.tensors(inputs)
    weights = None if case.op == "gate_up" else inputs.topk_weights
    return lambda: pair_lora(
        out,
        x,
        inputs.segments.token_slot,
        inputs.topk_ids,
        weights,
        case.tables,
        (site,),
        lanes,
        tiles,
        inputs.segments.workspace,
        x_per_pair=case.op == "down",
        interleaved=case.interleaved,
    )


def _grouped_calls(case: Case, block_m: int, tiles: ShrinkTiles | ExpandTiles) -> list[Callable[[], None]]:
    calls: list[Callable[[], None]] = []
    for inputs in case.sets:
        out, x, site, lanes = case.tensors(inputs)
        blocks = make_moe_groups(inputs.topk_ids, inputs.segments, case.model.num_experts).blocks
        assert blocks is not None
        assert blocks.block_m == block_m
        splits = tiles.splits if isinstance(tiles, ShrinkTiles) else 1
        halves = 2 if case.op == "gate_up" else 1
        h = torch.zeros((splits, case.shape.num_pairs, 1, halves, case.tables.max_rank), device=x.device)
        sites = (site, site, site)
        if isinstance(tiles, ShrinkTiles):
            x_div = case.model.top_k if case.op == "gate_up" else 1
            calls.append(
                lambda h=h, x=x, b=blocks, s=sites, d=x_div: grouped_shrink(
                    h, x, b, case.tables, s, tiles, x_div=d
                )
            )
        else:
            weights = None if case.op == "gate_up" else inputs.topk_weights
            calls.append(
                lambda o=out, h=h, w=weights, b=blocks, s=sites, ln=lanes: grouped_expand(
                    o, h, w, b, case.tables, s, ln, tiles, interleaved=case.interleaved
                )
            )
    return calls


def fastest(
    ways: Iterable[PairTiles | ShrinkTiles | ExpandTiles], calls_of: Callable[[Any], list[Callable[[], None]]]
) -> tuple[dict[str, Any], float]:
    """The tiles with the lowest time; tiles that do not fit the card are passed over."""
    timed: dict[str, list[Callable[[], None]]] = {}
    known: dict[str, dict[str, Any]] = {}
    for tiles in ways:
        try:
            calls = calls_of(tiles)
            calls[0]()
        except RuntimeError as error:  # Triton's OutOfResources: too much shared memory or too many registers
            sys.stdout.write(f"  {tiles}: {error}\n")
            continue
        timed[str(tiles)] = calls
        known[str(tiles)] = {k: v for k, v in asdict(tiles).items() if k != "slot_scan"}
    best = min(time_interleaved(timed).items(), key=lambda item: item[1])
    return known[best[0]], best[1]


def tune_case(case: Case, num_slots: int, table: TileTable) -> TileTable:
    """Measure what the table lacks of `case` and return it with the new entries."""
    pairs = case.shape.num_pairs
    if is_ungrouped(pairs, case.model.num_experts, num_slots):
        stages: list[tuple[str, int]] = [("pair", 0)]
    else:
        block_m = select_block_m(pairs, case.model.num_experts, num_slots)
        stages = [("shrink", block_m), ("expand", block_m)]
    for stage, block_m in stages:
        if is_done(table, stage, case.shape, block_m):
            continue
        if stage == "pair":
            tiles, us = fastest(
                pair_candidates(case.shape), lambda t: [_pair_call(case, inputs, t) for inputs in case.sets]
            )
        else:
            ways = shrink_candidates if stage == "shrink" else expand_candidates
            tiles, us = fastest(ways(case.shape, block_m), lambda t, m=block_m: _grouped_calls(case, m, t))
        sys.stdout.write(f"{case.model.name} {stage} {case.shape}: {tiles} {us:.1f} us\n")
        sys.stdout.flush()
        entry = TileEntry(stage, case.shape, block_m, tiles, round(us, 2))
        table = replace(table, entries=(*table.entries, entry))
    return table


def _cases(model: MoeModel, point: TunePoint, num_slots: int) -> list[Case]:
    workspace = LoraWorkspace(torch.device("cuda"))
    first = make_inputs(model, point.rank, num_slots, point.num_tokens, 0, workspace, 0)
    count = num_sets(first)
    layers = min(count, 8)
    tables = make_layers(model, point.rank, num_slots, layers)
    sets = [
        make_inputs(model, point.rank, num_slots, point.num_tokens, i % layers, workspace, i)
        for i in range(count)
    ]
    pairs = point.num_tokens * model.top_k
    up = OpShape("gate_up", model.hidden, 2 * model.inner, tables.max_rank, pairs)
    down = OpShape("down", model.inner, model.hidden, tables.max_rank, pairs)
    return [Case("gate_up", model, tables, sets, up), Case("down", model, tables, sets, down)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Tune until done or out of minutes; exit status 2 for bad arguments or no GPU."""
    parser = argparse.ArgumentParser(prog="python -m lorikeet_kernels.tune", description=__doc__)
    parser.add_argument("--model", default="gpt-oss-20b", choices=[model.name for model in MODELS])
    parser.add_argument("--tokens", default="1,4,16,64,256,1024,4096")
    parser.add_argument("--ranks", default="16")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--from-trace", type=Path, help="JSON histograms of tokens and ranks; heaviest first")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--out", type=Path, help="the table; by default the shipped one of this device")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.stderr.write("tune: needs a GPU, torch.cuda.is_available() is False here\n")
        return 2
    device = torch.cuda.get_device_name()
    path: Path = options.out or file_of(device)
    table = parse(path.read_text()) if path.exists() else TileTable(device, "", ())
    points = points_of(
        [int(t) for t in options.tokens.split(",")], [int(r) for r in options.ranks.split(",")]
    )
    if options.from_trace:
        points = points_of_trace(options.from_trace.read_text())
    model = next(model for model in MODELS if model.name == options.model)
    deadline = time.monotonic() + options.minutes * 60
    for number, point in enumerate(points, 1):
        if time.monotonic() > deadline:
            sys.stdout.write(f"out of time after {number - 1} of {len(points)} points: run again to go on\n")
            break
        sys.stdout.write(f"[{number}/{len(points)}] {point}\n")
        for case in _cases(model, point, options.adapters):
            table = tune_case(case, options.adapters, table)
            table = replace(table, measured=datetime.now(UTC).date().isoformat())
            path.write_text(to_json(table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
