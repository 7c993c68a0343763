"""moe_lora's references against a plain float64 loop, on the shapes that hurt."""

from typing import cast

import pytest
import torch

from lorikeet_kernels.dense.row_order import RowOrder
from lorikeet_kernels.lora.lora_segments import make_lora_segments
from lorikeet_kernels.lora.lora_tables import LoraTables
from lorikeet_kernels.lora.moe_groups import make_moe_groups
from lorikeet_kernels.lora.moe_lora import moe_lora_down, moe_lora_gate_up
from lorikeet_kernels.testing import TOLERANCE, SiteShape, SlotSite, exact_delta, make_tables, relative_error

EXPERTS, TOP_K, HIDDEN, INNER = 5, 2, 72, 40
RANKS = (8, 1, 33, 0, 16, 7)


def _tables(dtype: torch.dtype, num_a: int = 1, ranks: tuple[int, ...] = RANKS) -> LoraTables:
    sites = [SiteShape(HIDDEN, 2 * INNER, EXPERTS), SiteShape(INNER, HIDDEN, EXPERTS)]
    # each slot's rank differs between the sites too
    slots = [[SlotSite(r, num_a), SlotSite(ranks[-1 - s])] for s, r in enumerate(ranks)]
    return make_tables(sites, slots, dtype=dtype)


def _token_slot(popularity: str, num_tokens: int, num_slots: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_tokens)
    if popularity == "identical":
        return torch.full((num_tokens,), 1, dtype=torch.int32)
    if popularity == "base":
        return torch.full((num_tokens,), -1, dtype=torch.int32)
    if popularity == "distinct":
        return (torch.arange(num_tokens) % (num_slots + 1) - 1).to(torch.int32)
    weights = 1.0 / torch.arange(1, num_slots + 2) ** (2.0 if popularity == "zipf" else 0.0)
    picks = torch.multinomial(weights, num_tokens, replacement=True, generator=generator)
    return (picks - 1).to(torch.int32)


def _problem(num_tokens: int, dtype: torch.dtype, seed: int = 1) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, HIDDEN, generator=generator).to(dtype)
    act = torch.randn(num_tokens, TOP_K, INNER, generator=generator).to(dtype)
    ids = torch.rand(num_tokens, EXPERTS, generator=generator).topk(TOP_K, dim=1).indices.to(torch.int32)
    weights = torch.rand(num_tokens, TOP_K, generator=generator)
    out = torch.randn(num_tokens, TOP_K, 2 * INNER, generator=generator).to(dtype)
    out_down = torch.randn(num_tokens, TOP_K, HIDDEN, generator=generator).to(dtype)
    return x, act, ids, weights, out, out_down


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("row_order", ["concatenated", "interleaved"])
@pytest.mark.parametrize("num_a", [1, 2])
@pytest.mark.parametrize("num_tokens", [1, 7, 13])
@pytest.mark.parametrize("popularity", ["identical", "distinct", "uniform", "zipf", "base"])
def test_matches_float64_loop(
    dtype: torch.dtype, row_order: RowOrder, num_a: int, num_tokens: int, popularity: str
) -> None:
    """Every pair gets its own adapter's delta, and rows without one keep their bits."""
    tables = _tables(dtype, num_a)
    token_slot = _token_slot(popularity, num_tokens, len(RANKS))
    x, act, ids, weights, out, out_down = _problem(num_tokens, dtype)
    before, before_down = out.clone(), out_down.clone()
    segments = make_lora_segments(token_slot, len(RANKS))
    groups = make_moe_groups(ids, segments, EXPERTS)
    moe_lora_gate_up(out, x, ids, groups, segments, tables, 0, row_order)
    moe_lora_down(out_down, act, ids, weights, groups, segments, tables, 1)

    expected, expected_down = before.to(torch.float64), before_down.to(torch.float64)
    for t in range(num_tokens):
        slot = int(token_slot[t])
        for k in range(TOP_K):
            expert = int(ids[t, k])
            expected[t, k] += exact_delta(x[t], tables, slot, 0, expert, 2 * INNER, row_order)
            delta = exact_delta(act[t, k], tables, slot, 1, expert, HIDDEN, "concatenated")
            expected_down[t, k] += float(weights[t, k]) * delta
    assert relative_error(out, expected) < TOLERANCE[dtype]
    assert relative_error(out_down, expected_down) < TOLERANCE[dtype]
    untouched = (token_slot < 0) | (token_slot == RANKS.index(0))
    assert torch.equal(out[untouched], before[untouched])
    untouched_down = (token_slot < 0) | (token_slot == len(RANKS) - 1 - RANKS.index(0))
    assert torch.equal(out_down[untouched_down], before_down[untouched_down])


@pytest.mark.parametrize("rank", [1, 2, 4, 7, 8, 12, 16, 24, 33, 48, 64, 100, 256])
def test_any_rank(rank: int) -> None:
    """Ranks that are no power of two, or below the payload's padding, or the maximum, are exact."""
    tables = _tables(torch.float32, 2, (rank, 3))
    x, _, ids, _, out, _ = _problem(7, torch.float32)
    out.zero_()
    token_slot = torch.tensor([0, 1, 0, -1, 0, 1, 0], dtype=torch.int32)
    segments = make_lora_segments(token_slot, 2)
    groups = make_moe_groups(ids, segments, EXPERTS)
    moe_lora_gate_up(out, x, ids, groups, segments, tables, 0, "interleaved")
    expected = torch.stack(
        [
            torch.stack(
                [
                    exact_delta(x[t], tables, int(token_slot[t]), 0, int(ids[t, k]), 2 * INNER, "interleaved")
                    for k in range(TOP_K)
                ]
            )
            for t in range(7)
        ]
    )
    assert relative_error(out, expected) < TOLERANCE[torch.float32]


def test_base_rows_keep_their_bits_beside_adapters() -> None:
    """One slot, one adapter request and one base request together, base first and last."""
    tables = _tables(torch.float32, 1, (8,))
    for token_slot in ([-1, 0], [0, -1], [-1, 0, -1, 0]):
        slots = torch.tensor(token_slot, dtype=torch.int32)
        x, _, ids, _, out, _ = _problem(len(token_slot), torch.float32)
        out[slots < 0] = float("nan")  # a read-modify-write of a base row would still be NaN: compare bits
        before = out.clone()
        segments = make_lora_segments(slots, 1)
        groups = make_moe_groups(ids, segments, EXPERTS)
        moe_lora_gate_up(out, x, ids, groups, segments, tables, 0, "concatenated")
        assert torch.equal(out[slots < 0].view(torch.int32), before[slots < 0].view(torch.int32))
        assert not torch.equal(out[slots >= 0], before[slots >= 0])
        assert torch.isfinite(out[slots >= 0]).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("ids", "int32"),
        ("out", "one row a pair"),
        ("x", "tokens"),
        ("dtype", "compute dtype"),
        ("site", "of the tables' 2"),
    ],
)
def test_bad_input_is_refused(change: str, message: str) -> None:
    """Wrong shapes and dtypes fail with the argument's name, before anything is written."""
    tables = _tables(torch.float32)
    x, _, ids, _, out, _ = _problem(7, torch.float32)
    segments = make_lora_segments(torch.zeros(7, dtype=torch.int32), len(RANKS))
    groups = make_moe_groups(ids, segments, EXPERTS)
    if change == "ids":
        ids = ids.long()
    elif change == "out":
        out = out[:, :1].contiguous()
    elif change == "x":
        x = x[:3].contiguous()
    elif change == "dtype":
        x = x.to(torch.float16)
    with pytest.raises(ValueError, match=message):
        moe_lora_gate_up(out, x, ids, groups, segments, tables, 2 * (change == "site"), "concatenated")


@pytest.mark.parametrize("num_tokens", [0, 7])
@pytest.mark.parametrize("num_a", [1, 2])
def test_unknown_row_order_is_refused(num_a: int, num_tokens: int) -> None:
    """It would be taken for "concatenated"; also where one A feeds all rows, and in an empty batch."""
    tables = _tables(torch.float32, num_a)
    x, _, ids, _, out, _ = _problem(num_tokens, torch.float32)
    segments = make_lora_segments(torch.zeros(num_tokens, dtype=torch.int32), len(RANKS))
    groups = make_moe_groups(ids, segments, EXPERTS)
    with pytest.raises(ValueError, match="row_order 'halves'"):
        moe_lora_gate_up(out, x, ids, groups, segments, tables, 0, cast("RowOrder", "halves"))
