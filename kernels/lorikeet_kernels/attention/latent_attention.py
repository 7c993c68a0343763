"""Multi-head latent attention over the paged cache of latents, with absorbed weights (DeepSeek).

    p = softmax over visible j of (scale q . c_j);   y = sum_j p_j c_j[:latent]

A cached row c_j is (latent of token j | its rotated key), shared by all heads. Keys and values of a head are
the latent projected up, k = W_K l and v = W_V l; as q . (W_K l) = (W_K^T q) . l, the projections are applied
to the query before and to the sum after instead of to every key. A query at position i sees rows j <= i.

Shapes: q [T, H, latent + rope], a view is fine; cache [blocks, block_tokens, 1, latent + rope]; out
[T, H, latent], contiguous. Scores, softmax and sum are float32; the result rounds once. Rows beyond the last
request's, and one row of a request without tokens, are as `paged_attention` leaves them.

On a GPU two kernels share the batch, `latent_decode` for requests with one query and `latent_prefill` for the
others; both read the metadata on the device. A row of the cache is copied from memory once for both products.
On Hopper, in 16 bits, DeepSeek's sizes take the kernels of `latent_ring_kernels`, all else Triton's pipeline.
With `most_fresh` requests whose whole sequence is in the batch and longer than that are not computed, and
their rows undefined: `prompt_attention` does those with fewer products.

Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
"""

import torch

from lorikeet_kernels.attention.attention_metadata import AttentionMetadata
from lorikeet_kernels.attention.latent_decode import latent_decode
from lorikeet_kernels.attention.latent_prefill import latent_prefill
from lorikeet_kernels.attention.latent_ring_kernels import can_ring
from lorikeet_kernels.attention.paged_attention import paged_attention_reference
from lorikeet_kernels.launch.hopper import is_hopper
from lorikeet_kernels.tiling.latent_tiles import select_latent_decode, select_latent_prefill

MAX_LATENT = 512
"""The widest latent that the GPU's kernels hold in shared memory and registers."""

NEVER_FRESH = 2**31 - 1
"""No request is this long: all are computed over the cache."""


def latent_attention_reference(
    q: torch.Tensor,
    cache: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    out: torch.Tensor,
    *,
    most_fresh: int = NEVER_FRESH,
) -> torch.Tensor:
    """See `latent_attention`; it computes all rows."""
    del most_fresh
    return paged_attention_reference(q, cache, cache[..., : out.shape[-1]], metadata, scale, out)


def latent_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    out: torch.Tensor,
    *,
    most_fresh: int = NEVER_FRESH,
) -> torch.Tensor:
    """Write the attention of `q` over the cached latents into `out` and return it."""
    if cache.shape[2] != 1 or q.shape[-1] != cache.shape[-1]:
        raise ValueError(f"latent_attention: queries {tuple(q.shape)} do not fit cache {tuple(cache.shape)}")
    if out.shape[:2] != q.shape[:2] or out.shape[2] >= q.shape[2]:
        raise ValueError(f"latent_attention: out {tuple(out.shape)} does not fit queries {tuple(q.shape)}")
    if q.device.type == "cpu":
        return latent_attention_reference(q, cache, metadata, scale, out, most_fresh=most_fresh)
    if q.stride(2) != 1 or q.stride(1) != q.shape[2] or not out.is_contiguous() or cache.stride(3) != 1:
        raise ValueError(
            f"latent_attention: rows of q, strides {q.stride()}, of out and of the cache must be contiguous"
        )
    if out.shape[2] > MAX_LATENT:
        raise ValueError(f"latent_attention: latents of {out.shape[2]} elements are wider than {MAX_LATENT}")
    starts, lens, tables = metadata.query_starts, metadata.sequence_lens, metadata.block_tables
    num_rows, heads, _ = q.shape
    longest = tables.shape[1] * cache.shape[1]
    is_mixed = num_rows > lens.shape[0]
    rings = can_ring(cache, out.shape[2], q.dtype, on_hopper=is_hopper(q))
    decode = select_latent_decode(lens.shape[0], heads, longest, q.itemsize, rings=rings, is_mixed=is_mixed)
    latent_decode(q, cache, starts, lens, tables, scale, out, decode)
    if is_mixed:
        prefill = select_latent_prefill(heads, q.itemsize, rings=rings)
        latent_prefill(q, cache, starts, lens, tables, scale, out, prefill, most_fresh=most_fresh)
    return out
