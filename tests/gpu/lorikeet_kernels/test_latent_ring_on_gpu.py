"""Latent attention through the ring of TMA copies on a GPU, against float64."""

import pytest
import torch

from lorikeet_kernels.attention.latent_attention import NEVER_FRESH
from lorikeet_kernels.attention.latent_decode import latent_decode
from lorikeet_kernels.attention.latent_prefill import latent_prefill
from lorikeet_kernels.attention.latent_ring_kernels import can_ring
from lorikeet_kernels.benchmarking.latent_problem import exact_latent_attention, make_latent_problem
from lorikeet_kernels.launch.hopper import is_hopper
from lorikeet_kernels.testing import relative_error
from lorikeet_kernels.tiling.latent_tiles import LatentDecodeTiles, LatentPrefillTiles

MIXED = ((0, 300), (700, 1), (5, 26), (0, 1), (64, 1), (1000, 77), (511, 1), (2047, 1))
DECODES = tuple((max(0, length - 1), min(length, 1)) for length in (1, 15, 16, 17, 63, 64, 500, 3000))
TOLERANCE = {torch.bfloat16: 5e-3, torch.float16: 1e-3}
FEW, MANY = LatentDecodeTiles(16, 64, 1, 4, 3, 1), LatentDecodeTiles(64, 64, 1, 8, 2, 1)
PROMPTS = LatentPrefillTiles(64, 64, 8, 2, num_key_stages=1)


@pytest.mark.parametrize(
    ("decode", "prefill", "heads", "block", "dtype"),
    [
        (FEW, PROMPTS, 16, 16, torch.bfloat16),
        (LatentDecodeTiles(16, 64, 1, 4, 2, 2), PROMPTS, 20, 64, torch.bfloat16),
        (
            LatentDecodeTiles(32, 64, 1, 4, 2, 2),
            LatentPrefillTiles(32, 64, 4, 2, None, 2),
            24,
            32,
            torch.float16,
        ),
        (MANY, PROMPTS, 128, 16, torch.bfloat16),
    ],
    ids=["16 heads", "20 heads", "24 heads", "128 heads"],
)
def test_batches(
    decode: LatentDecodeTiles, prefill: LatentPrefillTiles, heads: int, block: int, dtype: torch.dtype
) -> None:
    """Mixed batches and decodes, few to many of them, splits with and without work; twice: bits repeat."""
    for seed, shares in enumerate((MIXED, DECODES, DECODES[-1:], DECODES * 9)):
        problem = make_latent_problem(
            shares, heads=heads, latent_dim=512, rope_dim=64, block_tokens=block, dtype=dtype, device="cuda",
            seed=seed,
        )  # fmt: skip
        if not is_hopper(problem.cache):
            pytest.skip("the ring is Hopper's")
        assert can_ring(problem.cache, 512, dtype, on_hopper=True)
        metadata = problem.metadata
        where = (
            problem.q, problem.cache, metadata.query_starts, metadata.sequence_lens, metadata.block_tables,
            problem.scale,
        )  # fmt: skip
        exact = exact_latent_attention(problem)
        for splits in (1, 5, 64):
            outs = [problem.empty_out() for _ in range(2)]
            for out in outs:
                own = LatentDecodeTiles(
                    decode.rows, 64, splits, decode.num_warps, decode.num_stages, decode.num_key_stages
                )
                latent_decode(*where, out, own)
                latent_prefill(*where, out, prefill, most_fresh=NEVER_FRESH)
            assert relative_error(outs[0], exact) < TOLERANCE[dtype], (shares, splits)
            assert torch.equal(outs[0], outs[1]), (shares, splits)


def test_capture_follows_longer_sequences() -> None:
    """A graph captured over short sequences serves longer ones of the same table width; padding gives 0."""
    problem = make_latent_problem(
        DECODES, heads=16, latent_dim=512, rope_dim=64, dtype=torch.bfloat16, device="cuda"
    )
    out, metadata = problem.empty_out(), problem.metadata
    lens = metadata.sequence_lens
    expected, real = exact_latent_attention(problem), lens.clone()

    def attend() -> None:
        tiles = LatentDecodeTiles(16, 64, 5, 4, 3, 1)
        where = (problem.q, problem.cache, metadata.query_starts, lens, metadata.block_tables)
        latent_decode(*where, problem.scale, out, tiles)

    attend()
    lens.fill_(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend()
    lens.copy_(real)
    graph.replay()
    assert relative_error(out, expected) < TOLERANCE[torch.bfloat16]
    lens[3] = 0
    graph.replay()
    assert torch.equal(out[3], torch.zeros_like(out[3]))
