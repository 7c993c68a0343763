"""One op at one shape over cold inputs, as tune launches it: MoE projections and dense ones."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from lorikeet_kernels.benchmarking.bench_problem import (
    DenseInputs,
    DenseSites,
    MoeInputs,
    MoeModel,
    make_dense_inputs,
    make_dense_layers,
    make_inputs,
    make_layers,
    num_layers,
    num_sets,
)
from lorikeet_kernels.benchmarking.tune_plan import TunePoint
from lorikeet_kernels.lora.group_blocks import GroupBlocks, group_pairs
from lorikeet_kernels.lora.grouped_expand import grouped_expand
from lorikeet_kernels.lora.grouped_shrink import grouped_shrink
from lorikeet_kernels.lora.lora_tables import LoraTables
from lorikeet_kernels.lora.lora_workspace import LoraWorkspace
from lorikeet_kernels.lora.output_lanes import PairLane, gate_up_lanes, site_lanes
from lorikeet_kernels.lora.pair_lora import pair_lora
from lorikeet_kernels.lora.register_segments import register_segments
from lorikeet_kernels.lora.segment_lora import segment_lora
from lorikeet_kernels.tiling import (
    ExpandTiles,
    OpShape,
    PairTiles,
    RegisterTiles,
    ShrinkTiles,
    is_segmented,
    is_ungrouped,
    select_block_m,
)

Tiles = PairTiles | RegisterTiles | ShrinkTiles | ExpandTiles
Launch = Callable[[], None]


def compiles(launch: Launch, name: str) -> bool:
    """Launch once; False, and a line to say so, where the tiles that `name` names do not fit the card."""
    try:
        launch()
    except RuntimeError as error:  # Triton's OutOfResources: too much shared memory or too many registers
        sys.stdout.write(f"  {name}: {error}\n")
        return False
    return True


@dataclass(frozen=True, slots=True)
class Case(ABC):
    """What tune measures: `stages` says which kernels serve the shape, `launches` runs one of them."""

    name: str
    shape: OpShape
    num_slots: int
    tables: LoraTables

    @abstractmethod
    def stages(self) -> list[tuple[str, int]]:
        """The stages and their block_m, as the table files them."""

    @abstractmethod
    def launches(self, tiles: Tiles) -> list[Launch]:
        """One launch a set."""


@dataclass(frozen=True, slots=True)
class MoeCase(Case):
    """gate_up or down of a MoE layer."""

    model: MoeModel
    sets: Sequence[MoeInputs]

    def stages(self) -> list[tuple[str, int]]:
        """One launch, or a shrink and an expand of grouped pairs."""
        pairs, experts = self.shape.num_pairs, self.model.num_experts
        if is_ungrouped(pairs, experts, self.num_slots):
            return [("pair", 0)]
        return [("shrink", self._block_m), ("expand", self._block_m)]

    @property
    def _block_m(self) -> int:
        return select_block_m(self.shape.num_pairs, self.model.num_experts, self.num_slots)

    def launches(self, tiles: Tiles) -> list[Launch]:
        """One launch a set."""
        return [self._launch(tiles, inputs) for inputs in self.sets]

    def _launch(self, tiles: Tiles, inputs: MoeInputs) -> Launch:
        up = self.shape.op == "gate_up"
        out, x, site = (
            (inputs.gate_up, inputs.x, inputs.gate_up_site)
            if up
            else (inputs.down, inputs.act, inputs.down_site)
        )
        width = out.shape[2]
        lanes = gate_up_lanes(width, self.model.row_order) if up else site_lanes((width,), (1,))
        interleaved = up and self.model.row_order == "interleaved"
        weights = None if up else inputs.topk_weights
        token_slot, workspace = inputs.segments.token_slot, inputs.segments.workspace
        if isinstance(tiles, PairTiles):
            return lambda: pair_lora(
                out, x, token_slot, inputs.topk_ids, weights, self.tables, (site,), lanes, tiles, workspace,
                x_per_pair=not up, interleaved=interleaved,
            )  # fmt: skip
        assert not isinstance(tiles, RegisterTiles)
        blocks = group_pairs(
            inputs.topk_ids, token_slot, self.model.num_experts, self.num_slots, self._block_m, workspace
        )
        x_div = self.model.top_k if up else 1
        return _grouped_launch(
            self.tables, blocks, tiles, out, x, weights, (site,), lanes, 2 if up else 1, x_div, interleaved
        )


@dataclass(frozen=True, slots=True)
class DenseCase(Case):
    """A fused dense projection."""

    dense: DenseSites
    sets: Sequence[DenseInputs]

    def stages(self) -> list[tuple[str, int]]:
        """One launch by tokens or by blocks of them, or a shrink and an expand."""
        blocks = self.sets[0].segments.blocks
        if blocks is None:
            return [("pair", 0)]
        if is_segmented(self.shape.num_pairs, blocks.capacity, self.tables.max_rank):
            return [("segment", 0)]
        return [("shrink", blocks.block_m), ("expand", blocks.block_m)]

    def launches(self, tiles: Tiles) -> list[Launch]:
        """One launch a set."""
        return [self._launch(tiles, inputs) for inputs in self.sets]

    def _launch(self, tiles: Tiles, inputs: DenseInputs) -> Launch:
        lanes = site_lanes(self.dense.widths, self.dense.slices)
        segments = inputs.segments
        if segments.blocks is None:
            assert isinstance(tiles, PairTiles)
            return lambda: pair_lora(
                inputs.out, inputs.x, segments.token_slot, None, None, self.tables, inputs.sites, lanes,
                tiles, segments.workspace,
            )  # fmt: skip
        blocks = segments.blocks
        if isinstance(tiles, PairTiles):
            return lambda: segment_lora(
                inputs.out, inputs.x, blocks, self.tables, inputs.sites, lanes, tiles, segments.workspace
            )
        if isinstance(tiles, RegisterTiles):
            return lambda: register_segments(
                inputs.out, inputs.x, blocks, self.tables, inputs.sites, lanes, tiles, segments.workspace
            )
        return _grouped_launch(
            self.tables,
            blocks,
            tiles,
            inputs.out,
            inputs.x,
            None,
            inputs.sites,
            lanes,
            max(self.dense.slices),
            1,
            interleaved=False,
        )


def _grouped_launch(
    tables: LoraTables,
    blocks: GroupBlocks,
    tiles: ShrinkTiles | ExpandTiles,
    out: torch.Tensor,
    x: torch.Tensor,
    weights: torch.Tensor | None,
    sites: tuple[int, ...],
    lanes: tuple[PairLane, ...],
    halves: int,
    x_div: int,
    interleaved: bool,
) -> Launch:
    splits = tiles.splits if isinstance(tiles, ShrinkTiles) else 1
    # random: on zeros a card runs faster than on what it will serve
    h = torch.randn((splits, blocks.order.shape[0], len(sites), halves, tables.max_rank), device=x.device)
    padded = tables.padded_sites(sites)
    if isinstance(tiles, ShrinkTiles):
        return lambda: grouped_shrink(h, x, blocks, tables, padded, tiles, x_div=x_div)
    return lambda: grouped_expand(
        out, h, weights, blocks, tables, padded, lanes, tiles, interleaved=interleaved
    )


def moe_cases(model: MoeModel, point: TunePoint, num_slots: int, *, cold: bool = True) -> list[Case]:
    """Both projections at a point; one set alone without `cold`, to compile for."""
    workspace = LoraWorkspace(torch.device("cuda"))
    first = make_inputs(model, point.rank, num_slots, point.num_tokens, 0, workspace, 0)
    count = num_sets(first.floor_bytes) if cold else 1
    per_expert = point.rank * (model.num_a * model.hidden + 3 * model.inner + model.hidden)
    layers = num_layers(2 * num_slots * model.num_experts * per_expert, count)
    tables = make_layers(model, point.rank, num_slots, layers)
    sets = [
        make_inputs(model, point.rank, num_slots, point.num_tokens, i % layers, workspace, i)
        for i in range(count)
    ]
    pairs = point.num_tokens * model.top_k
    up = OpShape("gate_up", model.hidden, 2 * model.inner, tables.max_rank, pairs)
    down = OpShape("down", model.inner, model.hidden, tables.max_rank, pairs)
    return [MoeCase(model.name, shape, num_slots, tables, model, sets) for shape in (up, down)]


def dense_cases(dense: DenseSites, point: TunePoint, num_slots: int, *, cold: bool = True) -> list[Case]:
    """As `moe_cases`."""
    workspace = LoraWorkspace(torch.device("cuda"))
    first = make_dense_inputs(dense, point.rank, num_slots, point.num_tokens, 0, workspace, 0)
    count = num_sets(first.floor_bytes) if cold else 1
    columns = sum(dense.widths)
    weights = 2 * num_slots * point.rank * dense.adapter_elements
    layers = num_layers(weights, count)
    tables = make_dense_layers(dense, point.rank, num_slots, layers)
    sets = [
        make_dense_inputs(dense, point.rank, num_slots, point.num_tokens, i % layers, workspace, i)
        for i in range(count)
    ]
    shape = OpShape("linear", dense.in_features, columns, tables.max_rank, point.num_tokens)
    return [DenseCase(dense.name, shape, num_slots, tables, dense, sets)]
