"""Latent attention on a GPU, against float64."""

import pytest
import torch

from lorikeet_kernels.attention.latent_attention import latent_attention
from lorikeet_kernels.benchmarking.latent_problem import exact_latent_attention, make_latent_problem
from lorikeet_kernels.testing import relative_error

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
