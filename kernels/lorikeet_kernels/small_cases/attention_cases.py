"""Small cases of the room `attention`: batches of decodes, chunks and whole prompts over shuffled blocks."""

from typing import Any

import torch

from lorikeet_kernels.attention.attention_inputs import attention_inputs_reference, prepare_heads
from lorikeet_kernels.attention.kv_scales import FP8, KvScales
from lorikeet_kernels.attention.latent_attention import NEVER_FRESH, latent_attention_reference
from lorikeet_kernels.attention.latent_decode import latent_decode
from lorikeet_kernels.attention.latent_inputs import latent_inputs_reference, prepare_latents
from lorikeet_kernels.attention.latent_prefill import latent_prefill
from lorikeet_kernels.attention.paged_attention import paged_attention_reference
from lorikeet_kernels.attention.paged_decode import paged_decode
from lorikeet_kernels.attention.paged_prefill import paged_prefill
from lorikeet_kernels.attention.prompt_attention import attend_prompts, prompt_attention_reference
from lorikeet_kernels.benchmarking.latent_problem import make_latent_problem
from lorikeet_kernels.benchmarking.paged_problem import make_paged_caches
from lorikeet_kernels.small_cases.small_case import SmallCase, SmallProblem, moved, poisoned
from lorikeet_kernels.tiling.attention_tiles import DecodeTiles, PrefillTiles
from lorikeet_kernels.tiling.latent_tiles import LatentDecodeTiles, LatentPrefillTiles

# A whole prompt, decodes at and beside a block's end, chunks, and a request without tokens that pads.
SHARES = ((0, 7), (41, 1), (5, 26), (0, 1), (15, 1), (60, 9), (0, 0), (147, 1), (0, 40))
_CHUNKS, _RING_CHUNKS = (
    LatentPrefillTiles(32, 16, 4, 2),
    LatentPrefillTiles(64, 64, 8, 2, num_key_stages=1),
)


def _paged(splits: int, *, is_fp8: bool, dtype: torch.dtype, **visible: Any) -> SmallProblem:
    """Both kernels share a batch; heads that are no power of two, sinks, queries in wider rows."""
    generator = torch.Generator().manual_seed(0)
    heads, kv_heads, dims = 6, 2, (24, 20)
    keys, values, metadata = make_paged_caches(
        SHARES, kv_heads=kv_heads, dims=dims, dtype=dtype, block_tokens=16, generator=generator
    )
    scales = None
    if is_fp8:
        keys, values = keys.to(FP8), values.to(FP8)
        scales = KvScales(*torch.rand(2, kv_heads, generator=generator) + 0.5)
    wide = torch.randn(int(metadata.query_starts[-1]), heads + 2, dims[0], generator=generator).to(dtype)
    sinks = torch.randn(heads, generator=generator).to(dtype)
    expected = torch.empty(wide.shape[0], heads, dims[1], dtype=dtype)
    paged_attention_reference(
        wide[:, :heads], keys, values, metadata, 0.25, expected, sinks=sinks, scales=scales, **visible
    )

    def launch(device: torch.device) -> tuple[torch.Tensor, ...]:
        rows, k, v, meta, sink, scale = moved((wide, keys, values, metadata, sinks, scales), device)
        out = poisoned(expected, device)
        where = (rows[:, :heads], k, v, meta.query_starts, meta.sequence_lens, meta.block_tables, 0.25, out)
        paged_decode(*where, DecodeTiles(16, splits, 4, 2), sinks=sink, scales=scale, **visible)
        paged_prefill(*where, PrefillTiles(32, 16, 4, 2), min_queries=2, sinks=sink, scales=scale, **visible)
        return (out,)

    return SmallProblem((expected,), launch)


def _attention_inputs(dtype: torch.dtype, *, is_fp8: bool) -> SmallProblem:
    """Norm, partial rotation, factors, a delta and the write, of fewer heads than a program takes."""
    generator = torch.Generator().manual_seed(1)
    q_heads, kv_heads, dim, tokens = 6, 2, 24, 5
    heads = torch.randn(tokens, q_heads + 2 * kv_heads, dim, generator=generator).to(dtype)
    settings: dict[str, Any] = {
        "norm_weight": torch.rand(q_heads + kv_heads, dim, generator=generator).to(dtype),
        "eps": 1e-5,
        "positions": torch.randint(0, 9, (tokens,), generator=generator),
        "table": torch.randn(9, 2, 8, generator=generator),
        "interleaved": is_fp8,
        "norms_rotated": is_fp8,
        "delta": torch.randn(heads.shape, generator=generator),
        "factors": torch.rand(9, generator=generator) + 0.5,
        "scales": KvScales(*torch.rand(2, kv_heads, generator=generator) + 0.1) if is_fp8 else None,
    }
    slots = torch.tensor([3, 0, 11, 7, 4])
    cache = torch.zeros(3, 4, kv_heads, dim).to(FP8 if is_fp8 else dtype)
    keys, values = cache.clone(), cache.clone()
    queries = attention_inputs_reference(heads.clone(), keys, values, slots, **settings)

    def launch(device: torch.device) -> tuple[torch.Tensor, ...]:
        rows, places, k, v = moved((heads, slots, cache, cache), device)
        given = {name: moved(value, device) for name, value in settings.items()}
        return prepare_heads(rows, k, v, places, **given), k.float(), v.float()

    # where 16 bits rounded otherwise, a value may fall to the neighbour of its FP8 one
    tolerance = 2e-2 if is_fp8 else 5e-3
    return SmallProblem((queries, keys.float(), values.float()), launch, tolerance)


def _latent(
    heads: int,
    decode: LatentDecodeTiles,
    dtype: torch.dtype,
    prefill: LatentPrefillTiles = _CHUNKS,
    sizes: tuple[int, int] = (24, 12),
) -> SmallProblem:
    """Both kernels share a batch; a latent that is no power of two, or as a ring takes it."""
    latent, rope = sizes
    problem = make_latent_problem(
        SHARES, heads=heads, latent_dim=latent, rope_dim=rope, block_tokens=8, dtype=dtype, seed=2
    )
    expected = torch.zeros_like(problem.empty_out())
    latent_attention_reference(problem.q, problem.cache, problem.metadata, problem.scale, expected)

    def launch(device: torch.device) -> tuple[torch.Tensor, ...]:
        q, cache, meta = moved((problem.q, problem.cache, problem.metadata), device)
        out = poisoned(expected, device)
        where = (q, cache, meta.query_starts, meta.sequence_lens, meta.block_tables, problem.scale, out)
        latent_decode(*where, decode)
        latent_prefill(*where, prefill, most_fresh=NEVER_FRESH)
        return (out,)

    return SmallProblem((expected,), launch)


def _latent_inputs(dtype: torch.dtype, *, has_delta: bool) -> SmallProblem:
    """More heads than a program takes, ragged sizes, parts of one projection; deltas of all or none."""
    generator = torch.Generator().manual_seed(3)
    tokens, heads, plain, latent, rope = 5, 20, 5, 24, 12
    dim = plain + rope
    down = torch.randn(tokens, heads * dim + latent + rope, generator=generator).to(dtype)
    delta = torch.randn(down.shape, generator=generator)
    table = torch.randn(30, 2, rope // 2, generator=generator)
    positions = torch.randint(0, 30, (tokens,), generator=generator)
    slots, weight = torch.tensor([31, 0, 7, 8, 20]), torch.rand(latent, generator=generator).to(dtype)
    absorbed = torch.zeros(tokens, heads, latent + rope, dtype=dtype)
    cache = torch.zeros(4, 8, 1, latent + rope, dtype=dtype)

    def run(op: Any, device: torch.device) -> tuple[torch.Tensor, ...]:
        rows, to, pages, *rest = moved((down, absorbed, cache, slots, positions, table, weight), device)
        query, latents, keys = rows.split((heads * dim, latent, rope), dim=1)
        places = (query.view(tokens, heads, dim), latents, keys, to, pages, *rest)
        added = moved(delta, device)
        deltas: dict[str, Any] = {
            "query_delta": added[:, : heads * dim].view(tokens, heads, dim),
            "delta": added[:, heads * dim :],
        }
        normed = op(*places, 1e-6, interleaved=True, **(deltas if has_delta else {}))
        return normed, query, keys, to, pages

    expected = run(latent_inputs_reference, torch.device("cpu"))
    return SmallProblem(expected, lambda device: run(prepare_latents, device))


def _prompt(dtype: torch.dtype) -> SmallProblem:
    """Whole prompts beside all else, which stays NaN; ragged sizes, several tiles."""
    generator = torch.Generator().manual_seed(4)
    heads, plain, value, rope = 3, 20, 17, 12
    metadata = make_latent_problem(SHARES, heads=1, latent_dim=16, rope_dim=8, dtype=dtype).metadata
    tokens = int(metadata.query_starts[-1])
    wide = torch.randn(tokens, heads * (plain + rope) + rope, generator=generator).to(dtype)
    up = torch.randn(tokens, heads, plain + value, generator=generator).to(dtype)
    empty = torch.full((tokens, heads, value), float("nan"), dtype=dtype)

    def parts(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rows[:, :-rope].view(tokens, heads, -1), rows[:, -rope:]

    q, shared = parts(wide)
    expected = prompt_attention_reference(q, up, shared, metadata, 0.2, empty.clone(), most_fresh=6)

    def launch(device: torch.device) -> tuple[torch.Tensor, ...]:
        rows, heads_up, meta, out = moved((wide, up, metadata, empty), device)
        query, keys = parts(rows)
        tiles = LatentPrefillTiles(32, 16, 4, 2)
        attend_prompts(query, heads_up, keys, meta, 0.2, out, tiles, most_fresh=6)
        return (out,)

    return SmallProblem((expected,), launch)


_PAGED = (
    "attention.paged_decode._decode_kernel",
    "attention.paged_decode._merge_kernel",
    "attention.paged_prefill._prefill_kernel",
)
_LATENT = ("attention.latent_decode._decode_kernel", "attention.latent_prefill._prefill_kernel")
_RING = tuple(f"attention.latent_ring_kernels._ring_{name}_kernel" for name in ("decode", "prefill"))
_LATENT_INPUTS = ("attention.latent_inputs._latent_inputs_kernel",)
_INPUTS = ("attention.attention_inputs._attention_inputs_kernel",)

CASES = (
    SmallCase("paged_attention", _PAGED, lambda dtype: _paged(3, is_fp8=False, dtype=dtype)),
    SmallCase("paged_window", _PAGED, lambda dtype: _paged(3, is_fp8=False, dtype=dtype, window=13)),
    SmallCase("paged_chunk_fp8", _PAGED[::2], lambda dtype: _paged(1, is_fp8=True, dtype=dtype, chunk=24)),
    SmallCase("attention_inputs", _INPUTS, lambda dtype: _attention_inputs(dtype, is_fp8=False)),
    SmallCase(
        "attention_inputs_fp8", _INPUTS, lambda dtype: _attention_inputs(dtype, is_fp8=True), needs_gpu=True
    ),
    SmallCase(
        "latent_attention",
        (*_LATENT, "attention.latent_decode._merge_kernel"),
        lambda dtype: _latent(20, LatentDecodeTiles(16, 16, 3, 4, 3), dtype),
    ),
    SmallCase("latent_whole", _LATENT, lambda dtype: _latent(4, LatentDecodeTiles(16, 16, 1, 4, 3), dtype)),
    SmallCase(
        "latent_ring",
        (*_RING, "attention.latent_decode._merge_kernel"),
        lambda dtype: _latent(20, LatentDecodeTiles(16, 64, 3, 4, 2, 1), dtype, _RING_CHUNKS, (128, 64)),
        needs_gpu=True,
    ),
    SmallCase("latent_inputs", _LATENT_INPUTS, lambda dtype: _latent_inputs(dtype, has_delta=False)),
    SmallCase("latent_inputs_delta", _LATENT_INPUTS, lambda dtype: _latent_inputs(dtype, has_delta=True)),
    SmallCase("prompt_attention", ("attention.prompt_attention._prompt_kernel",), _prompt),
)
