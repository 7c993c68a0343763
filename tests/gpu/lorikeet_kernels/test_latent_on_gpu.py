"""Latent attention and what lies around it on a GPU, against float64 and the references."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton

from lorikeet_kernels.attention.latent_attention import latent_attention
from lorikeet_kernels.attention.latent_inputs import latent_inputs, latent_inputs_reference
from lorikeet_kernels.attention.prompt_attention import prompt_attention, prompt_attention_reference
from lorikeet_kernels.benchmarking.latent_problem import exact_latent_attention, make_latent_problem
from lorikeet_kernels.dense.few_heads_linear import few_heads_linear
from lorikeet_kernels.dense.head_linear import head_linear
from lorikeet_kernels.lora.few_heads_lora import few_heads_lora, joined_heads
from lorikeet_kernels.lora.head_lora import HeadRows, head_lora
from lorikeet_kernels.lora.lora_segments import make_lora_segments
from lorikeet_kernels.lora.lora_tables import LoraTables
from lorikeet_kernels.lora.lora_weights import site_a, site_b
from lorikeet_kernels.lora.lora_workspace import LoraWorkspace
from lorikeet_kernels.testing import SiteShape, SlotSite, make_tables, relative_error
from lorikeet_kernels.tiling.few_heads_tiles import select_few_heads
from lorikeet_kernels.warm_up_latent import LatentHeads, warm_up_heads, warm_up_latent_attention

GPU = torch.device("cuda")
BF16 = torch.bfloat16
TOLERANCE = 5e-3
MIXED = ((0, 300), (700, 1), (5, 26), (0, 1), (64, 1), (1000, 77), (511, 1), (2047, 1))
DECODES = tuple((max(0, length - 1), min(length, 1)) for length in (1, 15, 16, 17, 63, 64, 500, 3000))


@pytest.mark.parametrize("shares", [MIXED, DECODES, DECODES[-1:], DECODES * 9])
@pytest.mark.parametrize(
    ("heads", "latent", "rope", "block"),
    [(16, 512, 64, 16), (128, 512, 64, 16), (20, 512, 64, 64), (4, 32, 8, 16), (40, 96, 24, 16)],
)
def test_latent_attention(
    shares: tuple[tuple[int, int], ...], heads: int, latent: int, rope: int, block: int
) -> None:
    """Mixed batches and decodes, few to many of them; twice: bits repeat."""
    problem = make_latent_problem(
        shares, heads=heads, latent_dim=latent, rope_dim=rope, block_tokens=block, dtype=BF16, device=GPU
    )
    outs = [problem.empty_out() for _ in range(2)]
    for out in outs:
        latent_attention(problem.q, problem.cache, problem.metadata, problem.scale, out)
    assert relative_error(outs[0], exact_latent_attention(problem)) < TOLERANCE
    assert torch.equal(outs[0], outs[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("heads", [16, 40])
def test_other_dtypes(dtype: torch.dtype, heads: int) -> None:
    """float32 computes in float32, not in tf32."""
    problem = make_latent_problem(
        MIXED, heads=heads, latent_dim=512, rope_dim=64, dtype=dtype, device=GPU, seed=1
    )
    out = problem.empty_out()
    latent_attention(problem.q, problem.cache, problem.metadata, problem.scale, out)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-3
    assert relative_error(out, exact_latent_attention(problem)) < tolerance


def test_capture_follows_longer_sequences() -> None:
    """A graph captured over short sequences serves longer ones of the same table width; padding gives 0."""
    problem = make_latent_problem(DECODES, heads=16, latent_dim=512, rope_dim=64, dtype=BF16, device=GPU)
    out, lens = problem.empty_out(), problem.metadata.sequence_lens
    expected, real = exact_latent_attention(problem), lens.clone()
    latent_attention(problem.q, problem.cache, problem.metadata, problem.scale, out)
    lens.fill_(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        latent_attention(problem.q, problem.cache, problem.metadata, problem.scale, out)
    lens.copy_(real)
    graph.replay()
    assert relative_error(out, expected) < TOLERANCE
    lens[3] = 0
    graph.replay()
    assert torch.equal(out[3], torch.zeros_like(out[3]))


@pytest.mark.parametrize("shares", [MIXED, ((0, 513), (0, 342), (0, 341), (3, 500), (0, 2), (9, 1))])
@pytest.mark.parametrize(("heads", "sizes"), [(16, (128, 64, 128)), (4, (16, 8, 16)), (3, (40, 24, 96))])
def test_prompts(shares: tuple[tuple[int, int], ...], heads: int, sizes: tuple[int, int, int]) -> None:
    """Whole prompts longer than a bound beside all else, which is left alone; parts of wider rows."""
    plain, rope, value = sizes
    metadata = make_latent_problem(
        shares, heads=1, latent_dim=16, rope_dim=8, dtype=BF16, device=GPU
    ).metadata
    tokens = int(metadata.query_starts[-1])
    wide = torch.randn(tokens, heads * (plain + rope) + rope, device=GPU).to(BF16)
    q, shared = wide[:, :-rope].view(tokens, heads, -1), wide[:, -rope:]
    up = torch.randn(tokens, heads, plain + value, device=GPU).to(BF16)
    outs = [torch.full((tokens, heads, value), float("nan"), dtype=BF16, device=GPU) for _ in range(2)]
    for out in outs:
        prompt_attention(q, up, shared, metadata, 0.07, out, most_fresh=299)
    expected = torch.full_like(outs[0], float("nan"), dtype=torch.float32)
    where = (q.float(), up.float(), shared.float(), metadata, 0.07, expected)
    prompt_attention_reference(*where, most_fresh=299)
    assert torch.equal(outs[0].isnan(), expected.isnan())
    assert not expected.isnan().all()
    assert relative_error(outs[0].nan_to_num(), expected.nan_to_num()) < TOLERANCE
    assert torch.equal(outs[0].nan_to_num(), outs[1].nan_to_num())


@pytest.mark.parametrize("num_tokens", [1, 7, 300])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("heads", "sizes"), [(16, (128, 512, 64)), (128, (128, 512, 64)), (4, (16, 32, 8))])
def test_inputs(heads: int, sizes: tuple[int, int, int], interleaved: bool, num_tokens: int) -> None:
    """Norm, both rotations and the cache write, from parts of one projection; adapters' part beside or in."""
    plain, latent, rope = sizes
    dim = plain + rope
    down = torch.randn(num_tokens, heads * dim + latent + rope, device=GPU).to(BF16)
    delta = torch.randn(down.shape, device=GPU)
    table, weight = torch.randn(999, 2, rope // 2, device=GPU), torch.rand(latent, device=GPU).to(BF16)
    positions = torch.randint(0, 999, (num_tokens,), device=GPU)
    slots = torch.randperm(320, device=GPU)[:num_tokens]

    def run(op: Callable[..., torch.Tensor], rows: torch.Tensor, **deltas: Any) -> tuple[torch.Tensor, ...]:
        query, latents, keys = rows.split((heads * dim, latent, rope), dim=1)
        q = query.view(num_tokens, heads, dim)
        absorbed = torch.zeros(num_tokens, heads, latent + rope, dtype=BF16, device=GPU)
        cache = torch.zeros(20, 16, 1, latent + rope, dtype=BF16, device=GPU)
        where = (q, latents, keys, absorbed, cache, slots, positions, table)
        return op(*where, weight, 1e-6, interleaved=interleaved, **deltas), q, keys, absorbed, cache

    added: dict[str, Any] = {
        "query_delta": delta[:, : heads * dim].view(num_tokens, heads, dim),
        "delta": delta[:, heads * dim :],
    }
    whole = down.clone().add_(delta)
    for got, want in zip(
        run(latent_inputs, whole.clone()), run(latent_inputs_reference, whole.clone()), strict=True
    ):
        assert relative_error(got, want) < 2e-3
    in_place = run(latent_inputs, whole.clone())
    for joined in (False, True):
        beside = run(latent_inputs, down.clone(), **added, delta_is_joined=joined)
        assert all(torch.equal(got, want) for got, want in zip(beside, in_place, strict=True))


@pytest.mark.parametrize("num_tokens", [1, 2, 4, 7, 16])
@pytest.mark.parametrize("max_rank", [16, 32])
@pytest.mark.parametrize(("heads", "sizes"), [(16, (128, 128, 512)), (4, (16, 16, 32)), (5, (24, 40, 96))])
def test_heads_of_few_rows(heads: int, sizes: tuple[int, int, int], max_rank: int, num_tokens: int) -> None:
    """Projection and adapters in one launch against float64; base rows as without adapters, bit for bit."""
    plain, value, latent = sizes
    stride = plain + value
    tables = make_tables(
        [SiteShape(latent, heads * stride)],
        [[SlotSite(8)], [SlotSite(max_rank)], [SlotSite(0)]],
        dtype=BF16,
        device="cuda",
    )
    slots = torch.arange(num_tokens) % 4 - 1 if num_tokens > 1 else torch.ones(1)
    segments = make_lora_segments(slots.to(GPU, torch.int32), 3, LoraWorkspace(GPU))
    weight = (torch.randn(heads, stride, latent, device=GPU) * latent**-0.5).to(BF16)
    for down, size, width, rows, matrix in (
        (True, plain, latent, HeadRows(stride, 0, plain), weight[:, :plain]),
        (False, latent, value, HeadRows(stride, plain, value), weight[:, plain:].transpose(1, 2)),
    ):
        x = torch.randn(num_tokens, heads, size + 64, device=GPU).to(BF16)[..., :size]
        expected = torch.einsum("thi,hio->tho", x.double(), matrix.double())
        base = torch.full((num_tokens, heads, width + 64), float("nan"), dtype=BF16, device=GPU)
        tiles = select_few_heads(size, width)
        few_heads_linear(x, matrix, base[..., :width], tiles)
        assert relative_error(base[..., :width], expected) < TOLERANCE
        for t, slot in enumerate(slots.tolist()):
            if slot not in (0, 1):
                continue
            a = site_a(tables, int(slot), 0, latent)[0, 0].double()
            b = site_b(tables, int(slot), 0, heads * stride)[0].double().view(heads, stride, -1)
            b, own = b[:, rows.first : rows.first + rows.count], x[t].double()[:, None]
            expected[t] += (own @ b @ a if down else own @ a.T @ b.transpose(1, 2))[:, 0]
        out = torch.full_like(base, float("nan"))
        few_heads_lora(x, matrix, out[..., :width], segments, tables, 0, rows, tiles, down=down)
        assert relative_error(out[..., :width], expected) < TOLERANCE
        assert out[..., width:].isnan().all()
        same = ((slots < 0) | (slots == 2)).to(GPU)
        assert torch.equal(out[same][..., :width], base[same][..., :width])


@pytest.mark.parametrize("num_tokens", [1, 13, 40, 300, 1500])
@pytest.mark.parametrize("max_rank", [16, 33, 256])
@pytest.mark.parametrize(("heads", "sizes"), [(16, (128, 128, 512)), (4, (16, 16, 32)), (5, (24, 40, 96))])
def test_absorbed_adapters(heads: int, sizes: tuple[int, int, int], max_rank: int, num_tokens: int) -> None:
    """Projections of heads and their adapters, both directions, against the references in float32."""
    plain, value, latent = sizes
    stride = plain + value
    slot_sites = [[SlotSite(8)], [SlotSite(max_rank)], [SlotSite(0)]]
    tables = make_tables([SiteShape(latent, heads * stride)], slot_sites, dtype=BF16)
    rest = (tables.a_offset, tables.b_offset, tables.rank, tables.num_a)
    as_float = LoraTables(tables.arena.float(), *rest, tables.max_rank)
    on_gpu = LoraTables(tables.arena.to(GPU), *(t.to(GPU) for t in rest), tables.max_rank)
    slots = torch.randint(-1, 3, (num_tokens,), dtype=torch.int32)
    segments = make_lora_segments(slots, 3)
    gpu_segments = make_lora_segments(slots.to(GPU), 3, LoraWorkspace(GPU))
    weight = (torch.randn(heads, stride, latent) * latent**-0.5).to(BF16)
    for down, size, width, rows, matrix in (
        (True, plain, latent, HeadRows(stride, 0, plain), weight[:, :plain]),
        (False, latent, value, HeadRows(stride, plain, value), weight[:, plain:].transpose(1, 2)),
    ):
        x = torch.randn(num_tokens, heads, size + 64).to(BF16)[..., :size]
        expected = torch.zeros(num_tokens, heads, width)
        head_linear(x.float(), matrix.float(), expected)
        base = expected.to(BF16).to(GPU)
        head_lora(expected, x.float(), segments, as_float, 0, rows, down=down)
        out = torch.zeros(num_tokens, heads, width + 64, dtype=BF16, device=GPU)
        got, own = out[..., :width], torch.zeros(num_tokens, heads, size + 64, dtype=BF16, device=GPU)
        own = own[..., :size].copy_(x)
        on_device = weight.to(GPU)
        head_linear(own, on_device[:, :plain] if down else on_device[:, plain:].transpose(1, 2), got)
        assert relative_error(got, base) < TOLERANCE
        before = got.clone()
        head_lora(got, own, gpu_segments, on_gpu, 0, rows, down=down)
        assert relative_error(got.cpu(), expected) < TOLERANCE
        same = ((slots < 0) | (slots == 2)).to(GPU)
        assert torch.equal(got[same], before[same])
        assert not out[..., width:].any()


@pytest.mark.parametrize(("heads", "sizes"), [(16, (128, 512, 64, 128)), (4, (16, 32, 8, 16))])
def test_nothing_compiles_after_the_warm_up(heads: int, sizes: tuple[int, int, int, int]) -> None:
    """Random batches of decodes, chunks and prompts, with adapters."""
    plain, latent, rope, value = sizes
    dim, stride, most = plain + rope, plain + value, 600
    layer = LatentHeads(
        heads, latent, plain, rope, value,
        row_width=heads * dim + latent + rope, is_query_beside=True, is_pairwise=True, projects_prompts=True,
    )  # fmt: skip
    tables = make_tables([SiteShape(latent, heads * stride)], [[SlotSite(16)]] * 3, dtype=BF16, device="cuda")
    workspace = LoraWorkspace(GPU)
    caches = torch.zeros(40, 16, 1, latent + rope, dtype=BF16, device=GPU)
    warm_up_latent_attention(caches, layer, scale=0.1, max_requests=70, max_tokens=4096)
    weight = torch.zeros(heads, stride, latent, dtype=BF16, device=GPU)
    warm_up_heads(tables, workspace, layer, weight, site=0, max_tokens=most)
    compiled: list[str] = []
    triton.knobs.runtime.jit_post_compile_hook = lambda **given: compiled.append(str(given.get("repr")))
    table = torch.zeros(4096, 2, rope // 2, device=GPU)
    norm = torch.zeros(latent, dtype=BF16, device=GPU)
    try:
        for shares in (
            ((9, 1),),
            ((0, 1),) * 70,
            ((0, 599),),
            ((5, 40), (3, 1)),
            ((2000, 1),) * 3,
            ((0, 4),),
            ((0, 17),),
        ):
            problem = make_latent_problem(
                shares, heads=heads, latent_dim=latent, rope_dim=rope, dtype=BF16, device=GPU
            )
            tokens = problem.q.shape[0]
            query, row = layer.rows(tokens, caches)
            latents, shared = row.split((latent, rope), dim=1)
            absorbed = caches.new_zeros((tokens, heads, latent + rope))
            places = torch.arange(tokens, device=GPU) % 600
            latent_inputs(
                query, latents, shared, absorbed, caches, places, places, table, norm, 1e-6,
                interleaved=True,
            )  # fmt: skip
            slots = (torch.arange(tokens, device=GPU) % 3).to(torch.int32)
            segments = make_lora_segments(slots, 3, workspace)
            rows = HeadRows(stride, 0, plain)
            where = (query[..., :plain], weight[:, :plain], absorbed[..., :latent])
            head_linear(*where)
            if not joined_heads(*where, segments, tables, 0, rows, down=True):
                head_lora(where[2], where[0], segments, tables, 0, rows, down=True)
            sums = absorbed.new_empty((tokens, heads, latent))
            latent_attention(absorbed, problem.cache, problem.metadata, 0.1, sums, most_fresh=341)
            out = absorbed.new_empty((tokens, heads, value))
            rows = HeadRows(stride, plain, value)
            where = (sums, weight[:, plain:].transpose(1, 2), out)
            head_linear(*where)
            if not joined_heads(*where, segments, tables, 0, rows, down=False):
                head_lora(out, sums, segments, tables, 0, rows, down=False)
            up = absorbed.new_zeros((tokens, heads, stride))
            prompt_attention(query, up, shared, problem.metadata, 0.1, out, most_fresh=341)
        torch.cuda.synchronize()
    finally:
        triton.knobs.runtime.jit_post_compile_hook = None
    assert compiled == []
