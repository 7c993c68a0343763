"""Cases of paged attention for the Triton interpreter, run by test_paged_interpreted.py, a process each.

TRITON_INTERPRET is read when a kernel is defined, so it must be set before the first import. float32 and
float16 only: the interpreter multiplies bfloat16 as bit patterns.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from triton.runtime import interpreter

from lorikeet_kernels.attention.attention_inputs import attention_inputs_reference, prepare_heads
from lorikeet_kernels.attention.kv_scales import FP8, FP8_MAX, KvScales
from lorikeet_kernels.attention.paged_attention import paged_attention_reference
from lorikeet_kernels.attention.paged_decode import paged_decode
from lorikeet_kernels.attention.paged_prefill import paged_prefill
from lorikeet_kernels.benchmarking.paged_problem import make_paged_caches
from lorikeet_kernels.testing import TOLERANCE, relative_error
from lorikeet_kernels.tiling.attention_tiles import DecodeTiles, PrefillTiles

_patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor_for_numpy(tensor: Any, scope: Any) -> None:
    """Triton 3.6 turns arrays of one element into loop bounds by int(), which NumPy 2.4 refuses."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_tensor_for_numpy


def check_attention_inputs() -> None:
    """Norm before and after rotation, pairs of both kinds, whole, partial and no rotation, factors, FP8."""
    q_heads, kv_heads, tokens = 6, 2, 5
    cases = ((16, 8, True), (24, 12, False), (24, 8, True), (16, 0, False), (20, 10, True))
    for number, (dim, half, norm) in enumerate(cases * 4):
        dtype = torch.float32 if number % 2 else torch.float16
        has_factors, is_fp8 = number % 3 == 1, number >= 2 * len(cases)
        heads = torch.randn(tokens, q_heads + 2 * kv_heads, dim).to(dtype)
        settings = {
            "norm_weight": torch.rand(q_heads + kv_heads, dim).to(dtype) if norm else None,
            "eps": 1e-5,
            "positions": torch.randint(0, 9, (tokens,)) if half or has_factors else None,
            "table": torch.randn(9, 2, half) if half else None,
            "interleaved": number // len(cases) % 2 == 1,
            "norms_rotated": number // len(cases) % 2 == 1,
            "delta": torch.randn(heads.shape) if number % 4 > 1 else None,
            "factors": torch.rand(9) + 0.5 if has_factors else None,
            "scales": KvScales(torch.rand(kv_heads) + 0.1, torch.rand(kv_heads) * 0.002 + 0.001)
            if is_fp8
            else None,
        }
        slots = torch.tensor([3, 0, 11, 7, 4])
        caches = [torch.zeros(3, 4, kv_heads, dim).to(FP8 if is_fp8 else dtype) for _ in range(4)]
        mine = heads.clone()
        got = prepare_heads(mine, caches[0], caches[1], slots, **settings)
        expected = attention_inputs_reference(heads.clone(), caches[2], caches[3], slots, **settings)
        assert relative_error(got, expected) < TOLERANCE[dtype]
        for a, b in ((caches[0], caches[2]), (caches[1], caches[3])):
            if is_fp8:
                check_fp8(a.float(), b.float())
                assert bool((b.float().abs() == FP8_MAX).any()) == (b is caches[3])
            else:
                assert relative_error(a, b) < TOLERANCE[dtype]
        assert torch.equal(mine[:, q_heads:], heads[:, q_heads:])


def check_fp8(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Mostly equal, else neighbours.

    The interpreter cuts subnormal numbers off, and loses the carry where a mantissa rounds up to a power of
    two: half of it is left.
    """
    step = (expected.abs() / 8).clamp(min=2**-9)
    assert bool((((got - expected).abs() <= step) | (got * 2 == expected)).all())
    assert int((got != expected).sum()) < got.numel() / 5


BLOCK = 4


def check_paged_attention() -> None:
    """A mixed batch by both kernels together: windows, chunks, sinks, groups, head sizes, idle splits."""
    shares = [(0, 7), (41, 1), (5, 26), (0, 1), (7, 1), (60, 9), (33, 1), (47, 1), (48, 1)]
    cases = (
        (6, 2, (24, 24), {}, False),
        (3, 1, (24, 24), {}, True),
        (6, 2, (24, 24), {"window": 13}, True),
        (4, 4, (16, 16), {"window": 1}, False),
        (8, 1, (32, 20), {"window": 13}, False),
        (8, 1, (32, 20), {}, True),
        (6, 2, (20, 20), {"chunk": 16}, False),
        (5, 1, (16, 16), {"chunk": 11}, True),
        (4, 4, (24, 16), {"chunk": 1}, False),
        (6, 2, (16, 16), {"chunk": 24, "window": 9}, False),
    )
    generator = torch.Generator().manual_seed(0)
    for heads, kv_heads, dims, visible, with_sinks in cases:
        dtype = torch.float16 if heads == 4 else torch.float32
        keys, values, metadata = make_paged_caches(
            shares, kv_heads=kv_heads, dims=dims, dtype=dtype, block_tokens=BLOCK, generator=generator
        )
        wide = torch.randn(metadata.query_starts_host[-1], heads + 2, dims[0]).to(dtype)
        q = wide[:, :heads]
        sinks = torch.randn(heads) if with_sinks else None
        expected = torch.empty(*q.shape[:2], dims[1], dtype=dtype)
        if kv_heads == 2:
            visible["scales"] = KvScales(torch.rand(kv_heads) + 0.5, torch.rand(kv_heads) * 3)
            keys, values = keys.to(FP8), values.to(FP8)
        paged_attention_reference(q, keys, values, metadata, 0.25, expected, sinks=sinks, **visible)
        out = torch.full_like(expected, float("nan"))
        where = (metadata.query_starts, metadata.sequence_lens, metadata.block_tables, 0.25, out)
        decode = DecodeTiles(16, 1 if heads == 4 else 3, 4, 1)
        paged_decode(q, keys, values, *where, decode, sinks=sinks, **visible)
        paged_prefill(
            q, keys, values, *where, PrefillTiles(32, 16, 4, 1), min_queries=2, sinks=sinks, **visible
        )
        assert relative_error(out, expected) < 2 * TOLERANCE[dtype]


def check_vanishing_sinks() -> None:
    """Sinks that count for nothing, -inf or so once scaled, and keys whose scale is 0: by both kernels."""
    shares = [(0, 30), (41, 1), (25, 26), (60, 1)]
    generator = torch.Generator().manual_seed(0)
    keys, values, metadata = make_paged_caches(
        shares, kv_heads=2, dims=(16, 16), dtype=torch.float32, block_tokens=BLOCK, generator=generator
    )
    q = torch.randn(metadata.query_starts_host[-1], 4, 16)
    where = (metadata.query_starts, metadata.sequence_lens, metadata.block_tables, 0.25)
    for number, sink in enumerate((float("-inf"), -3.0e38, -2.0e30, 0.5)):
        sinks = torch.tensor([sink, 0.1, -0.3, sink])
        for visible in ({}, {"window": 5}, {"chunk": 12}):
            scales = KvScales(torch.tensor([0.0, 1.0]), torch.ones(2)) if number % 3 == 0 else None
            expected = torch.empty_like(q)
            settings = {"sinks": sinks, "scales": scales, **visible}
            paged_attention_reference(q, keys, values, metadata, 0.25, expected, **settings)
            for splits in (1, 3):
                out = torch.full_like(q, float("nan"))
                paged_decode(q, keys, values, *where, out, DecodeTiles(16, splits, 4, 1), **settings)
                paged_prefill(
                    q, keys, values, *where, out, PrefillTiles(32, 16, 4, 1), min_queries=2, **settings
                )
                assert relative_error(out, expected) < 2 * TOLERANCE[torch.float32]


CASES: dict[str, Callable[[], None]] = {
    "attention_inputs": check_attention_inputs,
    "paged_attention": check_paged_attention,
    "vanishing_sinks": check_vanishing_sinks,
}


if __name__ == "__main__":
    CASES[sys.argv[1]]()
