"""Views of one slot's A and B inside the arena, for the references (CPU backend and test oracle)."""

import torch

from lorikeet_kernels.lora.lora_tables import HostTables, LoraTables

GATHERED_READERS = 4  # pairs a matrix up to which one gathered copy a pair is cheaper than a product a matrix


def site_rank(tables: LoraTables, slot: int, site: int) -> int:
    """The padded rank that `slot` has at `site`; 0 where it does not adapt it."""
    return int(_host(tables).rank[slot, site])


def site_num_a(tables: LoraTables, slot: int, site: int) -> int:
    """1, or 2 where the site's two slices have their own A."""
    return int(_host(tables).num_a[slot, site])


def largest_rank(tables: LoraTables, site: int) -> int:
    """The largest padded rank of any slot at `site`."""
    return int(_host(tables).rank[:, site].max())


def site_a(tables: LoraTables, slot: int, site: int, in_features: int, num_experts: int = 1) -> torch.Tensor:
    """A of a site as a view [E, num_a, R, in]; E is 1 for a site without experts."""
    rank, num_a = site_rank(tables, slot, site), site_num_a(tables, slot, site)
    start = int(_host(tables).a_offset[slot, site])
    end = start + num_experts * num_a * rank * in_features
    return tables.arena[start:end].view(num_experts, num_a, rank, in_features)


def site_b(tables: LoraTables, slot: int, site: int, out_features: int, num_experts: int = 1) -> torch.Tensor:
    """B of a site as a view [E, out, R]; E is 1 for a site without experts."""
    rank = site_rank(tables, slot, site)
    start = int(_host(tables).b_offset[slot, site])
    return tables.arena[start : start + num_experts * out_features * rank].view(
        num_experts, out_features, rank
    )


def pair_products(matrices: torch.Tensor, experts: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Row p times matrix experts[p] of [E, out, in], transposed: [n, out] float32. `experts` ascends."""
    if experts.shape[0] <= GATHERED_READERS * matrices.shape[0]:
        chosen = matrices.index_select(0, experts).float()
        return torch.bmm(rows.unsqueeze(1), chosen.transpose(1, 2)).squeeze(1)
    counts = torch.bincount(experts, minlength=matrices.shape[0]).tolist()
    parts = [part @ matrix.float().T for part, matrix in zip(rows.split(counts), matrices, strict=True)]
    return torch.cat(parts)


def sum_parts(h: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """The rank vectors [n, halves, Rmax] of `pairs`, the parts of h [parts, P, 1, halves, Rmax] added."""
    total = h[0, :, 0].index_select(0, pairs)
    for part in range(1, h.shape[0]):
        total += h[part, :, 0].index_select(0, pairs)
    return total


def add_rounded(out: torch.Tensor, rows: torch.Tensor, columns: slice, delta: torch.Tensor) -> None:
    """`out[rows, columns] += delta` with the sum in float32 and one rounding to out's dtype."""
    target = out[:, columns]
    if out.dtype == torch.float32:
        target.index_add_(0, rows, delta)
        return
    total = target.index_select(0, rows).to(torch.float32).add_(delta)
    target.index_copy_(0, rows, total.to(out.dtype))


def _host(tables: LoraTables) -> HostTables:
    return tables.copy_to_host() if tables.shared_host is None else tables.shared_host
