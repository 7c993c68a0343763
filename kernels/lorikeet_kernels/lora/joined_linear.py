"""A dense projection and its adapters' delta in one launch, where there is one that makes both."""

import torch

from lorikeet_kernels.dense.few_rows_linear import takes
from lorikeet_kernels.dense.fp8_weight import Fp8Weight
from lorikeet_kernels.dense.quantize_rows import quantize_rows
from lorikeet_kernels.launch.device_name import device_name
from lorikeet_kernels.lora.few_rows_lora import few_rows_lora
from lorikeet_kernels.lora.fp8_few_rows_lora import fp8_few_rows_lora
from lorikeet_kernels.lora.joined_delta import ALIGNED_BYTES, MAX_JOINED_RANK, JoinedSites, add_alike
from lorikeet_kernels.lora.lora_segments import LoraSegments
from lorikeet_kernels.lora.lora_tables import LoraTables
from lorikeet_kernels.tiling import OpShape, select_pair
from lorikeet_kernels.tiling.dense_tiles import select_lanes
from lorikeet_kernels.tiling.few_rows_tiles import MAX_LANE_ROWS, FewRowsTiles, select_few_rows


def joined_linear(
    x: torch.Tensor,
    weight: torch.Tensor | Fp8Weight,
    bias: torch.Tensor | None,
    segments: LoraSegments,
    tables: LoraTables,
    sites: tuple[int, ...],
    out_features: tuple[int, ...],
    num_slices: tuple[int, ...],
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The projection, with its own bits, and the delta float32, or None where one launch cannot make both."""
    few, max_rank = _tiles(x, weight), tables.max_rank
    if few is None or segments.blocks is not None or max_rank > MAX_JOINED_RANK:
        return None
    num_rows, (columns, in_features) = x.shape[0], weight.shape
    tiles = select_pair(OpShape("linear", in_features, columns, max_rank, num_rows), device_name(x))
    if not add_alike(tiles, max_rank, few.num_warps):
        return None
    adapters = JoinedSites(segments, tables, sites, out_features, num_slices, tiles)
    y = x.new_empty((num_rows, columns))
    delta = torch.empty((num_rows, columns), dtype=torch.float32, device=x.device)
    if isinstance(weight, Fp8Weight):
        quantized = quantize_rows(x, weight.activations)
        fp8_few_rows_lora(quantized, weight, bias, x, y, delta, few, adapters)
    else:
        few_rows_lora(x, weight, bias, y, delta, few, adapters)
    return y, delta


def _tiles(x: torch.Tensor, weight: torch.Tensor | Fp8Weight) -> FewRowsTiles | None:
    """Those with which `linear` or `fp8_linear` projects such rows, None where another kernel does."""
    num_rows, (columns, in_features) = x.shape[0], weight.shape
    if not x.is_cuda or not x.is_contiguous() or x.element_size() != 2 or x.data_ptr() % ALIGNED_BYTES:
        return None
    if isinstance(weight, Fp8Weight):
        return select_lanes(num_rows, columns, in_features)
    if not 1 <= num_rows <= MAX_LANE_ROWS or not takes(x, weight):
        return None
    few = select_few_rows(num_rows, columns, in_features, device_name(x))
    return None if few is None or few.products else few
