"""FP8 experts' down projection and its adapters' delta in one launch, where it can make both."""

import torch

from lorikeet_kernels.dense.fp8_weight import Fp8Weight
from lorikeet_kernels.dense.quantize_rows import quantize_rows
from lorikeet_kernels.experts.expert_blocks import ExpertBlocks
from lorikeet_kernels.experts.fp8_gemm_lora import fp8_gemm_lora
from lorikeet_kernels.launch.device_name import device_name
from lorikeet_kernels.lora.joined_delta import MAX_JOINED_RANK, JoinedSites, add_alike
from lorikeet_kernels.lora.lora_segments import LoraSegments
from lorikeet_kernels.lora.lora_tables import LoraTables
from lorikeet_kernels.tiling import OpShape, PairTiles, select_pair
from lorikeet_kernels.tiling.expert_tiles import ExpertTiles


def joined_down(
    act: torch.Tensor,
    weight: Fp8Weight,
    bias: torch.Tensor | None,
    blocks: ExpertBlocks,
    out: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    tiles: ExpertTiles,
    segments: LoraSegments,
    tables: LoraTables,
    site: int,
) -> torch.Tensor | None:
    """Launch: the delta, and `out` with the GEMM's own bits; None where one launch cannot make both."""
    if not act.is_cuda or not act.numel() or act.element_size() != 2:
        return None
    _, hidden, inner = weight.shape
    shape = OpShape("down", inner, hidden, tables.max_rank, topk_ids.numel())
    of_pairs = select_joined_down(shape, tiles, device_name(act))
    if of_pairs is None:
        return None
    adapters = JoinedSites(segments, tables, (site,), (hidden,), (1,), of_pairs, topk_ids.shape[1])
    delta = act.new_empty((*topk_ids.shape, hidden))
    rows = quantize_rows(act, weight.activations)
    fp8_gemm_lora(rows, act, weight, blocks, out, delta, topk_ids, topk_weights, tiles, adapters, bias=bias)
    return delta


def select_joined_down(shape: OpShape, tiles: ExpertTiles, device: str) -> PairTiles | None:
    """The delta's tiles in one launch with a GEMM of `tiles`, None where it would have other bits there."""
    of_pairs = select_pair(shape, device)
    alike = shape.max_rank <= MAX_JOINED_RANK and add_alike(of_pairs, shape.max_rank, tiles.num_warps)
    return of_pairs if alike and tiles.kernel == "decode" else None
