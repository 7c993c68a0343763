"""Views of one slot's A and B inside the arena, for the reference implementations (CPU backend and test oracle)."""

import torch

from lorikeet_kernels.lora_tables import LoraTables


def site_rank(tables: LoraTables, slot: int, site: int) -> int:
    """The padded rank that `slot` has at `site`; 0 where it does not adapt it."""
    return int(tables.rank[slot, site])


def site_num_a(tables: LoraTables, slot: int, site: int) -> int:
    """1, or 2 where the site's two slices have their own A."""
    return int(tables.num_a[slot, site])


def largest_rank(tables: LoraTables, site: int) -> int:
    """The largest padded rank of any slot at `site`."""
    return int(tables.rank[:, site].max())


def site_a(tables: LoraTables, slot: int, site: int, in_features: int, expert: int = 0) -> torch.Tensor:
    """A of one expert (or of a linear site) as a view [num_a, R, in]."""
    rank = site_rank(tables, slot, site)
    num_a = site_num_a(tables, slot, site)
    count = num_a * rank * in_features
    start = int(tables.a_offset[slot, site]) + expert * count
    return tables.arena[start : start + count].view(num_a, rank, in_features)


def site_b(tables: LoraTables, slot: int, site: int, out_features: int, expert: int = 0) -> torch.Tensor:
    """B of one expert (or of a linear site) as a view [out, R]."""
    rank = site_rank(tables, slot, site)
    count = out_features * rank
    start = int(tables.b_offset[slot, site]) + expert * count
    return tables.arena[start : start + count].view(out_features, rank)


def add_rounded(out: torch.Tensor, rows: torch.Tensor, columns: slice, delta: torch.Tensor) -> None:
    """`out[rows, columns] += delta` with the sum in float32 and one rounding to out's dtype."""
    target = out[:, columns]
    total = target.index_select(0, rows).to(torch.float32).add_(delta)
    target.index_copy_(0, rows, total.to(out.dtype))
