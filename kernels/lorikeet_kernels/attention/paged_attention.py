"""Attention over the paged cache, for batches that mix prefill chunks and decodes.

    p = softmax over visible j of (scale q . k_j), and of the head's sink where there is one (it takes its
        share of the probability and adds no value)
    y = sum_j p_j v_j

A query at position i sees keys j <= i, and only those with j > i - window where a window is given, or with
j // chunk == i // chunk where a chunk is.

Shapes: q [T, Hq, Dk], a view is fine; key_cache [blocks, block_tokens, Hkv, Dk], value_cache [.., Hkv, Dv],
Hq a multiple of Hkv; sinks [Hq]; out [T, Hq, Dv], contiguous. Scores, softmax and sum are float32; the result
rounds once. Caches have q's dtype, or are FP8 and come with `scales` (`kv_scales`): every dtype that computes
holds their elements exactly, and the scales multiply scores and sums. Rows beyond the last request's, which
pad the batch, get a copy of its last row. Each request is computed by itself, so its rows do not depend on
its neighbours; one row of a request without tokens is zeros.

On a GPU two kernels share the batch, `paged_decode` for requests with one query and `paged_prefill` for the
others; both read the metadata on the device. There rows that pad the batch are left alone, and a batch of as
many rows as requests has one query a request.
"""

import torch

from lorikeet_kernels.attention.attention_metadata import AttentionMetadata
from lorikeet_kernels.attention.kv_scales import KvScales, check_scales
from lorikeet_kernels.attention.paged_decode import paged_decode
from lorikeet_kernels.attention.paged_prefill import paged_prefill
from lorikeet_kernels.tiling.attention_tiles import select_decode, select_prefill, visible_keys

MAX_DIM = 512
"""The widest head that the GPU's kernels take."""


def paged_attention_reference(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    out: torch.Tensor,
    *,
    window: int | None = None,
    chunk: int | None = None,
    sinks: torch.Tensor | None = None,
    scales: KvScales | None = None,
) -> torch.Tensor:
    """See `paged_attention`."""
    starts = metadata.query_starts_host or metadata.query_starts.tolist()
    lengths = metadata.sequence_lens_host or metadata.sequence_lens.tolist()
    block_tokens = key_cache.shape[1]
    for index, length in enumerate(lengths):
        begin, end = starts[index], starts[index + 1]
        if length == 0:
            out[begin:end] = 0.0
            continue
        # Whole blocks before the first visible key are skipped, so a window or a chunk bounds the work.
        first = _first_visible(length - (end - begin), window, chunk) // block_tokens
        blocks = metadata.block_tables[index, first : -(-length // block_tokens)]
        visible = length - first * block_tokens
        keys = _rows(key_cache, blocks)[:visible].float()
        values = _rows(value_cache, blocks)[:visible].float()
        if scales is not None:
            keys, values = keys * scales.keys[:, None], values * scales.values[:, None]
        hidden = _hidden(end - begin, first * block_tokens, length, window, chunk, q.device)
        out[begin:end] = _attend(q[begin:end].float(), keys, values, scale, hidden, sinks)
    if starts[-1] < out.shape[0]:
        out[starts[-1] :] = out[starts[-1] - 1]
    return out


def _rows(cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """The rows of these blocks, [S, Hkv, D]; as bytes on their way, since torch selects no FP8."""
    as_bytes = cache if cache.itemsize > 1 else cache.view(torch.uint8)
    return as_bytes.index_select(0, blocks).view(cache.dtype).flatten(0, 1)


def _first_visible(position: int, window: int | None, chunk: int | None) -> int:
    by_window = 0 if window is None else max(0, position - window + 1)
    return by_window if chunk is None else max(by_window, position // chunk * chunk)


def _hidden(
    num_queries: int, first: int, length: int, window: int | None, chunk: int | None, device: torch.device
) -> torch.Tensor | None:
    """Which keys, from position `first` on, each query does not see, [N, S]; None: it sees all."""
    if num_queries == 1 and window is None and chunk is None:
        return None
    queries = torch.arange(length - num_queries, length, device=device)[:, None]
    keys = torch.arange(first, length, device=device)
    hidden = keys > queries
    if window is not None:
        hidden |= queries - keys >= window
    if chunk is not None:
        hidden |= keys // chunk != queries // chunk
    return hidden


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    hidden: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """One request: queries [N, Hq, Dk] over keys [S, Hkv, Dk] but those `hidden`; returns [N, Hq, Dv]."""
    n, num_heads, _ = q.shape
    s, num_kv_heads, _ = k.shape
    # Query head h reads key head h // (Hq / Hkv): rows of one bmm are its key head's queries, [Hkv, group *
    # N, Dk].
    q = (q * scale).transpose(0, 1).reshape(num_kv_heads, -1, q.shape[-1])
    scores = torch.bmm(q, k.permute(1, 2, 0)).view(num_heads, n, s)
    if hidden is not None:
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
    chunk: int | None = None,
    sinks: torch.Tensor | None = None,
    scales: KvScales | None = None,
) -> torch.Tensor:
    """Write the attention of `q` over the cache into `out` and return it."""
    if q.shape[1] % key_cache.shape[2] or q.shape[-1] != key_cache.shape[-1]:
        raise ValueError(
            f"paged_attention: queries {tuple(q.shape)} do not fit the key cache {tuple(key_cache.shape)}"
        )
    if out.shape != (*q.shape[:2], value_cache.shape[-1]):
        raise ValueError(f"paged_attention: out {tuple(out.shape)} does not fit queries {tuple(q.shape)}")
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise ValueError(f"paged_attention: sinks {tuple(sinks.shape)} do not fit queries {tuple(q.shape)}")
    if (window is not None and window < 1) or (chunk is not None and chunk < 1):
        raise ValueError(f"paged_attention: window {window} and chunk {chunk} must let a query see itself")
    check_scales("paged_attention", key_cache, value_cache, scales)
    if q.device.type == "cpu":
        return paged_attention_reference(
            q, key_cache, value_cache, metadata, scale, out,
            window=window, chunk=chunk, sinks=sinks, scales=scales,
        )  # fmt: skip
    _check_on_gpu(q, key_cache, value_cache, out)
    starts, lens, tables = metadata.query_starts, metadata.sequence_lens, metadata.block_tables
    num_rows, num_heads, dim = q.shape
    num_requests = lens.shape[0]
    _, block_tokens, kv_heads, _ = key_cache.shape
    longest = visible_keys(tables.shape[1] * block_tokens, window, chunk)
    decode = select_decode(num_requests, kv_heads, dim, longest, q.itemsize)
    paged_decode(
        q, key_cache, value_cache, starts, lens, tables, scale, out, decode,
        window=window, chunk=chunk, sinks=sinks, scales=scales,
    )  # fmt: skip
    if num_rows > num_requests:
        prefill = select_prefill(dim, num_heads // kv_heads, q.itemsize)
        paged_prefill(
            q, key_cache, value_cache, starts, lens, tables, scale, out, prefill,
            window=window, chunk=chunk, sinks=sinks, scales=scales, min_queries=2,
        )  # fmt: skip
    return out


def _check_on_gpu(
    q: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, out: torch.Tensor
) -> None:
    if q.stride(2) != 1 or q.stride(1) != q.shape[2] or not out.is_contiguous():
        raise ValueError(f"paged_attention: a row of q must be contiguous, its strides are {q.stride()}")
    if max(q.shape[2], out.shape[2]) > MAX_DIM:
        raise ValueError(f"paged_attention: heads of {q.shape[2]} elements are wider than {MAX_DIM}")
    for cache in (key_cache, value_cache):
        if cache.stride(3) != 1 or cache.stride(2) != cache.shape[3]:
            raise ValueError(f"paged_attention: a cache's row must be contiguous, strides {cache.stride()}")
