"""The MoE LoRA kernels on a GPU in bf16, against the CPU references with a float32 output."""

import pytest
import torch

from lorikeet_kernels.dense.row_order import RowOrder
from lorikeet_kernels.lora.lora_segments import make_lora_segments
from lorikeet_kernels.lora.lora_tables import LoraTables
from lorikeet_kernels.lora.lora_workspace import LoraWorkspace
from lorikeet_kernels.lora.moe_groups import make_moe_groups
from lorikeet_kernels.lora.moe_lora import moe_lora_down, moe_lora_gate_up
from lorikeet_kernels.testing import TOLERANCE, SiteShape, SlotSite, make_tables, relative_error

EXPERTS, TOP_K = 8, 2
RANKS = (8, 1, 33, 0, 16, 7)
GPU = torch.device("cuda")


def _tables(
    hidden: int, inner: int, num_a: int, dtype: torch.dtype, ranks: tuple[int, ...] = RANKS
) -> LoraTables:
    sites = [SiteShape(hidden, 2 * inner, EXPERTS), SiteShape(inner, hidden, EXPERTS)]
    slots = [[SlotSite(r, num_a), SlotSite(ranks[-1 - s])] for s, r in enumerate(ranks)]
    return make_tables(sites, slots, dtype=dtype)


def _to_gpu(tables: LoraTables) -> LoraTables:
    moved = [t.to(GPU) for t in (tables.arena, tables.a_offset, tables.b_offset, tables.rank, tables.num_a)]
    return LoraTables(*moved, max_rank=tables.max_rank)


def _slots(popularity: str, num_tokens: int, num_slots: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_tokens)
    if popularity in ("identical", "base"):
        return torch.full((num_tokens,), 4 if popularity == "identical" else -1, dtype=torch.int32)
    if popularity == "distinct":
        return (torch.arange(num_tokens) % (num_slots + 1) - 1).to(torch.int32)
    weights = 1.0 / torch.arange(1, num_slots + 2) ** (2.0 if popularity == "zipf" else 0.0)
    return (torch.multinomial(weights, num_tokens, replacement=True, generator=generator) - 1).to(torch.int32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("hidden", "inner"), [(2880, 96), (72, 40), (61, 37), (512, 768)])
@pytest.mark.parametrize(
    ("num_a", "row_order"), [(1, "interleaved"), (2, "interleaved"), (2, "concatenated")]
)
@pytest.mark.parametrize("num_tokens", [1, 7, 13, 300])
@pytest.mark.parametrize("popularity", ["identical", "distinct", "zipf", "base"])
def test_matches_reference(
    dtype: torch.dtype,
    hidden: int,
    inner: int,
    num_a: int,
    row_order: RowOrder,
    num_tokens: int,
    popularity: str,
) -> None:
    """Both paths agree with the reference; rows without an adapter keep their bits, NaN included."""
    tables = _tables(hidden, inner, num_a, dtype)
    on_gpu = _to_gpu(tables)
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, hidden, generator=generator).to(dtype)
    act = torch.randn(num_tokens, TOP_K, inner, generator=generator).to(dtype)
    ids = torch.rand(num_tokens, EXPERTS, generator=generator).topk(TOP_K, dim=1).indices.to(torch.int32)
    weights = torch.rand(num_tokens, TOP_K, generator=generator)
    out = torch.randn(num_tokens, TOP_K, 2 * inner, generator=generator).to(dtype)
    out_down = torch.randn(num_tokens, TOP_K, hidden, generator=generator).to(dtype)
    slots = _slots(popularity, num_tokens, len(RANKS))
    out[slots < 0], out_down[slots < 0] = float("nan"), float("nan")
    x[slots < 0], act[slots < 0] = float("nan"), float("nan")

    segments = make_lora_segments(slots, len(RANKS))
    groups = make_moe_groups(ids, segments, EXPERTS)
    as_float = LoraTables(
        tables.arena.float(), tables.a_offset, tables.b_offset, tables.rank, tables.num_a, tables.max_rank
    )
    expected, expected_down = out.float(), out_down.float()
    moe_lora_gate_up(expected, x.float(), ids, groups, segments, as_float, 0, row_order)
    moe_lora_down(expected_down, act.float(), ids, weights, groups, segments, as_float, 1)

    gpu_segments = make_lora_segments(slots.to(GPU), len(RANKS), LoraWorkspace(GPU))
    gpu_ids = ids.to(GPU)
    adapted = slots >= 0
    for gpu_groups in (make_moe_groups(gpu_ids, gpu_segments, EXPERTS), None):
        got, got_down = out.to(GPU), out_down.to(GPU)
        moe_lora_gate_up(got, x.to(GPU), gpu_ids, gpu_groups, gpu_segments, on_gpu, 0, row_order)
        moe_lora_down(got_down, act.to(GPU), gpu_ids, weights.to(GPU), gpu_groups, gpu_segments, on_gpu, 1)
        got, got_down = got.cpu(), got_down.cpu()
        assert torch.equal(got[~adapted].view(torch.int16), out[~adapted].view(torch.int16))
        assert torch.equal(got_down[~adapted].view(torch.int16), out_down[~adapted].view(torch.int16))
        if adapted.any():
            assert relative_error(got[adapted], expected[adapted]) < TOLERANCE[dtype]
            assert relative_error(got_down[adapted], expected_down[adapted]) < TOLERANCE[dtype]


@pytest.mark.parametrize("rank", [1, 2, 4, 7, 8, 12, 16, 24, 33, 48, 64, 100, 128, 256])
@pytest.mark.parametrize("num_tokens", [5, 200])
def test_any_rank(rank: int, num_tokens: int) -> None:
    """Ranks that are no power of two, small ranks beside the maximum, and the maximum itself."""
    tables = _tables(96, 40, 2, torch.bfloat16, (rank, 3))
    slots = (torch.arange(num_tokens) % 3 - 1).to(torch.int32)
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(num_tokens)]).to(torch.int32)
    x = torch.randn(num_tokens, 96).bfloat16()
    segments = make_lora_segments(slots, 2)
    groups = make_moe_groups(ids, segments, EXPERTS)
    as_float = LoraTables(
        tables.arena.float(), tables.a_offset, tables.b_offset, tables.rank, tables.num_a, tables.max_rank
    )
    expected = torch.zeros(num_tokens, TOP_K, 80)
    moe_lora_gate_up(expected, x.float(), ids, groups, segments, as_float, 0, "interleaved")
    gpu_segments = make_lora_segments(slots.to(GPU), 2, LoraWorkspace(GPU))
    gpu_groups = make_moe_groups(ids.to(GPU), gpu_segments, EXPERTS)
    got = torch.zeros(num_tokens, TOP_K, 80, dtype=torch.bfloat16, device=GPU)
    moe_lora_gate_up(got, x.to(GPU), ids.to(GPU), gpu_groups, gpu_segments, _to_gpu(tables), 0, "interleaved")
    assert relative_error(got.cpu(), expected) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("num_tokens", [1, 200])
def test_identical_runs_are_bit_identical(num_tokens: int) -> None:
    """One token, a long input, rank 32, many launches: the same bits every time."""
    tables = _to_gpu(_tables(7168, 96, 1, torch.bfloat16, (32,)))
    slots = torch.zeros(num_tokens, dtype=torch.int32, device=GPU)
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(num_tokens)]).to(torch.int32).to(GPU)
    x = torch.randn(num_tokens, 7168, device=GPU).bfloat16()
    segments = make_lora_segments(slots, 1, LoraWorkspace(GPU))
    first = None
    for _ in range(1000 if num_tokens == 1 else 100):
        groups = make_moe_groups(ids, segments, EXPERTS)
        out = torch.zeros(num_tokens, TOP_K, 192, dtype=torch.bfloat16, device=GPU)
        moe_lora_gate_up(out, x, ids, groups, segments, tables, 0, "concatenated")
        first = out if first is None else first
        assert torch.equal(out, first)


def test_one_graph_serves_any_mix_of_adapters() -> None:
    """A graph captured with one adapter is replayed with several, with base rows, with one."""
    num_tokens, ranks = 8, (8, 16, 7, 33)
    tables = _tables(96, 64, 1, torch.bfloat16, ranks)
    on_gpu, workspace = _to_gpu(tables), LoraWorkspace(GPU)
    slots = torch.zeros(num_tokens, dtype=torch.int32, device=GPU)
    ids = torch.zeros(num_tokens, TOP_K, dtype=torch.int32, device=GPU)
    x = torch.randn(num_tokens, 96, device=GPU).bfloat16()
    out = torch.zeros(num_tokens, TOP_K, 128, dtype=torch.bfloat16, device=GPU)
    segments = make_lora_segments(slots, len(ranks), workspace)
    run = lambda: moe_lora_gate_up(out, x, ids, None, segments, on_gpu, 0, "interleaved")  # noqa: E731
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    batches = (
        [0] * 8,
        [0, 0, 1, 1, 2, 2, 3, 3],
        [0, 1, 2, 3, -1, -1, -1, -1],
        [-1] * 8,
        [3, -1] * 4,
        [2] * 8,
    )
    for seed, batch in enumerate(batches):
        slots.copy_(torch.tensor(batch, dtype=torch.int32))
        generator = torch.Generator().manual_seed(seed)
        ids.copy_(
            torch.rand(num_tokens, EXPERTS, generator=generator).topk(TOP_K, dim=1).indices.to(torch.int32)
        )
        out.zero_()
        graph.replay()
        cpu_segments = make_lora_segments(slots.cpu(), len(ranks))
        groups = make_moe_groups(ids.cpu(), cpu_segments, EXPERTS)
        expected = torch.zeros(num_tokens, TOP_K, 128)
        as_float = LoraTables(
            tables.arena.float(), tables.a_offset, tables.b_offset, tables.rank, tables.num_a, tables.max_rank
        )
        moe_lora_gate_up(
            expected, x.cpu().float(), ids.cpu(), groups, cpu_segments, as_float, 0, "interleaved"
        )
        assert relative_error(out.cpu(), expected) < TOLERANCE[torch.bfloat16]


def test_delta_mode_writes_zeros_for_base_rows() -> None:
    """Without accumulate, a poisoned output becomes the delta alone, zero where there is no adapter."""
    tables = _to_gpu(_tables(96, 64, 1, torch.bfloat16, (8,)))
    slots = torch.tensor([0, -1, 0], dtype=torch.int32, device=GPU)
    ids = torch.zeros(3, TOP_K, dtype=torch.int32, device=GPU)
    x = torch.randn(3, 96, device=GPU).bfloat16()
    segments = make_lora_segments(slots, 1, LoraWorkspace(GPU))
    delta = torch.full((3, TOP_K, 128), float("nan"), dtype=torch.bfloat16, device=GPU)
    moe_lora_gate_up(delta, x, ids, None, segments, tables, 0, "interleaved", accumulate=False)
    added = torch.zeros_like(delta)
    moe_lora_gate_up(added, x, ids, None, segments, tables, 0, "interleaved")
    assert torch.equal(delta, added)
    assert not delta[1].any()
