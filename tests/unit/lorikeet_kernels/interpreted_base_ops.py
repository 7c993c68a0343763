"""Cases of the base ops for the Triton interpreter, run by test_base_ops_interpreted.py, a process for each.

TRITON_INTERPRET is read when a kernel is defined, so it must be set before the first import. float32 and
float16 only: the interpreter multiplies bfloat16 as bit patterns.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from triton.runtime import interpreter

from lorikeet_kernels.dense.gated_activation import GatedActivation, activate_rows, gated_activation_reference
from lorikeet_kernels.dense.rms_norm import norm_rows, rms_norm_reference
from lorikeet_kernels.experts.expert_blocks import cut_blocks, expert_blocks_reference, lone_blocks
from lorikeet_kernels.experts.expert_gemm import expert_gemm
from lorikeet_kernels.experts.expert_linear import expert_linear_reference
from lorikeet_kernels.experts.moe_sum import (
    SharedRows,
    moe_sum_parts_reference,
    moe_sum_reference,
    sum_pairs,
    sum_parts,
)
from lorikeet_kernels.lora.lora_segments import make_lora_segments
from lorikeet_kernels.lora.moe_groups import make_moe_groups
from lorikeet_kernels.sampling.penalties import Penalties, penalize_reference, penalize_rows
from lorikeet_kernels.sampling.pending_tokens import pending_tokens_reference, read_pending
from lorikeet_kernels.sampling.sample_rows import sample_rows
from lorikeet_kernels.sampling.sampling import SamplingBatch, sample_reference
from lorikeet_kernels.sampling.token_bitmask import (
    num_mask_words,
    token_bitmask_reference,
    token_bitmask_rows,
)
from lorikeet_kernels.sampling.top_k_bounds import top_k_bounds, top_k_bounds_reference
from lorikeet_kernels.testing import TOLERANCE, relative_error
from lorikeet_kernels.tiling.expert_tiles import ExpertTiles

_patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor_for_numpy(tensor: Any, scope: Any) -> None:
    """Triton 3.6 turns arrays of one element into loop bounds by int(), which NumPy 2.4 refuses."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_tensor_for_numpy


def check_expert_blocks() -> None:
    """One and several parts, experts without pairs, all pairs on one expert, experts not a power of two."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 4, 32, 8), (7, 2, 5, 8), (300, 4, 13, 16), (150, 8, 128, 64), (2050, 8, 30, 192))
    for tokens, top_k, experts, rows in shapes:
        ids = torch.rand(tokens, experts, generator=generator).topk(top_k, dim=1).indices.to(torch.int32)
        all_ids = (ids, torch.zeros_like(ids), ids.sort(dim=0).values.contiguous())
        for chosen in all_ids[: 1 if tokens > 2000 else 3]:  # programs of more pairs, which take long
            expected = expert_blocks_reference(chosen, experts, rows)
            got = cut_blocks(chosen, experts, rows)
            assert torch.equal(got.order, expected.order)
            assert torch.equal(got.blocks[:, :3], expected.blocks[:, :3])


def check_pending_tokens() -> None:
    """Known and pending ids in turn, one to several programs, a place without a token."""
    sampled = torch.arange(1000, 1065)
    sampled[3] = -1
    for count in (1, 7, 256, 600):
        places = torch.arange(count) % 65
        ids = torch.where(torch.arange(count) % 3 == 0, -1 - places, torch.arange(count))
        assert torch.equal(read_pending(ids, sampled), pending_tokens_reference(ids, sampled))


def check_moe_sum() -> None:
    """Finished pairs and split parts, with and without bias, delta and shared rows, ragged width."""
    for dtype in (torch.float32, torch.float16):
        x, delta = torch.randn(2, 5, 3, 600).to(dtype)
        assert torch.equal(sum_pairs(x, torch.empty(5, 600, dtype=dtype)), moe_sum_reference(x))
        got = sum_pairs(x, torch.empty(5, 600, dtype=dtype), delta=delta)
        assert torch.equal(got, moe_sum_reference(x + delta))
        shared, added = torch.randn(5, 600).to(dtype), torch.randn(5, 600)
        ways = (None, SharedRows(shared), SharedRows(shared, added))
        for rows in ways[1:]:
            got = sum_pairs(x, torch.empty(5, 600, dtype=dtype), delta=delta, shared=rows)
            assert torch.equal(got, moe_sum_reference(x + delta, rows))
        parts, bias = torch.randn(4, 5, 3, 600), torch.randn(7, 600).to(dtype)
        ids, weights = torch.randint(0, 7, (5, 3), dtype=torch.int32), torch.rand(5, 3)
        for b, d, rows in product((None, bias), (None, delta), ways):
            out, expected = torch.empty(2, 5, 600, dtype=dtype)
            sum_parts(parts, out, ids, weights, bias=b, delta=d, shared=rows)
            moe_sum_parts_reference(parts, expected, ids, weights, bias=b, delta=d, shared=rows)
            assert relative_error(out, expected) < TOLERANCE[dtype]


def check_expert_gemm() -> None:
    """gate_up in both row orders with bias, limit and delta; down with routed weights, whole and split."""
    experts, top_k, hidden, inner, tokens = 5, 2, 40, 24, 9
    activation = GatedActivation(1.702, 1.5, 1.0)
    tiles = ExpertTiles("decode", 16, 32, 16, 1, 4)
    for dtype in (torch.float32, torch.float16):
        x = torch.randn(tokens, hidden).to(dtype)
        gate_up = torch.randn(experts, 2 * inner, hidden).to(dtype)
        down = torch.randn(experts, hidden, inner).to(dtype)
        bias, down_bias = torch.randn(experts, 2 * inner).to(dtype), torch.randn(experts, hidden).to(dtype)
        ids = torch.rand(tokens, experts).topk(top_k, dim=1).indices.to(torch.int32)
        weights = torch.rand(tokens, top_k)
        none = torch.full((tokens,), -1, dtype=torch.int32)
        groups = make_moe_groups(ids, make_lora_segments(none, 1), experts)
        blocks = cut_blocks(ids, experts, 16)
        v = torch.empty(tokens, top_k, 2 * inner, dtype=dtype)
        expert_linear_reference(x, gate_up, groups, v, bias=bias)
        delta = torch.randn_like(v)
        for row_order in ("interleaved", "concatenated"):
            for added in (None, delta):
                act = torch.full((tokens, top_k, inner), float("nan"), dtype=dtype)
                expert_gemm(
                    x, gate_up, blocks, act, tiles,
                    bias=bias, activation=activation, row_order=row_order, delta=added,
                )  # fmt: skip
                whole = v if added is None else v + added
                expected = gated_activation_reference(whole, activation, row_order=row_order)
                assert relative_error(act, expected) < 2 * TOLERANCE[dtype]
        act = gated_activation_reference(v, activation, row_order="interleaved")
        expected = torch.empty(tokens, top_k, hidden, dtype=dtype)
        expert_linear_reference(act, down, groups, expected, bias=down_bias, topk_weights=weights)
        out = torch.full_like(expected, float("nan"))
        expert_gemm(act, down, blocks, out, tiles, bias=down_bias, topk_weights=weights)
        assert relative_error(out, expected) < 2 * TOLERANCE[dtype]
        parts = torch.full((2, *out.shape), float("nan"))
        expert_gemm(act, down, blocks, parts, replace(tiles, splits=2))
        whole = torch.empty(tokens, hidden, dtype=dtype)
        sum_parts(parts, whole, ids, weights, bias=down_bias)
        assert relative_error(whole, expected.float().sum(1)) < 3 * TOLERANCE[dtype]
        _check_lone_pairs(x[:1], gate_up, down, ids[:1].flip(1).contiguous(), tiles)


def _check_lone_pairs(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, ids: torch.Tensor, tiles: ExpertTiles
) -> None:
    """One token's pairs, blocks of their own without a cut: the bits of the cut ones."""
    experts, columns = gate_up.shape[:2]
    got: list[tuple[torch.Tensor, ...]] = []
    for blocks in (cut_blocks(ids, experts, 16), lone_blocks(ids, experts, 16)):
        act = x.new_full((1, ids.shape[1], columns // 2), float("nan"))
        activation = GatedActivation(1.702, 1.5, 1.0)
        expert_gemm(x, gate_up, blocks, act, tiles, activation=activation, row_order="concatenated")
        out = x.new_full((1, ids.shape[1], down.shape[1]), float("nan"))
        weights = torch.arange(1.0, 1 + ids.shape[1])[None]
        expert_gemm(act, down, blocks, out, tiles, topk_weights=weights, weights_first=True)
        parts = torch.full((2, *out.shape), float("nan"))
        expert_gemm(act, down, blocks, parts, replace(tiles, splits=2), weights_first=True)
        got.append((act, out, parts))
    assert all(torch.equal(lone, cut) and lone.isfinite().all() for cut, lone in zip(*got, strict=True))


def check_row_ops() -> None:
    """Norm with and without residual, activation in both row orders, at ragged widths."""
    for dtype in (torch.float32, torch.float16):
        for width in (45, 512):
            x, residual = torch.randn(2, 3, width).to(dtype)
            weight, out = torch.rand(width).to(dtype), torch.empty_like(x)
            norm_rows(x, weight, 1e-5, None, out)
            assert relative_error(out, rms_norm_reference(x, weight, 1e-5)) < TOLERANCE[dtype]
            kept = residual.clone()
            norm_rows(x, weight, 1e-5, residual, out)
            assert relative_error(out, rms_norm_reference(x, weight, 1e-5, kept)) < TOLERANCE[dtype]
            assert torch.equal(residual, kept)
            delta = torch.randn(3, width)
            norm_rows(x, weight, 1e-5, residual, out, delta)
            assert relative_error(out, rms_norm_reference(x, weight, 1e-5, kept, delta)) < TOLERANCE[dtype]
            assert torch.equal(residual, kept)
        gate_up = torch.randn(3, 2, 1202).to(dtype)
        gate_up[0, 1, 7] = float("nan")
        for activation in (GatedActivation(), GatedActivation(1.702, 0.5, 1.0)):
            for row_order in ("interleaved", "concatenated"):
                got = activate_rows(gate_up, gate_up.new_empty(3, 2, 601), activation, row_order)
                expected = gated_activation_reference(gate_up, activation, row_order=row_order)
                assert torch.equal(got.isnan(), expected.isnan())
                assert relative_error(got.nan_to_num(), expected.nan_to_num()) < TOLERANCE[dtype]
                for delta in (torch.randn(3, 2, 1202), torch.randn(3, 2, 1202).to(dtype)):
                    got = activate_rows(
                        gate_up, gate_up.new_empty(3, 2, 601), activation, row_order, delta
                    ).nan_to_num()
                    expected = gated_activation_reference(
                        gate_up, activation, row_order=row_order, delta=delta
                    ).nan_to_num()
                    assert relative_error(got, expected) < TOLERANCE[dtype]


def check_sampling() -> None:
    """Greedy, drawn and nucleus rows in one batch, ties, masks, rows without a distribution, every finish."""
    rows, vocab = 12, 1500
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(1)) * 2
    logits[0, [70, 1200]] = 9.0
    logits[3, 44] = float("nan")
    logits[4, 44] = float("inf")
    logits[5, :1400] = float("-inf")
    temperature = torch.tensor([0.0, 1.0, 0.7, 1.0, 0.0, 1.0, 1.0, 2.0, 1.0, 1e-6, 1.0, 1.0])
    top_p = torch.tensor([1.0, 1.0, 0.9, 0.5, 1.0, 0.3, 0.05, 0.5, 1e-9, 0.5, 0.2, 0.8])
    seed = torch.tensor([5, -1, 2**62, 7, 7, 7, 0, 1, 2, 3, 4, -(2**40)])
    position = torch.arange(rows) * 1000 + 3
    for shift in range(2):
        cut = SamplingBatch(
            temperature, torch.zeros(rows, dtype=torch.int64), top_p, seed + shift, position,
            all_greedy=False, any_cut=True,
        )  # fmt: skip
        for batch in (cut, replace(cut, any_cut=False, top_p=torch.ones(rows))):
            for rounds in (0, 3):
                got = sample_rows(
                    logits, temperature, batch.top_p, batch.seed, position,
                    all_greedy=False, any_top_p=batch.any_cut, num_rounds=rounds, num_chunks=2,
                )  # fmt: skip
                assert torch.equal(got, sample_reference(logits, batch))
    greedy = replace(cut, temperature=torch.zeros(rows), all_greedy=True, any_cut=False)
    got = sample_rows(
        logits, greedy.temperature, top_p, seed, position, all_greedy=True, any_top_p=False, num_chunks=4
    )
    assert torch.equal(got, sample_reference(logits, greedy))


def check_top_k_bounds() -> None:
    """Ties over chunks, zeros of both signs, masks, infinities, every size of set, rows that keep all."""
    rows, vocab = 9, 2600
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(4)) * 3
    logits[1] = logits[1].round()
    logits[2] = torch.where(logits[2] > 0, 0.0, -0.0)
    logits[3, 5:] = float("-inf")
    logits[4] = 1.0
    logits[5, 2000] = float("inf")
    logits[6] = -logits[6].abs() * 1e-30
    for dtype in (torch.float32, torch.float16):
        for k in (0, 1, 2, 7, 300, vocab - 1, vocab, vocab + 5):
            top_k = torch.full((rows,), k)
            top_k[8] = 0 if k else 3
            for chunks in (1, 2, 4):
                got = top_k_bounds(logits.to(dtype), top_k, num_chunks=chunks)
                expected = top_k_bounds_reference(logits.to(dtype), top_k)
                assert torch.equal(got[0], expected[0])
                assert torch.equal(got[1], expected[1])


def check_all_cuts() -> None:
    """top_k, min_p and top_p alone and together, by the reference's ranking; every finish."""
    rows, vocab = 10, 1500
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(2)) * 2
    logits[1] = logits[1].round()
    logits[2, 7] = float("nan")
    logits[3, 40:] = float("-inf")
    temperature = torch.tensor([1.0, 1.0, 1.0, 0.7, 0.0, 1.5, 1.0, 2.0, 1e-6, 1.0])
    all_top_k = torch.tensor([3, 40, 5, 100, 2, 0, 1499, 1, 7, 0])
    all_min_p = torch.tensor([0.0, 0.05, 0.1, 0.02, 0.9, 0.2, 0.0, 0.01, 0.5, 1.0])
    all_top_p = torch.tensor([1.0, 0.5, 0.9, 0.3, 0.1, 0.8, 0.05, 0.7, 0.5, 1.0])
    position = torch.arange(rows) * 77
    for seed in range(3):
        for mask in range(1, 8):
            top_k = all_top_k if mask & 1 else torch.zeros_like(all_top_k)
            top_p = all_top_p if mask & 2 else torch.ones(rows)
            min_p = all_min_p if mask & 4 else None
            batch = SamplingBatch(
                temperature, top_k, top_p, torch.arange(rows) + 100 * seed, position,
                all_greedy=False, any_cut=bool(mask & 3), min_p=min_p,
            )  # fmt: skip
            expected = sample_reference(logits, batch)
            for rounds in (0, 3):
                got = sample_rows(
                    logits, temperature, top_p, batch.seed, position, all_greedy=False,
                    any_top_p=bool(mask & 2), top_k=top_k if mask & 1 else None, min_p=min_p,
                    num_rounds=rounds, num_chunks=2,
                )  # fmt: skip
                assert torch.equal(got, expected), (seed, mask, got, expected)


def check_penalties() -> None:
    """Prompt, output, both and neither; masked tokens; rows that are not named stay as they are."""
    rows, vocab = 5, 3001
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(rows, vocab, generator=generator) * 4
    logits[:, 9] = float("-inf")
    counts = torch.randint(0, 9, (7, vocab), generator=generator, dtype=torch.int32)
    penalties = Penalties(
        counts, torch.tensor([3, 0, 4]), torch.tensor([6, 2, 0]), torch.tensor([1.3, 0.7, 1.0]),
        torch.tensor([0.5, -2.0, 0.0]), torch.tensor([0.25, 1.5, -2.0]),
    )  # fmt: skip
    expected, got = logits.clone(), logits.clone()
    penalize_reference(expected, penalties)
    penalize_rows(got, penalties)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(got[[1, 2]], logits[[1, 2]])
    assert not torch.equal(got, logits)


def check_token_bitmask() -> None:
    """One and several programs a row, words with the sign bit, rows in any order, a last word in part."""
    generator = torch.Generator().manual_seed(7)
    for vocab in (40, 4096, 9001):
        logits = torch.randn(5, vocab, generator=generator)
        masks = torch.randint(
            -(2**31), 2**31, (3, num_mask_words(vocab)), generator=generator, dtype=torch.int32
        )
        masks[1] = 0
        rows = torch.tensor([4, 1, 2])
        expected, got = logits.clone(), logits.clone()
        token_bitmask_reference(expected, masks, rows)
        token_bitmask_rows(got, masks, rows)
        assert torch.equal(got, expected)
        assert torch.equal(got[[0, 3]], logits[[0, 3]])
        assert bool((got[1] == float("-inf")).all())


CASES: dict[str, Callable[[], None]] = {
    "expert_blocks": check_expert_blocks,
    "sampling": check_sampling,
    "top_k_bounds": check_top_k_bounds,
    "all_cuts": check_all_cuts,
    "penalties": check_penalties,
    "pending_tokens": check_pending_tokens,
    "token_bitmask": check_token_bitmask,
    "row_ops": check_row_ops,
    "expert_gemm": check_expert_gemm,
    "moe_sum": check_moe_sum,
}


if __name__ == "__main__":
    CASES[sys.argv[1]]()
