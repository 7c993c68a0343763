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
from lorikeet_kernels.attention.latent_inputs import latent_inputs_reference, prepare_latents
from lorikeet_kernels.attention.latent_prefill import latent_prefill
from lorikeet_kernels.attention.prompt_attention import attend_prompts, prompt_attention_reference
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


def check_latent_inputs() -> None:
    """Both rotations, more heads than a program takes, parts of one projection; deltas of all, some, none."""
    for interleaved in (False, True):
        for heads, plain, latent, rope in ((3, 16, 32, 8), (20, 5, 24, 12)):
            dtype = torch.float16 if heads == 3 else torch.float32
            tokens, dim = 5, plain + rope
            down = torch.randn(tokens, heads * dim + latent + rope).to(dtype)
            delta = torch.randn(down.shape)
            table, positions = torch.randn(30, 2, rope // 2), torch.randint(0, 30, (tokens,))
            slots, weight = torch.randperm(32)[:tokens], torch.rand(latent).to(dtype)
            for has_query, has_latent in ((False, False), (True, True), (True, False), (False, True)):
                results: list[tuple[torch.Tensor, ...]] = []
                for op in (latent_inputs_reference, prepare_latents):
                    own = down.clone()
                    query, latents, keys = own.split((heads * dim, latent, rope), dim=1)
                    q = query.view(tokens, heads, dim)
                    absorbed = torch.zeros(tokens, heads, latent + rope, dtype=dtype)
                    cache = torch.zeros(4, 8, 1, latent + rope, dtype=dtype)
                    normed = op(
                        q, latents, keys, absorbed, cache, slots, positions, table, weight, 1e-6,
                        interleaved=interleaved,
                        query_delta=delta[:, : heads * dim].view_as(q) if has_query else None,
                        delta=delta[:, heads * dim :] if has_latent else None,
                    )  # fmt: skip
                    results.append((normed, q, keys, absorbed, cache))
                for got, expected in zip(results[1], results[0], strict=True):
                    assert relative_error(got, expected) < TOLERANCE[dtype]


def check_prompt_attention() -> None:
    """Whole prompts beside chunks and decodes: ragged sizes, several tiles, those too short left alone."""
    shares = [(0, 7), (41, 1), (5, 26), (0, 39), (0, 1), (60, 9), (0, 40)]
    for heads, plain, value, rope, dtype in ((3, 20, 17, 12, torch.float32), (2, 16, 32, 8, torch.float16)):
        problem = make_latent_problem(shares, heads=1, latent_dim=16, rope_dim=8, dtype=dtype)
        tokens = problem.q.shape[0]
        q = torch.randn(tokens, heads * (plain + rope) + rope).to(dtype)
        shared = q[:, heads * (plain + rope) :]
        q = q[:, : heads * (plain + rope)].view(tokens, heads, -1)
        up = torch.randn(tokens, heads, plain + value).to(dtype)
        for most_fresh in (0, 38, 39):
            results = [torch.full((tokens, heads, value), float("nan"), dtype=dtype) for _ in range(2)]
            where = (q, up, shared, problem.metadata, 0.2)
            prompt_attention_reference(*where, results[0], most_fresh=most_fresh)
            attend_prompts(*where, results[1], LatentPrefillTiles(32, 16, 4, 1), most_fresh=most_fresh)
            assert torch.equal(results[0].isnan(), results[1].isnan())
            assert results[0].isnan().any()
            assert relative_error(results[1].nan_to_num(), results[0].nan_to_num()) < 2 * TOLERANCE[dtype]


CASES: dict[str, Callable[[], None]] = {
    "latent_attention": check_latent_attention,
    "latent_inputs": check_latent_inputs,
    "prompt_attention": check_prompt_attention,
}


if __name__ == "__main__":
    CASES[sys.argv[1]]()
