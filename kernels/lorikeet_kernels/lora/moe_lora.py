"""The LoRA branch of a MoE layer: shrink and expand for gate_up and for down, composed for layers.moe."""

import torch

from lorikeet_kernels.dense.row_order import RowOrder, check_row_order
from lorikeet_kernels.launch.device_name import device_name
from lorikeet_kernels.lora.down_expand import down_expand
from lorikeet_kernels.lora.down_shrink import down_shrink
from lorikeet_kernels.lora.gate_up_expand import gate_up_expand
from lorikeet_kernels.lora.gate_up_shrink import gate_up_shrink
from lorikeet_kernels.lora.lora_segments import LoraSegments
from lorikeet_kernels.lora.lora_tables import LoraTables
from lorikeet_kernels.lora.lora_weights import largest_rank
from lorikeet_kernels.lora.moe_groups import MoeGroups
from lorikeet_kernels.lora.output_lanes import gate_up_lanes, site_lanes
from lorikeet_kernels.lora.pair_lora import check_routed, pair_lora
from lorikeet_kernels.tiling import OpShape, is_ungrouped, select_pair, select_shrink


def moe_lora_gate_up(
    out: torch.Tensor,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    groups: MoeGroups | None,
    segments: LoraSegments,
    tables: LoraTables,
    site: int,
    row_order: RowOrder,
    *,
    accumulate: bool = True,
) -> None:
    """`out` [T, K, 2I] += each pair's gate_up adapter applied to `x` [T, H]; rows of slot -1 keep their bits.

    Without `accumulate` (decode batches on a GPU only) `out` receives the delta alone, NO_DELTA where there
    is none: for a base GEMM that runs beside it on another stream.
    """
    check_row_order(row_order)
    _check(out, x, topk_ids, groups, segments, tables, site)
    if topk_ids.numel() == 0:
        return
    if _is_decode(topk_ids, groups, tables):
        shape = OpShape("gate_up", x.shape[1], out.shape[2], tables.max_rank, topk_ids.numel())
        pair_lora(
            out,
            x,
            segments.token_slot,
            topk_ids,
            None,
            tables,
            (site,),
            gate_up_lanes(out.shape[2], row_order),
            select_pair(shape, device_name(x)),
            segments.workspace,
            interleaved=row_order == "interleaved",
            accumulate=accumulate,
        )
        return
    h = _rank_vectors(
        "gate_up", x.shape[1], topk_ids, _grouped(groups, accumulate=accumulate), tables, site, 2
    )
    if h is not None and groups is not None:
        gate_up_shrink(h, x, topk_ids, groups, segments, tables, site)
        gate_up_expand(out, h, topk_ids, groups, segments, tables, site, row_order)


def moe_lora_down(
    out: torch.Tensor,
    act: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    groups: MoeGroups | None,
    segments: LoraSegments,
    tables: LoraTables,
    site: int,
    *,
    accumulate: bool = True,
) -> None:
    """`out` [T, K, H] += topk_weights times each pair's down adapter applied to `act` [T, K, I].

    `accumulate` as for moe_lora_gate_up.
    """
    _check(out, act, topk_ids, groups, segments, tables, site)
    check_routed(topk_ids, topk_weights)
    if topk_ids.numel() == 0:
        return
    if _is_decode(topk_ids, groups, tables):
        width = out.shape[2]
        shape = OpShape("down", act.shape[2], width, tables.max_rank, topk_ids.numel())
        pair_lora(
            out,
            act,
            segments.token_slot,
            topk_ids,
            topk_weights,
            tables,
            (site,),
            site_lanes((width,), (1,)),
            select_pair(shape, device_name(act)),
            segments.workspace,
            x_per_pair=True,
            accumulate=accumulate,
        )
        return
    h = _rank_vectors(
        "down", act.shape[2], topk_ids, _grouped(groups, accumulate=accumulate), tables, site, 1
    )
    if h is not None and groups is not None:
        down_shrink(h, act, topk_ids, groups, segments, tables, site)
        down_expand(out, h, topk_ids, topk_weights, groups, segments, tables, site)


def _is_decode(topk_ids: torch.Tensor, groups: MoeGroups | None, tables: LoraTables) -> bool:
    if topk_ids.device.type == "cpu":
        return False
    if groups is None or groups.blocks is None:
        return True
    return is_ungrouped(topk_ids.numel(), groups.num_experts, tables.rank.shape[0])


def _grouped(groups: MoeGroups | None, *, accumulate: bool) -> MoeGroups:
    if groups is None or not accumulate:
        raise ValueError(
            "groups None and accumulate False are for decode batches on a GPU: make groups, and add"
        )
    return groups


def _rank_vectors(
    op: str,
    in_features: int,
    topk_ids: torch.Tensor,
    groups: MoeGroups,
    tables: LoraTables,
    site: int,
    halves: int,
) -> torch.Tensor | None:
    """Memory for h [parts, T * K, 1, halves, Rmax]; None where no slot adapts the site, known on CPU only."""
    parts, rank = 1, tables.max_rank
    if groups.blocks is None:
        rank = largest_rank(tables, site)
        if rank == 0:
            return None
    else:
        shape = OpShape(op, in_features, 0, rank, topk_ids.numel())
        parts = select_shrink(shape, groups.blocks.block_m, device_name(topk_ids)).splits
    return torch.empty(
        (parts, topk_ids.numel(), 1, halves, rank), dtype=torch.float32, device=topk_ids.device
    )


def _check(
    out: torch.Tensor,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    groups: MoeGroups | None,
    segments: LoraSegments,
    tables: LoraTables,
    site: int,
) -> None:
    tables.check_sites(site)
    check_routed(topk_ids)
    num_tokens, top_k = topk_ids.shape
    if segments.token_slot.shape[0] != num_tokens or (groups is not None and groups.top_k != top_k):
        raise ValueError(f"segments or groups are of another batch than topk_ids {tuple(topk_ids.shape)}")
    if out.shape[:2] != (num_tokens, top_k) or not out.is_contiguous():
        raise ValueError(
            f"out {tuple(out.shape)} must be contiguous, one row a pair of topk_ids {tuple(topk_ids.shape)}"
        )
    if x.shape[0] != num_tokens or not x.is_contiguous():
        raise ValueError(
            f"input {tuple(x.shape)} must be contiguous with {num_tokens} tokens, as topk_ids has"
        )
    if not out.dtype == x.dtype == tables.arena.dtype:
        raise ValueError(
            f"out {out.dtype}, input {x.dtype}, arena {tables.arena.dtype} differ: all have the compute dtype"
        )
