"""Paged attention and what lies before it on a GPU, against float64 and the references."""

from dataclasses import replace

import pytest
import torch

from lorikeet_kernels.attention.attention_inputs import attention_inputs, attention_inputs_reference
from lorikeet_kernels.attention.attention_metadata import AttentionMetadata
from lorikeet_kernels.attention.kv_scales import FP8, KvScales
from lorikeet_kernels.attention.paged_attention import paged_attention
from lorikeet_kernels.attention.paged_decode import LOG2E
from lorikeet_kernels.benchmarking.paged_problem import make_paged_caches
from lorikeet_kernels.dense.gated_activation import (
    GatedActivation,
    gated_activation,
    gated_activation_reference,
)
from lorikeet_kernels.dense.rms_norm import rms_norm, rms_norm_reference
from lorikeet_kernels.small_cases.small_case import moved
from lorikeet_kernels.testing import relative_error

GPU = torch.device("cuda")
BF16 = torch.bfloat16
TOLERANCE = 5e-3
MIXED = ((0, 300), (700, 1), (5, 26), (0, 1), (64, 1), (1000, 77), (511, 1), (2047, 1))
DECODES = tuple((length, 1) for length in (0, 1, 15, 16, 17, 63, 64, 500, 3000))


def paged_case(
    shares: tuple[tuple[int, int], ...], kv_heads: int, dim: int, block: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata]:
    """Caches whose unused places are NaN, blocks shuffled; the metadata has no host copies."""
    keys, values, metadata = make_paged_caches(
        shares, kv_heads=kv_heads, dims=(dim, dim), dtype=dtype, block_tokens=block,
        generator=torch.Generator().manual_seed(dim),
    )  # fmt: skip
    on_device = replace(metadata, query_starts_host=(), sequence_lens_host=())
    return moved((keys, values, on_device), GPU)


def exact(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    metadata: AttentionMetadata,
    window: int | None,
    sinks: torch.Tensor | None,
    chunk: int | None = None,
) -> torch.Tensor:
    """Float64, a request at a time."""
    starts, lengths = metadata.query_starts.tolist(), metadata.sequence_lens.tolist()
    parts: list[torch.Tensor] = []
    for b, length in enumerate(lengths):
        queries = q[starts[b] : starts[b + 1]].double()
        table = metadata.block_tables[b].long()
        k, v = (cache[table].flatten(0, 1)[:length].double() for cache in (keys, values))
        group = queries.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        score = torch.einsum("nhd,shd->hns", queries, k) * q.shape[-1] ** -0.5
        position = torch.arange(length - queries.shape[0], length, device=GPU)[:, None]
        key = torch.arange(length, device=GPU)
        hidden = key > position
        if window is not None:
            hidden |= key <= position - window
        if chunk is not None:
            hidden |= key < position // chunk * chunk
        score.masked_fill_(hidden, float("-inf"))
        if sinks is not None:
            sink = sinks.double().view(-1, 1, 1).expand(-1, queries.shape[0], 1)
            score = torch.cat((score, sink), dim=-1)
        parts.append(torch.einsum("hns,shd->nhd", score.softmax(-1)[..., :length], v))
    return torch.cat(parts)


@pytest.mark.parametrize("shares", [MIXED, DECODES])
@pytest.mark.parametrize(
    ("dim", "heads", "kv_heads", "block", "window", "with_sinks"),
    [
        (64, 64, 8, 16, None, True),
        (64, 64, 8, 16, 128, True),
        (128, 32, 4, 16, None, False),
        (96, 12, 4, 64, 7, True),
        (256, 8, 1, 16, None, False),
        (128, 8, 8, 16, 7, False),
    ],
)
def test_paged_attention(
    shares: tuple[tuple[int, int], ...],
    dim: int,
    heads: int,
    kv_heads: int,
    block: int,
    window: int | None,
    with_sinks: bool,
) -> None:
    """A mixed batch and one of decodes, queries a view of the fused projection, twice: bits repeat."""
    keys, values, metadata = paged_case(shares, kv_heads, dim, block, BF16)
    rows = int(metadata.query_starts[-1])
    q = torch.randn(rows, heads + 2 * kv_heads, dim, device=GPU).to(BF16)[:, :heads]
    sinks = torch.randn(heads, device=GPU).to(BF16) if with_sinks else None
    expected = exact(q, keys, values, metadata, window, sinks)
    outs = [torch.full(expected.shape, float("nan"), dtype=BF16, device=GPU) for _ in range(2)]
    for out in outs:
        paged_attention(q, keys, values, metadata, dim**-0.5, out, window=window, sinks=sinks)
    assert relative_error(outs[0], expected) < TOLERANCE
    assert torch.equal(outs[0], outs[1])


@pytest.mark.parametrize("shares", [MIXED, DECODES])
@pytest.mark.parametrize(
    ("dim", "heads", "kv_heads", "chunk"), [(128, 40, 8, 512), (128, 10, 2, 100), (16, 4, 2, 32)]
)
def test_chunks(shares: tuple[tuple[int, int], ...], dim: int, heads: int, kv_heads: int, chunk: int) -> None:
    """Llama 4's kind: queries on both sides of a chunk's border in one tile, chunks that fill no tile."""
    keys, values, metadata = paged_case(shares, kv_heads, dim, 16, BF16)
    q = torch.randn(int(metadata.query_starts[-1]), heads, dim, device=GPU).to(BF16)
    out = torch.full_like(q, float("nan"))
    paged_attention(q, keys, values, metadata, dim**-0.5, out, chunk=chunk)
    assert relative_error(out, exact(q, keys, values, metadata, None, None, chunk)) < TOLERANCE


@pytest.mark.parametrize(("window", "chunk"), [(70, None), (None, 32), (40, 100)])
def test_tiles_that_a_row_does_not_see(window: int | None, chunk: int | None) -> None:
    """Rows that see nothing of a tile of keys add nothing of it, whatever the scale.

    A finite number in the place of minus infinity, times a scale, is rounded, up or down as the scale has
    it: with what is left a fused multiply-add makes infinite weights, or none.
    """
    keys, values, metadata = paged_case(MIXED, 2, 64, 16, BF16)
    q = torch.randn(int(metadata.query_starts[-1]), 4, 64, device=GPU).to(BF16)
    scales = [0.05 + 0.01 * step for step in range(16)]
    hidden = torch.tensor(-1e30).double()
    products = torch.tensor([scale * LOG2E.value for scale in scales]).double() * hidden
    residues = products - products.float().double()
    assert (residues > 0).any()
    assert (residues < 0).any()
    for scale in scales:
        out = torch.full_like(q, float("nan"))
        paged_attention(q, keys, values, metadata, scale, out, window=window, chunk=chunk)
        expected = exact(q.double() * (scale * 8), keys, values, metadata, window, None, chunk)
        assert relative_error(out, expected) < TOLERANCE, scale


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("dim", [16, 20, 24, 192, 320, 512])
def test_every_width(dim: int, dtype: torch.dtype) -> None:
    """Heads that are padded inside the kernel, and the widest it takes."""
    keys, values, metadata = paged_case(MIXED, 2, dim, 16, dtype)
    q = torch.randn(int(metadata.query_starts[-1]), 6, dim, device=GPU).to(dtype)
    out = torch.full_like(q, float("nan"))
    paged_attention(q, keys, values, metadata, dim**-0.5, out)
    expected = exact(q, keys, values, metadata, None, None)
    assert relative_error(out, expected) < (1e-5 if dtype == torch.float32 else TOLERANCE)


@pytest.mark.parametrize("shares", [MIXED, DECODES])
@pytest.mark.parametrize(("dim", "heads", "kv_heads", "window"), [(64, 64, 8, 128), (128, 16, 2, None)])
def test_fp8_caches(
    shares: tuple[tuple[int, int], ...], dim: int, heads: int, kv_heads: int, window: int | None
) -> None:
    """Elements of e4m3 times a scale a head, against the same numbers in float64."""
    keys, values, metadata = paged_case(shares, kv_heads, dim, 16, BF16)
    scales = KvScales(torch.rand(kv_heads, device=GPU) + 0.5, torch.rand(kv_heads, device=GPU) + 0.5)
    keys, values = keys.to(FP8), values.to(FP8)
    q = torch.randn(int(metadata.query_starts[-1]), heads, dim, device=GPU).to(BF16)
    out = torch.full_like(q, float("nan"))
    paged_attention(q, keys, values, metadata, dim**-0.5, out, window=window, scales=scales)
    wide = (cache.double() * of[:, None] for cache, of in ((keys, scales.keys), (values, scales.values)))
    expected = exact(q, *wide, metadata, window, None)
    assert relative_error(out, expected) < TOLERANCE


@pytest.mark.parametrize("num_tokens", [1, 300])
@pytest.mark.parametrize(
    ("interleaved", "norms_rotated", "is_fp8"),
    [(False, False, True), (True, True, False), (True, True, True)],
)
def test_every_step_before_attention(
    interleaved: bool, norms_rotated: bool, is_fp8: bool, num_tokens: int
) -> None:
    """Pairs of neighbours, norm after the rotation, factors of positions, and writes into an FP8 cache."""
    q_heads, kv_heads, dim = 12, 2, 128
    heads = torch.randn(num_tokens, q_heads + 2 * kv_heads, dim, device=GPU).to(BF16)
    settings = {
        "norm_weight": torch.rand(q_heads + kv_heads, dim, device=GPU).to(BF16),
        "eps": 1e-6,
        "positions": torch.randint(0, 999, (num_tokens,), device=GPU),
        "table": torch.randn(999, 2, dim // 2, device=GPU),
        "interleaved": interleaved,
        "norms_rotated": norms_rotated,
        "factors": torch.rand(999, device=GPU) + 0.5,
        "scales": KvScales(*torch.rand(2, kv_heads, device=GPU) + 0.01) if is_fp8 else None,
    }
    slots = torch.randperm(320, device=GPU)[:num_tokens]
    caches = [torch.zeros(20, 16, kv_heads, dim, device=GPU).to(FP8 if is_fp8 else BF16) for _ in range(4)]
    got = attention_inputs(heads.clone(), caches[0], caches[1], slots, **settings)
    want = attention_inputs_reference(heads.clone(), caches[2], caches[3], slots, **settings)
    assert relative_error(got, want) < 2e-3
    for a, b in ((caches[0], caches[2]), (caches[1], caches[3])):
        # Where bfloat16 rounded otherwise, or a division, a value may fall to the neighbour of its FP8 one.
        assert relative_error(a.float(), b.float()) < (2e-2 if is_fp8 else 2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    """float32 computes in float32, not in tf32."""
    keys, values, metadata = paged_case(MIXED, 4, 64, 16, dtype)
    q = torch.randn(int(metadata.query_starts[-1]), 8, 64, device=GPU).to(dtype)
    out = torch.full_like(q, float("nan"))
    paged_attention(q, keys, values, metadata, 0.125, out)
    expected = exact(q, keys, values, metadata, None, None)
    assert relative_error(out, expected) < (1e-5 if dtype == torch.float32 else 1e-3)


def test_capture_follows_longer_sequences() -> None:
    """A graph captured over short sequences serves longer ones of the same table width."""
    keys, values, metadata = paged_case(DECODES, 8, 64, 16, BF16)
    q = torch.randn(len(DECODES), 64, 64, device=GPU).to(BF16)
    out = torch.empty_like(q)
    real = metadata.sequence_lens.clone()
    paged_attention(q, keys, values, metadata, 0.125, out)
    metadata.sequence_lens.fill_(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_attention(q, keys, values, metadata, 0.125, out)
    metadata.sequence_lens.copy_(real)
    graph.replay()
    assert relative_error(out, exact(q, keys, values, metadata, None, None)) < TOLERANCE


@pytest.mark.parametrize("num_tokens", [1, 7, 300])
@pytest.mark.parametrize(("dim", "half", "norm"), [(64, 32, False), (128, 64, True), (96, 24, True)])
def test_attention_inputs(dim: int, half: int, norm: bool, num_tokens: int) -> None:
    """Head norm, rotation and the cache write, whole and partial rotation."""
    q_heads, kv_heads = 12, 2
    heads = torch.randn(num_tokens, q_heads + 2 * kv_heads, dim, device=GPU).to(BF16)
    weight = torch.rand(q_heads + kv_heads, dim, device=GPU).to(BF16) if norm else None
    table = torch.randn(999, 2, half, device=GPU)
    positions = torch.randint(0, 999, (num_tokens,), device=GPU)
    slots = torch.randperm(320, device=GPU)[:num_tokens]
    caches = [torch.zeros(20, 16, kv_heads, dim, dtype=BF16, device=GPU) for _ in range(4)]
    settings = {"norm_weight": weight, "eps": 1e-6, "positions": positions, "table": table}
    got = attention_inputs(heads.clone(), caches[0], caches[1], slots, **settings)  # pyright: ignore[reportArgumentType]
    want = attention_inputs_reference(heads.clone(), caches[2], caches[3], slots, **settings)  # pyright: ignore[reportArgumentType]
    for a, b in ((got, want), (caches[0], caches[2]), (caches[1], caches[3])):
        assert relative_error(a, b) < 2e-3


@pytest.mark.parametrize("width", [45, 2880, 5120])
def test_row_ops(width: int) -> None:
    """Norms with and without residual, activation in both orders."""
    x, residual = torch.randn(2, 33, width, device=GPU).to(BF16)
    weight = torch.rand(width, device=GPU).to(BF16)
    assert relative_error(rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5)) < 2e-3
    kept = residual.clone()
    assert (
        relative_error(rms_norm(x, weight, 1e-5, residual), rms_norm_reference(x, weight, 1e-5, kept)) < 2e-3
    )
    assert torch.equal(residual, kept)
    gate_up = torch.randn(33, 2 * width, device=GPU).to(BF16)
    for row_order in ("interleaved", "concatenated"):
        for activation in (GatedActivation(), GatedActivation(1.702, 1.0, 1.0)):
            expected = gated_activation_reference(gate_up, activation, row_order=row_order)
            assert relative_error(gated_activation(gate_up, activation, row_order=row_order), expected) < 2e-3
