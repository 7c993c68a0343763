"""The experts of a MoE layer on a GPU: both GEMMs with what follows them fused, LoRA between, the top-k sum.

Three launches beside the cut of the pairs into blocks: gate_up with bias and activation, down with bias and
routed weight, the sum; the last two are one where the tiles say so and no adapter comes between. One token
needs no cut where neither's weights are packed or in FP8. With adapters, decode batches get their delta added
inside the same launches, or, where gate_up's is made beside its GEMM, by an activation of its own; prefill
batches store gate_up's and down's rows, to which the LoRA ops add. Rows without an adapter have the same bits
in every way, and those with one the same beside as before the GEMM. Experts in FP8 take rows quantised first,
a launch before each GEMM; adapters see the rows as they were. The reference is `expert_linear`,
`gated_activation` and `moe_sum` one after the other.

Beside LoRA gate_up's GEMM stores its rows, which the activation reads: 4 P I elements more for P pairs.
gpt-oss-20b at 32 rows, bf16: 2.9 MB, 0.7 us at 4.3 TB/s; the launch takes 2.2 us, and `tiling.lora_overlap`
says what is gained.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import triton

from lorikeet_kernels.dense.fp8_weight import Fp8Weight
from lorikeet_kernels.dense.gated_activation import GatedActivation, gated_activation
from lorikeet_kernels.dense.quantize_rows import quantize_rows
from lorikeet_kernels.dense.row_order import RowOrder
from lorikeet_kernels.experts.expert_blocks import ExpertBlocks, expert_blocks, lone_blocks
from lorikeet_kernels.experts.expert_gemm import expert_gemm
from lorikeet_kernels.experts.fp8_gemm import fp8_gemm
from lorikeet_kernels.experts.fp8_ranged_down import can_range_down, empty_marks, fp8_ranged_down
from lorikeet_kernels.experts.joined_down import joined_down
from lorikeet_kernels.experts.moe_sum import SharedRows, moe_sum_parts, sum_pairs
from lorikeet_kernels.experts.mxfp4 import Mxfp4Weight, dequantize_mxfp4
from lorikeet_kernels.experts.mxfp4_layout import Mxfp4DeviceWeight, lay_out_mxfp4
from lorikeet_kernels.experts.mxfp4_linear import mxfp4_linear
from lorikeet_kernels.launch.device_name import device_name
from lorikeet_kernels.lora.lora_segments import LoraSegments, make_lora_segments
from lorikeet_kernels.lora.lora_tables import LoraTables
from lorikeet_kernels.lora.moe_groups import make_moe_groups
from lorikeet_kernels.lora.moe_lora import moe_lora_down, moe_lora_gate_up
from lorikeet_kernels.lora.side_stream import SideStream
from lorikeet_kernels.tiling import is_ungrouped
from lorikeet_kernels.tiling.expert_tiles import ExpertTiles, MoeShape, MoeTiles, Weights, select_experts

DeviceExpertWeight = torch.Tensor | Mxfp4DeviceWeight | Fp8Weight
"""[E, out, in] as the device's kernels read it."""
_RUNTIME: Any = triton.knobs.runtime  # pyright: ignore[reportAttributeAccessIssue]


@dataclass(frozen=True, slots=True, eq=False)
class ExpertProjection:
    """One projection of all experts; `row_order` names gate_up's and is None for down."""

    weight: DeviceExpertWeight
    bias: torch.Tensor | None
    row_order: RowOrder | None


@dataclass(frozen=True, slots=True)
class ExpertsLora:
    """The adapters of a batch at a layer's two sites.

    With `side` a decode batch's deltas are made there beside the GEMMs, as far as its `rows` say.
    """

    segments: LoraSegments
    tables: LoraTables
    gate_up_site: int
    down_site: int
    side: SideStream | None = None

    def gate_up_side(self, num_tokens: int, weight: DeviceExpertWeight) -> SideStream | None:
        """The stream on which a batch of so many tokens makes gate_up's delta, if not on the base's."""
        side = self.side
        if side is None:
            return None
        rows = side.rows.gate_up
        if isinstance(weight, Mxfp4DeviceWeight):
            rows = side.rows.packed_gate_up
        elif isinstance(weight, Fp8Weight):
            rows = side.rows.fp8_gate_up
        return side if num_tokens in rows else None

    def down_side(self, num_tokens: int) -> SideStream | None:
        """The same of down's."""
        return self.side if self.side is not None and num_tokens in self.side.rows.down else None

    @property
    def fp8_joined_down_rows(self) -> range:
        """Numbers of tokens for which FP8 experts' down makes its delta in its own launch, where it can."""
        return range(0) if self.side is None else self.side.rows.fp8_joined_down

    def without_adapters(self, num_tokens: int) -> "ExpertsLora":
        """The same sites for a batch whose rows are all the base model's, for warming up."""
        device = self.segments.token_slot.device
        slots = torch.full((num_tokens,), -1, dtype=torch.int32, device=device)
        segments = make_lora_segments(slots, self.segments.num_slots, self.segments.workspace)
        return replace(self, segments=segments)


def device_expert_weight(
    weight: torch.Tensor | Mxfp4Weight | Fp8Weight, dtype: torch.dtype, row_order: RowOrder | None
) -> DeviceExpertWeight:
    """What the kernels read of `weight`, made once at load. MXFP4 stays packed in bfloat16 models only."""
    if not isinstance(weight, Mxfp4Weight):
        return weight
    if dtype == torch.bfloat16:
        return lay_out_mxfp4(weight, pairing=row_order)
    return dequantize_mxfp4(weight, dtype)


def moe_experts(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    gate_up: ExpertProjection,
    down: ExpertProjection,
    activation: GatedActivation,
    *,
    lora: ExpertsLora | None = None,
    shared: SharedRows | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Return [T, H]: each row of `x` [T, H] through its own experts, weighted and summed. GPU only.

    `shared` is what every token's own expert made, to which the sum is added.
    """
    if x.device.type == "cpu" and not _RUNTIME.interpret:
        raise ValueError(
            "moe_experts runs on a GPU: on a CPU call expert_linear, gated_activation and moe_sum in turn"
        )
    out = torch.empty_like(x)
    if x.shape[0] == 0:
        return out
    num_experts, _, hidden = gate_up.weight.shape
    shape = experts_shape(gate_up, down, topk_ids.numel())
    tiles = select_experts(shape, device_name(x), batch_invariant=batch_invariant)
    if lora is not None and not is_ungrouped(topk_ids.numel(), num_experts, lora.segments.num_slots):
        return _with_grouped_lora(
            x, topk_weights, topk_ids, gate_up, down, activation, lora, shared, tiles, out
        )
    # one token's experts differ, so that no block would have a second pair; only plain weights' GEMM knows
    is_lone = x.shape[0] == 1 and all(isinstance(part.weight, torch.Tensor) for part in (gate_up, down))
    make_blocks = lone_blocks if is_lone else expert_blocks
    cut = partial(make_blocks, topk_ids, num_experts, tiles.gate_up.block_rows)
    if lora is None and _takes_ranges(x, topk_ids, down, shared, tiles):
        return _with_ranged_down(
            x, topk_weights, topk_ids, cut, gate_up, down, activation, shared, tiles, out
        )  # fmt: skip
    act, blocks = _activated(x, topk_ids, cut, gate_up, activation, lora, tiles.gate_up)
    is_split = tiles.down.splits > 1
    shape_of_parts = (tiles.down.splits, *topk_ids.shape, hidden) if is_split else (*topk_ids.shape, hidden)
    parts = x.new_empty(shape_of_parts, dtype=torch.float32 if is_split else x.dtype)
    project = partial(
        _project, act, down, blocks, parts, tiles.down, topk_weights=None if is_split else topk_weights,
        # what is launched before, gate_up, its activation or LoRA, began when the blocks were made
        weights_first=True,
    )  # fmt: skip
    side = delta = None
    matrix = down.weight
    if lora is not None and isinstance(matrix, Fp8Weight) and x.shape[0] in lora.fp8_joined_down_rows:
        delta = joined_down(
            act, matrix, down.bias, blocks, parts, topk_ids, topk_weights, tiles.down, lora.segments,
            lora.tables, lora.down_site,
        )  # fmt: skip
    if lora is None:
        project()
    elif delta is None:
        side, delta = lora.down_side(x.shape[0]), x.new_empty((*topk_ids.shape, hidden))
        branch = partial(
            moe_lora_down,
            delta, act, topk_ids, topk_weights, None, lora.segments, lora.tables, lora.down_site,
            accumulate=False,
        )  # fmt: skip
        if side is None:
            branch()
            project()
        else:
            side.beside(project, branch)
    is_next = side is None
    if is_split:
        return moe_sum_parts(
            parts,
            out,
            topk_ids,
            topk_weights,
            bias=down.bias,
            delta=delta,
            shared=shared,
            is_dependent=is_next,
        )
    return sum_pairs(parts, out, delta=delta, shared=shared, is_dependent=is_next)


def _takes_ranges(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    down: ExpertProjection,
    shared: SharedRows | None,
    tiles: MoeTiles,
) -> bool:
    """Whether down and the sum can be one launch."""
    num_tokens, top_k = topk_ids.shape
    return (
        tiles.ranged is not None
        and isinstance(down.weight, Fp8Weight)
        and down.bias is None
        and (shared is None or shared.delta is None)
        and can_range_down(down.weight, num_tokens, top_k, tiles.gate_up.block_rows, x.dtype, tiles.ranged)
    )


def _with_ranged_down(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    cut: Callable[[], ExpertBlocks],
    gate_up: ExpertProjection,
    down: ExpertProjection,
    activation: GatedActivation,
    shared: SharedRows | None,
    tiles: MoeTiles,
    out: torch.Tensor,
) -> torch.Tensor:
    assert tiles.ranged is not None
    assert isinstance(down.weight, Fp8Weight)
    marks = empty_marks(down.weight, tiles.ranged)
    act, blocks = _activated(x, topk_ids, cut, gate_up, activation, None, tiles.gate_up)
    rows = quantize_rows(act, down.weight.activations)
    return fp8_ranged_down(
        rows, down.weight, blocks, out, tiles.ranged, topk_weights, marks,
        shared=None if shared is None else shared.y,
    )  # fmt: skip


def _activated(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    cut: Callable[[], ExpertBlocks],
    gate_up: ExpertProjection,
    activation: GatedActivation,
    lora: ExpertsLora | None,
    tiles: ExpertTiles,
) -> tuple[torch.Tensor, ExpertBlocks]:
    """[T, K, I] after the activation, adapters included, for batches whose pairs are not grouped."""
    num_rows, order = gate_up.weight.shape[1], gate_up.row_order
    if lora is None:
        blocks, act = cut(), x.new_empty((*topk_ids.shape, num_rows // 2))
        _project(x, gate_up, blocks, act, tiles, activation=activation, is_ready=True)
        return act, blocks
    assert order is not None
    delta = x.new_empty((*topk_ids.shape, num_rows))
    branch = partial(
        moe_lora_gate_up,
        delta, x, topk_ids, None, lora.segments, lora.tables, lora.gate_up_site, order, accumulate=False,
    )  # fmt: skip
    side = lora.gate_up_side(x.shape[0], gate_up.weight)
    if side is None:
        blocks, act = cut(), x.new_empty((*topk_ids.shape, num_rows // 2))
        branch()
        # the launch before, LoRA's, began when the blocks were made
        _project(x, gate_up, blocks, act, tiles, activation=activation, delta=delta, weights_first=True)
        return act, blocks
    rows = torch.empty_like(delta)

    def base() -> ExpertBlocks:
        # the branch needs no blocks: it may begin while they are made
        blocks = cut()
        _project(x, gate_up, blocks, rows, tiles, is_ready=True)
        return blocks

    blocks = side.beside(base, branch)
    return gated_activation(rows, activation, row_order=order, delta=delta), blocks


def _with_grouped_lora(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    gate_up: ExpertProjection,
    down: ExpertProjection,
    activation: GatedActivation,
    lora: ExpertsLora,
    shared: SharedRows | None,
    tiles: MoeTiles,
    out: torch.Tensor,
) -> torch.Tensor:
    num_experts, num_rows, hidden = gate_up.weight.shape
    order = gate_up.row_order
    assert order is not None
    blocks = expert_blocks(topk_ids, num_experts, tiles.gate_up.block_rows)
    groups = make_moe_groups(topk_ids, lora.segments, num_experts)
    rows = x.new_empty((*topk_ids.shape, num_rows))
    _project(x, gate_up, blocks, rows, tiles.gate_up)
    moe_lora_gate_up(rows, x, topk_ids, groups, lora.segments, lora.tables, lora.gate_up_site, order)
    act = gated_activation(rows, activation, row_order=order)
    pairs = x.new_empty((*topk_ids.shape, hidden))
    _project(act, down, blocks, pairs, tiles.down, topk_weights=topk_weights)
    moe_lora_down(pairs, act, topk_ids, topk_weights, groups, lora.segments, lora.tables, lora.down_site)
    return sum_pairs(pairs, out, shared=shared)


def experts_kind(weight: DeviceExpertWeight) -> Weights:
    """How the tiles' tables call the storage of `weight`."""
    if isinstance(weight, Mxfp4DeviceWeight):
        return "mxfp4"
    if isinstance(weight, Fp8Weight):
        return "fp8_block" if weight.kind == "block" else "fp8_channel"
    return "fp32" if weight.dtype == torch.float32 else "bf16"


def experts_shape(gate_up: ExpertProjection, down: ExpertProjection, num_pairs: int) -> MoeShape:
    """What the tiles of a layer depend on."""
    num_experts, num_rows, hidden = gate_up.weight.shape
    kind, down_kind = experts_kind(gate_up.weight), experts_kind(down.weight)
    other = None if down_kind == kind else down_kind
    if kind == "fp8_block" and gate_up.row_order != "concatenated":
        kind = "fp8_interleaved"
    return MoeShape(kind, hidden, num_rows // 2, num_experts, num_pairs, other)


def _project(
    x: torch.Tensor,
    projection: ExpertProjection,
    blocks: ExpertBlocks,
    out: torch.Tensor,
    tiles: ExpertTiles,
    *,
    topk_weights: torch.Tensor | None = None,
    activation: GatedActivation | None = None,
    delta: torch.Tensor | None = None,
    weights_first: bool = False,
    is_ready: bool = False,
) -> None:
    """One GEMM; for `is_ready` see `quantize_rows`."""
    bias = None if out.dim() == 4 else projection.bias  # split parts get theirs in the sum
    if isinstance(projection.weight, Mxfp4DeviceWeight):
        mxfp4_linear(
            x, projection.weight, blocks, out, tiles, bias=bias, topk_weights=topk_weights,
            activation=activation, delta=delta, weights_first=weights_first and tiles.kernel == "decode",
        )  # fmt: skip
        return
    if isinstance(projection.weight, Fp8Weight):
        rows = quantize_rows(x, projection.weight.activations, is_ready=is_ready)
        fp8_gemm(
            rows, projection.weight, blocks, out, tiles, bias=bias, topk_weights=topk_weights,
            activation=activation, row_order=projection.row_order, delta=delta,
        )  # fmt: skip
        return
    expert_gemm(
        x, projection.weight, blocks, out, tiles, bias=bias, topk_weights=topk_weights,
        activation=activation, row_order=projection.row_order, delta=delta,
        weights_first=weights_first and tiles.kernel == "decode",
    )  # fmt: skip
