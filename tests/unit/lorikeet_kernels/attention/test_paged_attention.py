"""Paged cache writes and attention over mixed batches."""

import math

import pytest
import torch

from lorikeet_kernels.attention.attention_metadata import AttentionMetadata
from lorikeet_kernels.attention.kv_write import kv_write
from lorikeet_kernels.attention.paged_attention import paged_attention

BLOCK = 4


def make_case(
    shares: list[tuple[int, int]], num_heads: int, num_kv_heads: int, dim: int, padding: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionMetadata, list[list[int]]]:
    """Queries, caches full of junk with the sequences in shuffled blocks, metadata, and the block tables.

    `shares` are (computed, scheduled) tokens of each request.
    """
    tables: list[list[int]] = []
    num_blocks = sum(-(-sum(share) // BLOCK) for share in shares) + 3
    free = torch.randperm(num_blocks).tolist()
    for computed, scheduled in shares:
        tables.append([free.pop() for _ in range(-(-(computed + scheduled) // BLOCK))])
    keys = torch.full((num_blocks, BLOCK, num_kv_heads, dim), float("nan"))
    values = keys.clone()
    for table, (computed, scheduled) in zip(tables, shares, strict=True):
        for position in range(computed + scheduled):
            where = table[position // BLOCK], position % BLOCK
            keys[where], values[where] = torch.randn(2, num_kv_heads, dim)
    starts = [0]
    for _, scheduled in shares:
        starts.append(starts[-1] + scheduled)
    lengths = [sum(share) for share in shares]
    width = max(len(table) for table in tables)
    metadata = AttentionMetadata(
        query_starts=torch.tensor(starts, dtype=torch.int32),
        sequence_lens=torch.tensor(lengths, dtype=torch.int32),
        block_tables=torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32),
        slot_mapping=torch.zeros(0, dtype=torch.int64),
        query_starts_host=tuple(starts),
        sequence_lens_host=tuple(lengths),
    )
    q = torch.randn(starts[-1] + padding, num_heads, dim)
    return q, keys, values, metadata, tables


def naive(
    q: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    position: int,
    window: int | None,
    sink: float | None,
) -> torch.Tensor:
    """One head of one query over keys 0..position."""
    first = 0 if window is None else max(0, position - window + 1)
    scores = [float(q.double() @ k.double()) * 0.25 for k in keys[first : position + 1]]
    total = sum(math.exp(s) for s in scores) + (0.0 if sink is None else math.exp(sink))
    weights = [math.exp(s) / total for s in scores]
    return sum(
        (w * v.double() for w, v in zip(weights, values[first : position + 1], strict=True)),
        start=torch.zeros(values[0].shape[-1], dtype=torch.float64),
    )


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_mixed_batch(num_heads: int, num_kv_heads: int, with_sinks: bool, window: int | None) -> None:
    """First chunk, later chunk, decodes at block borders and one token, against a loop over every key."""
    shares = [(0, 7), (13, 1), (5, 6), (0, 1), (7, 1), (8, 1)]
    q, keys, values, metadata, tables = make_case(shares, num_heads, num_kv_heads, 8)
    sinks = torch.randn(num_heads) if with_sinks else None
    out = torch.full_like(q, float("nan"))
    paged_attention(q, keys, values, metadata, 0.25, out, window=window, sinks=sinks)
    row = 0
    for table, (computed, scheduled) in zip(tables, shares, strict=True):
        cells = [(table[p // BLOCK], p % BLOCK) for p in range(computed + scheduled)]
        for position in range(computed, computed + scheduled):
            for head in range(num_heads):
                group = head // (num_heads // num_kv_heads)
                expected = naive(
                    q[row, head],
                    [keys[cell][group] for cell in cells],
                    [values[cell][group] for cell in cells],
                    position,
                    window,
                    None if sinks is None else float(sinks[head]),
                )
                assert torch.allclose(out[row, head].double(), expected, atol=1e-5)
            row += 1


def test_padding_rows_repeat_the_last() -> None:
    """Rows beyond the last request's are defined."""
    q, keys, values, metadata, _ = make_case([(2, 1), (3, 2)], 2, 1, 8, padding=3)
    out = torch.full_like(q, float("nan"))
    paged_attention(q, keys, values, metadata, 0.25, out)
    assert torch.equal(out[3:], out[2].expand(3, -1, -1))


def test_neighbours_change_no_bit() -> None:
    """A request alone and in a batch."""
    q, keys, values, metadata, _ = make_case([(0, 5), (9, 1), (30, 1)], 4, 2, 16)
    out = torch.empty_like(q)
    paged_attention(q, keys, values, metadata, 0.25, out)
    alone = AttentionMetadata(
        metadata.query_starts,
        metadata.sequence_lens,
        metadata.block_tables[1:2],
        metadata.slot_mapping,
        (0, 1),
        (10,),
    )
    single = torch.empty_like(q[5:6])
    paged_attention(q[5:6], keys, values, alone, 0.25, single)
    assert torch.equal(single, out[5:6])


def test_value_heads_may_be_narrower() -> None:
    """Keys and values of different width, as in multi-head latent attention."""
    q, keys, values, metadata, _ = make_case([(2, 3)], 2, 2, 12)
    full, narrow = torch.empty_like(q), torch.empty(3, 2, 5)
    paged_attention(q, keys, values, metadata, 0.25, full)
    paged_attention(q, keys, values[..., :5].contiguous(), metadata, 0.25, narrow)
    assert torch.allclose(narrow, full[..., :5], atol=1e-6)


def test_kv_write_hits_its_slots_only() -> None:
    """Rows go to block and offset of their slot; all else keeps its bits."""
    keys, values = torch.zeros(5, BLOCK, 2, 3), torch.zeros(5, BLOCK, 2, 4)
    fused = torch.randn(3, 6, 4)
    slots = torch.tensor([9, 0, 19])
    kv_write(fused[:, :2, :3], fused[:, 2:4], keys, values, slots)
    for row, slot in enumerate(slots.tolist()):
        assert torch.equal(keys[slot // BLOCK, slot % BLOCK], fused[row, :2, :3])
        assert torch.equal(values[slot // BLOCK, slot % BLOCK], fused[row, 2:4])
    assert int((keys.abs().sum(dim=(2, 3)) > 0).sum()) == 3
    assert int((values.abs().sum(dim=(2, 3)) > 0).sum()) == 3


def test_misfits_are_refused() -> None:
    """Shapes are named."""
    q, keys, values, metadata, _ = make_case([(0, 1)], 4, 2, 8)
    with pytest.raises(ValueError, match="do not fit the key cache"):
        paged_attention(q[:, :3], keys, values, metadata, 1.0, torch.empty(1, 3, 8))
    with pytest.raises(ValueError, match="does not fit queries"):
        paged_attention(q, keys, values, metadata, 1.0, torch.empty(1, 4, 7))
    with pytest.raises(ValueError, match=r"sinks \(3,\) do not fit queries"):
        paged_attention(q, keys, values, metadata, 1.0, torch.empty(1, 4, 8), sinks=torch.zeros(3))
    with pytest.raises(ValueError, match="window None and chunk 0 must let a query see itself"):
        paged_attention(q, keys, values, metadata, 1.0, torch.empty(1, 4, 8), chunk=0)
    with pytest.raises(ValueError, match="do not fit caches"):
        kv_write(q, q, keys, values, torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize("chunk", [1, 3, 4, 7])
def test_chunks_hide_what_lies_before_them(chunk: int) -> None:
    """A query sees its own chunk only: as if the request had begun there, at any block border."""
    shares = [(0, 7), (13, 1), (5, 6), (8, 1)]
    q, keys, values, metadata, tables = make_case(shares, 4, 2, 8)
    out = torch.full_like(q, float("nan"))
    paged_attention(q, keys, values, metadata, 0.25, out, chunk=chunk)
    row = 0
    for table, (computed, scheduled) in zip(tables, shares, strict=True):
        for position in range(computed, computed + scheduled):
            first = position - position % chunk
            cells = [(table[p // BLOCK], p % BLOCK) for p in range(first, position + 1)]
            for head in range(4):
                own_keys, own_values = (
                    [cache[cell][head // 2] for cell in cells] for cache in (keys, values)
                )
                expected = naive(q[row, head], own_keys, own_values, position - first, None, None)
                assert torch.allclose(out[row, head].double(), expected, atol=1e-5)
            row += 1


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_a_request_without_tokens_gives_zeros(window: int | None, has_sinks: bool) -> None:
    """It pads a batch of decodes; the others do not notice, and no host copy of the metadata is needed."""
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(4, 4, 2, 8, generator=generator) for _ in range(2))
    q = torch.randn(3, 4, 8, generator=generator)
    sinks = torch.randn(4, generator=generator) if has_sinks else None

    def attend(lengths: list[int]) -> torch.Tensor:
        count = len(lengths)
        metadata = AttentionMetadata(
            torch.arange(count + 1, dtype=torch.int32),
            torch.tensor(lengths, dtype=torch.int32),
            torch.tensor([[2, 0], [1, 3], [0, 0]][:count], dtype=torch.int32),
            torch.zeros(0, dtype=torch.int64),
        )
        out = torch.full((count, 4, 8), float("nan"))
        return paged_attention(q[:count], keys, values, metadata, 0.3, out, window=window, sinks=sinks)

    padded = attend([5, 8, 0])
    assert torch.equal(padded[:2], attend([5, 8]))
    assert not padded[2].any()
