"""Attention over the paged cache, for batches that mix prefill chunks and decodes.

    p = softmax over visible j of (scale q . k_j), and of the head's sink where there is one (it takes its
        share of the probability and adds no value)
    y = sum_j p_j v_j

A query at position i sees keys j <= i, and only those with j > i - window where a window is given.

Shapes: q [T, Hq, Dk], a view is fine; key_cache [blocks, block_tokens, Hkv, Dk], value_cache [.., Hkv, Dv],
Hq a multiple of Hkv; sinks [Hq]; out [T, Hq, Dv], contiguous. Scores, softmax and sum are float32; the result
rounds once. Rows beyond the last request's, which pad the batch, get a copy of its last row. Each request is
computed by itself, so its rows do not depend on its neighbours.
"""

import torch

from lorikeet_kernels.attention_metadata import AttentionMetadata


def paged_attention_reference(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    out: torch.Tensor,
    *,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `paged_attention`."""
    starts = metadata.query_starts_host
    block_tokens = key_cache.shape[1]
    for index, length in enumerate(metadata.sequence_lens_host):
        begin, end = starts[index], starts[index + 1]
        # Whole blocks before the first visible key are skipped, so a window bounds the work.
        first = 0 if window is None else max(0, length - (end - begin) - window + 1) // block_tokens
        blocks = metadata.block_tables[index, first : -(-length // block_tokens)]
        visible = length - first * block_tokens
        keys = key_cache.index_select(0, blocks).flatten(0, 1)[:visible].float()
        values = value_cache.index_select(0, blocks).flatten(0, 1)[:visible].float()
        out[begin:end] = _attend(q[begin:end].float(), keys, values, scale, window, sinks)
    if starts[-1] < out.shape[0]:
        out[starts[-1] :] = out[starts[-1] - 1]
    return out


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """One request: queries [N, Hq, Dk] are the last N positions of keys [S, Hkv, Dk]; returns [N, Hq, Dv]."""
    n, num_heads, _ = q.shape
    s, num_kv_heads, _ = k.shape
    # Query head h reads key head h // (Hq / Hkv): rows of one bmm are its key head's queries, [Hkv, group *
    # N, Dk].
    q = (q * scale).transpose(0, 1).reshape(num_kv_heads, -1, q.shape[-1])
    scores = torch.bmm(q, k.permute(1, 2, 0)).view(num_heads, n, s)
    if n > 1 or window is not None:
        distance = torch.arange(s - n, s, device=q.device)[:, None] - torch.arange(s, device=q.device)
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        scores.masked_fill_(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.float().view(-1, 1, 1).expand(-1, n, 1)), dim=-1)
    p = torch.softmax(scores, dim=-1)[..., :s]
    y = torch.bmm(p.reshape(num_kv_heads, -1, s), v.transpose(0, 1))
    return y.view(num_heads, n, -1).transpose(0, 1)


def paged_attention(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    out: torch.Tensor,
    *,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write the attention of `q` over the cache into `out` and return it."""
    if q.shape[1] % key_cache.shape[2] or q.shape[-1] != key_cache.shape[-1]:
        raise ValueError(
            f"paged_attention: queries {tuple(q.shape)} do not fit the key cache {tuple(key_cache.shape)}"
        )
    if out.shape != (*q.shape[:2], value_cache.shape[-1]):
        raise ValueError(f"paged_attention: out {tuple(out.shape)} does not fit queries {tuple(q.shape)}")
    return paged_attention_reference(
        q, key_cache, value_cache, metadata, scale, out, window=window, sinks=sinks
    )
