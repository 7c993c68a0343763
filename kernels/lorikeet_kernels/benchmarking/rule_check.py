"""What the rule of `tiling.select` loses against a card's table, at the shapes that the table holds."""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

from lorikeet_kernels.benchmarking.bench_problem import DENSE, MODELS, DenseSites, MoeModel
from lorikeet_kernels.benchmarking.graph_timing import time_interleaved
from lorikeet_kernels.benchmarking.tune_cases import Case, Tiles, compiles
from lorikeet_kernels.benchmarking.tune_plan import TunePoint, candidates, is_done
from lorikeet_kernels.tiling import OpShape, select_tiles
from lorikeet_kernels.tiling.tile_table import TileTable

UNMEASURED = "a card without a table"
LIMIT = 0.25  # what the rule may lose at a shape


@dataclass(frozen=True, slots=True)
class RuleRow:
    """One stage at one shape: microseconds by tiles; `rule` and `tuned` are among them."""

    name: str
    stage: str
    block_m: int
    shape: OpShape
    rule: str
    tuned: str
    us: dict[str, float]

    @property
    def loss(self) -> float:
        """What the rule's tiles take more than the tuned ones; 0 where they are the same."""
        if self.rule == self.tuned:
            return 0.0
        return self.us.get(self.rule, math.inf) / self.us[self.tuned] - 1


def shapes_of(model: MoeModel | DenseSites, point: TunePoint) -> list[OpShape]:
    """The shapes that `tune_cases` makes of a model at a point, without its tensors."""
    if isinstance(model, DenseSites):
        return [OpShape("linear", model.in_features, sum(model.widths), point.rank, point.num_tokens)]
    pairs = point.num_tokens * model.top_k
    return [
        OpShape("gate_up", model.hidden, 2 * model.inner, point.rank, pairs),
        OpShape("down", model.inner, model.hidden, point.rank, pairs),
    ]


def checked_points(
    table: TileTable, names: Sequence[str], points: Sequence[TunePoint]
) -> list[tuple[str, TunePoint]]:
    """The models and points of which the table has measured something."""
    held = {entry.shape for entry in table.entries}
    return [
        (model.name, point)
        for model in (*MODELS, *DENSE)
        if model.name in names
        for point in points
        if any(shape in held for shape in shapes_of(model, point))
    ]


def tiles_to_time(case: Case, stage: str, block_m: int, device: str, *, every: bool) -> list[Tiles]:
    """The rule's and the table's tiles, and with `every` all candidates; one where both agree."""
    both = [select_tiles(stage, case.shape, block_m, name) for name in (UNMEASURED, device)]
    return list(dict.fromkeys((*both, *candidates(stage, case.shape, block_m)) if every else both))


def check(cases: Iterable[Case], table: TileTable, *, every: bool) -> Iterator[RuleRow]:
    """Time the rule's tiles beside the table's, taking turns, in each of `cases`."""
    for case in cases:
        for stage, block_m in case.stages():
            if not is_done(table, stage, case.shape, block_m):
                continue
            tiles = tiles_to_time(case, stage, block_m, table.device, every=every)
            rule, tuned = (
                str(select_tiles(stage, case.shape, block_m, name)) for name in (UNMEASURED, table.device)
            )
            us: dict[str, float] = {}
            if len(tiles) > 1:
                launches = {str(t): case.launches(t) for t in tiles}
                us = time_interleaved({k: v for k, v in launches.items() if compiles(v[0], k)})
            yield RuleRow(case.name, stage, block_m, case.shape, rule, tuned, us)


def line(row: RuleRow) -> str:
    """A row for a reader."""
    sizes = f"{row.shape.op} {row.shape.in_features}x{row.shape.out_features} {row.shape.num_pairs} pairs"
    same = "the same" if row.rule == row.tuned else f"{row.tuned} {row.us[row.tuned]:.2f} us, rule {row.rule}"
    return f"{row.loss:+5.0%} {row.name} {row.stage} {row.block_m} {sizes} r{row.shape.max_rank}: {same}"


def summary(rows: Sequence[RuleRow]) -> str:
    """The geometric mean of what the rule loses, the worst, and how many lie beyond the limit."""
    if not rows:
        return "nothing to check: the table holds none of these shapes"
    losses = [row.loss for row in rows]
    mean = math.exp(sum(math.log1p(loss) for loss in losses) / len(losses)) - 1
    beyond = sum(loss > LIMIT for loss in losses)
    return (
        f"rule against table: {len(rows)} cases, geomean {mean:+.1%}, worst {max(losses):+.0%},"
        f" {beyond} beyond {LIMIT:.0%}"
    )


def rows_as_json(rows: Sequence[RuleRow]) -> str:
    """All times, to refit the rule on."""
    return "[\n" + ",\n".join(json.dumps({**asdict(row), "loss": row.loss}) for row in rows) + "\n]\n"
