"""What bench_base times of latent attention: DeepSeek-V2-Lite's 16 heads and V3's 128."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from lorikeet_kernels.attention.latent_attention import latent_attention
from lorikeet_kernels.benchmarking.latent_problem import LatentProblem, make_latent_problem

LATENT, ROPE = 512, 64
BF16 = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Point:
    """Calls over cold inputs, the bytes that one must move and the operations that it must do."""

    name: str
    calls: list[Callable[[], object]]
    num_bytes: float
    flop: float


def _attention_call(problem: LatentProblem) -> Callable[[], object]:
    out = problem.empty_out()
    return lambda: latent_attention(problem.q, problem.cache, problem.metadata, problem.scale, out)


def attention_points() -> Iterator[Point]:
    """Decodes, and a chunk of 2,048 queries over 8,192 latents.

    A decode reads each latent row once, its queries, and writes its sums. Each pair of a query's head and a
    visible row takes LATENT + ROPE multiplications for the score and LATENT for the sum.
    """
    for heads, name, requests, past, queries in (
        (16, "decode 32x4k", 32, 4095, 1),
        (128, "decode 32x4k", 32, 4095, 1),
        (16, "decode 1x4k", 1, 4095, 1),
        (16, "decode 8x32k", 8, 32767, 1),
        (16, "chunk 2k of 8k", 1, 6144, 2048),
        (128, "chunk 2k of 8k", 1, 6144, 2048),
    ):
        calls: list[Callable[[], object]] = []
        for seed in range(3 if queries == 1 else 1):
            problem = make_latent_problem(
                [(past, queries)] * requests,
                heads=heads, latent_dim=LATENT, rope_dim=ROPE, dtype=BF16, device="cuda", seed=seed,
            )  # fmt: skip
            calls.append(_attention_call(problem))
        width, pairs = LATENT + ROPE, requests * queries * (past + (queries + 1) / 2)
        num_bytes = 2.0 * requests * ((past + queries) * width + queries * heads * (width + LATENT))
        yield Point(f"latent {name} {heads} heads", calls, num_bytes, 2.0 * heads * (width + LATENT) * pairs)
