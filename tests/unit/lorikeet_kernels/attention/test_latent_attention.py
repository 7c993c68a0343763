"""Attention over cached latents: the reference against float64, and against keys and values projected up."""

import pytest
import torch

from lorikeet_kernels.attention.latent_attention import latent_attention
from lorikeet_kernels.attention.latent_inputs import latent_inputs
from lorikeet_kernels.benchmarking.latent_problem import exact_latent_attention, make_latent_problem
from lorikeet_kernels.testing import relative_error

SHARES = ((0, 7), (13, 1), (5, 6), (0, 1), (7, 1), (8, 1))


@pytest.mark.parametrize("heads", [1, 4, 5])
def test_mixed_batch(heads: int) -> None:
    """First chunk, later chunk, decodes at block borders and one token."""
    problem = make_latent_problem(
        SHARES, heads=heads, latent_dim=12, rope_dim=4, block_tokens=4, dtype=torch.float32, seed=heads
    )
    out = problem.empty_out()
    latent_attention(problem.q, problem.cache, problem.metadata, problem.scale, out)
    assert relative_error(out, exact_latent_attention(problem)) < 1e-6


def test_absorbed_weights_are_the_projected_heads() -> None:
    """W_V sum p l with q . W_K l by W_K^T q equals plain attention over each head's keys and values."""
    heads, latent, rope, plain, value = 3, 12, 4, 6, 5
    problem = make_latent_problem(
        [(9, 4)], heads=heads, latent_dim=latent, rope_dim=rope, block_tokens=4, dtype=torch.float32
    )
    up_key, up_value = torch.randn(heads, plain, latent), torch.randn(heads, value, latent)
    q = torch.randn(4, heads, plain + rope)
    absorbed = torch.cat((torch.einsum("nhp,hpd->nhd", q[..., :plain], up_key), q[..., plain:]), dim=-1)
    out = torch.empty(4, heads, latent)
    latent_attention(absorbed.contiguous(), problem.cache, problem.metadata, 0.3, out)
    got = torch.einsum("nhd,hvd->nhv", out, up_value)
    rows = problem.cache[problem.metadata.block_tables[0].long()].flatten(0, 2)[:13]
    keys = torch.einsum("sd,hpd->hsp", rows[:, :latent], up_key)
    keys = torch.cat((keys, rows[:, latent:].expand(heads, -1, -1)), dim=-1)
    values = torch.einsum("sd,hvd->hsv", rows[:, :latent], up_value)
    score = torch.einsum("nhd,hsd->hns", q, keys) * 0.3
    score.masked_fill_(torch.ones(4, 13, dtype=torch.bool).triu(10), float("-inf"))
    expected = torch.einsum("hns,hsv->nhv", score.softmax(-1), values)
    assert relative_error(got, expected) < 1e-5


def test_sizes_that_do_not_fit_are_refused() -> None:
    """Queries of another width than the cache's rows, an output of another shape."""
    problem = make_latent_problem([(0, 3)], heads=2, latent_dim=12, rope_dim=4, dtype=torch.float32)
    with pytest.raises(ValueError, match="do not fit cache"):
        latent_attention(problem.q[..., :15], problem.cache, problem.metadata, 1.0, problem.empty_out())
    with pytest.raises(ValueError, match="does not fit queries"):
        latent_attention(problem.q, problem.cache, problem.metadata, 1.0, torch.empty(3, 2, 16))


def test_deltas_that_the_inputs_do_not_take() -> None:
    """Other shapes and dtypes, and strides that are not those of the rows which they are added to."""
    heads, latent, rope, plain = 2, 12, 4, 6
    width, dim = latent + rope, plain + rope
    down = torch.ones(3, heads * dim + width)
    places = torch.zeros(3, dtype=torch.int64)

    def queries(rows: torch.Tensor) -> torch.Tensor:
        return rows[:, : heads * dim].view(3, heads, dim)

    def prepare(query_delta: torch.Tensor | None, delta: torch.Tensor | None) -> None:
        latent_inputs(
            queries(down), down[:, -width:-rope], down[:, -rope:], torch.empty(3, heads, width),
            torch.empty(2, 2, 1, width), places, places, torch.ones(1, 2, rope // 2), torch.ones(latent),
            eps=1e-6, interleaved=False, query_delta=query_delta, delta=delta,
        )  # fmt: skip

    added = torch.ones_like(down)
    prepare(queries(added), added[:, -width:])
    for query_delta in (queries(added)[:1], queries(added.bfloat16()), queries(added).contiguous()):
        with pytest.raises(ValueError, match="latent_inputs: a delta"):
            prepare(query_delta, None)
    for delta in (added[:1, -width:], added.bfloat16()[:, -width:], added[:, -width:].contiguous()):
        with pytest.raises(ValueError, match="latent_inputs: a delta"):
            prepare(None, delta)
