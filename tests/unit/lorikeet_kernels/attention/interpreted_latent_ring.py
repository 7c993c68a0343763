"""Latent attention through the ring, in Triton's interpreter, run by test_latent_interpreted.py."""

import sys
from collections.abc import Callable, Sequence

import gluon_stand_in
import ring_stand_in
import torch

ring_stand_in.install()

from lorikeet_kernels.attention import latent_ring, latent_ring_kernels  # noqa: E402 (Gluon stands in by now)
from lorikeet_kernels.attention.latent_attention import NEVER_FRESH  # noqa: E402
from lorikeet_kernels.attention.latent_decode import latent_decode  # noqa: E402
from lorikeet_kernels.attention.latent_prefill import latent_prefill  # noqa: E402
from lorikeet_kernels.benchmarking.latent_problem import (  # noqa: E402
    exact_latent_attention,
    make_latent_problem,
)
from lorikeet_kernels.testing import TOLERANCE, relative_error  # noqa: E402
from lorikeet_kernels.tiling.latent_tiles import LatentDecodeTiles, LatentPrefillTiles  # noqa: E402

DTYPE = torch.float16


def check(
    shares: Sequence[tuple[int, int]],
    heads: int,
    block_tokens: int,
    decode: LatentDecodeTiles,
    prefill: LatentPrefillTiles,
) -> None:
    """A mixed batch by both kernels, with and without its last request, a whole prompt."""
    problem = make_latent_problem(
        shares, heads=heads, latent_dim=128, rope_dim=64, block_tokens=block_tokens, dtype=DTYPE, seed=heads
    )
    assert latent_ring_kernels.can_ring(problem.cache, 128, DTYPE, on_hopper=True)
    metadata, out = problem.metadata, problem.empty_out()
    where = (
        problem.q, problem.cache, metadata.query_starts, metadata.sequence_lens, metadata.block_tables,
        problem.scale, out,
    )  # fmt: skip
    exact = exact_latent_attention(problem)
    latent_decode(*where, decode)
    fresh = shares[-1][1]
    latent_prefill(*where, prefill, most_fresh=fresh - 1)
    assert out[-fresh:].isnan().all()
    assert relative_error(out[:-fresh], exact[:-fresh]) < 2 * TOLERANCE[DTYPE]
    latent_prefill(*where, prefill, most_fresh=NEVER_FRESH)
    assert relative_error(out, exact) < 2 * TOLERANCE[DTYPE]


def check_small_pages() -> None:
    """Splits with and without work, one step of keys for three of latents."""
    tiles = LatentDecodeTiles(16, 64, 5, 4, 3, 1), LatentPrefillTiles(64, 64, 8, 2, num_key_stages=1)
    check([(0, 7), (129, 1), (130, 70), (0, 1), (64, 9), (350, 1), (0, 40)], 4, 16, *tiles)


def check_large_pages() -> None:
    """Two tiles of heads, a page a step, no splits."""
    tiles = LatentDecodeTiles(16, 64, 1, 4, 2, 2), LatentPrefillTiles(32, 64, 4, 2, num_key_stages=2)
    check([(129, 1), (0, 1), (64, 3), (70, 1), (0, 5)], 20, 64, *tiles)


def check_padding() -> None:
    """A request of no tokens, which pads a batch, gives 0."""
    problem = make_latent_problem(
        [(70, 1), (5, 1)], heads=4, latent_dim=128, rope_dim=64, dtype=torch.float16
    )
    metadata = problem.metadata
    for splits in (1, 2):
        out = problem.empty_out()
        lens = torch.tensor([71, 0], dtype=torch.int32)
        latent_decode(
            problem.q, problem.cache, metadata.query_starts, lens, metadata.block_tables, problem.scale, out,
            LatentDecodeTiles(16, 64, splits, 4, 3, 1),
        )  # fmt: skip
        assert torch.equal(out[1], torch.zeros_like(out[1]))
        assert relative_error(out[0], exact_latent_attention(problem)[0]) < 2 * TOLERANCE[DTYPE]


CASES: dict[str, Callable[[], None]] = {
    "small_pages": check_small_pages,
    "large_pages": check_large_pages,
    "padding": check_padding,
}


if __name__ == "__main__":
    for module in (latent_ring, latent_ring_kernels):
        gluon_stand_in.attach(module)
    CASES[sys.argv[1]]()
