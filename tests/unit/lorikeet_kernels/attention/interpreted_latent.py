"""Cases of latent attention for the Triton interpreter, run by test_latent_interpreted.py, a process each.

TRITON_INTERPRET is read when a kernel is defined, so it must be set before the first import. float32 and
float16 only: the interpreter multiplies bfloat16 as bit patterns.
"""

import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from triton.runtime import interpreter

from lorikeet_kernels.attention.latent_attention import NEVER_FRESH, latent_attention_reference
from lorikeet_kernels.attention.latent_decode import latent_decode
from lorikeet_kernels.attention.latent_prefill import latent_prefill
from lorikeet_kernels.benchmarking.latent_problem import make_latent_problem
from lorikeet_kernels.testing import TOLERANCE, relative_error
from lorikeet_kernels.tiling.latent_tiles import LatentDecodeTiles, LatentPrefillTiles

_patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor_for_numpy(tensor: Any, scope: Any) -> None:
    """Triton 3.6 turns arrays of one element into loop bounds by int(), which NumPy 2.4 refuses."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_tensor_for_numpy


def check_latent_attention() -> None:
    """A mixed batch by both kernels together: head tiles, ragged sizes, both orders of operands, splits."""
    shares = [(0, 7), (41, 1), (5, 26), (0, 1), (7, 1), (60, 9), (33, 1), (0, 40)]
    cases = (
        (4, (32, 8), (16, 3), 64, torch.float32),
        (16, (32, 8), (16, 1), 32, torch.float16),
        (20, (24, 12), (16, 9), 32, torch.float32),
        (72, (16, 16), (64, 2), 64, torch.float32),
    )
    for heads, (latent, rope), (decode_rows, splits), prefill_rows, dtype in cases:
        problem = make_latent_problem(
            shares, heads=heads, latent_dim=latent, rope_dim=rope, block_tokens=8, dtype=dtype
        )
        metadata = problem.metadata
        expected = problem.empty_out()
        latent_attention_reference(problem.q, problem.cache, metadata, problem.scale, expected)
        out = problem.empty_out()
        where = (
            problem.q, problem.cache, metadata.query_starts, metadata.sequence_lens, metadata.block_tables,
            problem.scale, out,
        )  # fmt: skip
        latent_decode(*where, LatentDecodeTiles(decode_rows, 16, splits, 4, 1))
        decodes = [row for row in range(out.shape[0]) if not out[row].isnan().any()]
        starts = metadata.query_starts.tolist()
        assert decodes == [begin for begin, end in pairwise(starts) if end - begin == 1]
        tiles = LatentPrefillTiles(prefill_rows, 16, 4, 1)
        latent_prefill(*where, tiles, most_fresh=39)
        assert out[-40:].isnan().all()
        assert relative_error(out[:-40], expected[:-40]) < 2 * TOLERANCE[dtype]
        latent_prefill(*where, tiles, most_fresh=NEVER_FRESH)
        assert relative_error(out, expected) < 2 * TOLERANCE[dtype]


CASES: dict[str, Callable[[], None]] = {"latent_attention": check_latent_attention}


if __name__ == "__main__":
    CASES[sys.argv[1]]()
