"""lora_embedding: out += B A[token] for the input embedding.

    out[t] += B @ A[token_ids[t]],   weights those of slot(t)

A [vocabulary, R] (a row a token) and B [H, R] in the arena, scaling included; out [T, H] compute dtype, in place,
summed in float32 and rounded once. Rows of slot -1 keep their bits.
"""

import torch

from lorikeet_kernels.lora_segments import LoraSegments
from lorikeet_kernels.lora_tables import LoraTables
from lorikeet_kernels.lora_weights import add_rounded, site_b, site_rank


def lora_embedding_reference(
    out: torch.Tensor, token_ids: torch.Tensor, segments: LoraSegments, tables: LoraTables, site: int
) -> None:
    """The op on CPU: per slot segment, gathered rows of A times B in float32."""
    if out.shape[0] != token_ids.shape[0] or token_ids.shape[0] != segments.token_slot.shape[0]:
        raise ValueError(
            f"out {tuple(out.shape)}, token_ids {tuple(token_ids.shape)} and token_slot"
            f" {tuple(segments.token_slot.shape)} must have one row a token"
        )
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
        b = site_b(tables, slot, site, out.shape[1]).to(torch.float32)
        add_rounded(out, tokens, slice(0, out.shape[1]), rows @ b.T)


lora_embedding = lora_embedding_reference
