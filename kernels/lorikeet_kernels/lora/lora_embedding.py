"""lora_embedding: out += B A[token] for the input embedding.

    out[t] += B @ A[token_ids[t]],   weights those of slot(t)

A [vocabulary, R] (a row a token) and B [H, R] in the arena, scaling included; out [T, H] compute dtype, in
place, summed in float32 and rounded once. Rows of slot -1 keep their bits.
"""

# A Triton kernel's arguments have no Python types, and its launch takes options that its signature lacks.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl

from lorikeet_kernels.lora.lora_segments import LoraSegments
from lorikeet_kernels.lora.lora_tables import LoraTables
from lorikeet_kernels.lora.lora_weights import add_rounded, site_b, site_rank
from lorikeet_kernels.lora.site_lookup import find_site


def lora_embedding_reference(
    out: torch.Tensor, token_ids: torch.Tensor, segments: LoraSegments, tables: LoraTables, site: int
) -> None:
    """The op on CPU: per slot segment, gathered rows of A times B in float32."""
    indptr = segments.indptr.tolist()
    for slot in range(segments.num_slots):
        start, end = indptr[slot + 1], indptr[slot + 2]
        rank = site_rank(tables, slot, site)
        if start == end or rank == 0:
            continue
        tokens = segments.order[start:end].to(torch.int64)
        offset = int(tables.a_offset[slot, site])
        lanes = torch.arange(rank, device=out.device)
        index = offset + token_ids.index_select(0, tokens).to(torch.int64)[:, None] * rank + lanes
        rows = tables.arena[index].to(torch.float32)
        b = site_b(tables, slot, site, out.shape[1])[0].float()
        add_rounded(out, tokens, slice(0, out.shape[1]), rows @ b.T)


@triton.jit(do_not_specialize=["site", "num_sites", "num_slots"])
def _lora_embedding_kernel(
    out_ptr, token_ids_ptr, token_slot_ptr, arena_ptr, a_offset_ptr, b_offset_ptr, rank_ptr, num_a_ptr,
    site, num_sites, num_slots, N: tl.constexpr, RANK_P2: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(token_slot_ptr + token)
    a_offset, rank, _ = find_site(a_offset_ptr, rank_ptr, num_a_ptr, slot, site, num_sites, num_slots, 0)
    b_offset, _, _ = find_site(b_offset_ptr, rank_ptr, num_a_ptr, slot, site, num_sites, num_slots, 0)
    if rank == 0:
        return
    r = tl.arange(0, RANK_P2)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.load(token_ids_ptr + token).to(tl.int64)
    h = tl.load(arena_ptr + a_offset + row * rank + r, mask=r < rank, other=0.0).to(tl.float32)
    b = tl.load(
        arena_ptr + b_offset + n.to(tl.int64)[:, None] * rank + r[None, :],
        mask=(n < N)[:, None] & (r < rank)[None, :],
        other=0.0,
    )
    place = out_ptr + token * N + n
    before = tl.load(place, mask=n < N, other=0.0)
    y = before.to(tl.float32) + tl.sum(b.to(tl.float32) * h[None, :], axis=1)
    tl.store(place, y.to(out_ptr.dtype.element_ty), mask=n < N)


def lora_embedding(
    out: torch.Tensor, token_ids: torch.Tensor, segments: LoraSegments, tables: LoraTables, site: int
) -> None:
    """Launch: one program a (token, tile of columns); the reference on CPU."""
    if out.shape[0] != token_ids.shape[0] or token_ids.shape[0] != segments.token_slot.shape[0]:
        raise ValueError(
            f"out {tuple(out.shape)}, token_ids {tuple(token_ids.shape)} and token_slot"
            f" {tuple(segments.token_slot.shape)} must have one row a token"
        )
    tables.check_sites(site)
    if out.device.type == "cpu":
        lora_embedding_reference(out, token_ids, segments, tables, site)
        return
    embed_rows(out, token_ids, segments, tables, site)


def embed_rows(
    out: torch.Tensor, token_ids: torch.Tensor, segments: LoraSegments, tables: LoraTables, site: int
) -> None:
    """The kernel's launch, on any device that Triton runs on."""
    if out.shape[0] == 0:
        return
    rank_p2 = max(16, triton.next_power_of_2(tables.max_rank))
    block_n = max(32, 4096 // rank_p2)
    num_slots, num_sites = tables.rank.shape
    _lora_embedding_kernel[(out.shape[0], triton.cdiv(out.shape[1], block_n))](
        out, token_ids, segments.token_slot, tables.arena, tables.a_offset, tables.b_offset, tables.rank,
        tables.num_a, site, num_sites, num_slots, N=out.shape[1], RANK_P2=rank_p2, BLOCK_N=block_n,
    )  # fmt: skip
