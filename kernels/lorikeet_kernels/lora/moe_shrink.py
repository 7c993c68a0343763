"""The launch that gate_up_shrink and down_shrink share: tiles for the shape, one site, grouped pairs."""

import torch

from lorikeet_kernels.launch.device_name import device_name
from lorikeet_kernels.lora.group_blocks import GroupBlocks
from lorikeet_kernels.lora.grouped_shrink import grouped_shrink
from lorikeet_kernels.lora.lora_tables import LoraTables
from lorikeet_kernels.tiling import OpShape, select_shrink


def launch_moe_shrink(
    op: str,
    h: torch.Tensor,
    x: torch.Tensor,
    blocks: GroupBlocks,
    tables: LoraTables,
    site: int,
    *,
    x_div: int,
) -> None:
    """Shrink `op`'s input `x`, a row a pair or, with `x_div` pairs a row, a row a token."""
    shape = OpShape(op, x.shape[-1], 0, tables.max_rank, blocks.order.shape[0])
    tiles = select_shrink(shape, blocks.block_m, device_name(x))
    grouped_shrink(h, x, blocks, tables, (site, site, site), tiles, x_div=x_div)
