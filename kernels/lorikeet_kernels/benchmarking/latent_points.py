"""What bench_base times of latent attention: DeepSeek-V2-Lite's 16 heads and V3's 128."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from lorikeet_kernels.attention.latent_attention import latent_attention
from lorikeet_kernels.attention.latent_inputs import latent_inputs
from lorikeet_kernels.attention.prompt_attention import prompt_attention
from lorikeet_kernels.benchmarking.bench_problem import COLD_BYTES
from lorikeet_kernels.benchmarking.latent_problem import LatentProblem, make_latent_problem
from lorikeet_kernels.dense.head_linear import head_linear
from lorikeet_kernels.dense.linear import linear
from lorikeet_kernels.lora.head_lora import HeadRows, head_lora
from lorikeet_kernels.lora.lora_segments import LoraSegments, make_lora_segments
from lorikeet_kernels.lora.lora_tables import LoraTables
from lorikeet_kernels.lora.lora_workspace import LoraWorkspace
from lorikeet_kernels.testing import SiteShape, SlotSite, make_tables

LATENT, ROPE, PLAIN, VALUE = 512, 64, 128, 128
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
        cold = max(3, -(-COLD_BYTES // (2 * requests * past * (LATENT + ROPE))))
        for seed in range(cold if queries == 1 else 1):
            problem = make_latent_problem(
                [(past, queries)] * requests,
                heads=heads, latent_dim=LATENT, rope_dim=ROPE, dtype=BF16, device="cuda", seed=seed,
            )  # fmt: skip
            calls.append(_attention_call(problem))
        width, pairs = LATENT + ROPE, requests * queries * (past + (queries + 1) / 2)
        num_bytes = 2.0 * requests * ((past + queries) * width + queries * heads * (width + LATENT))
        yield Point(f"latent {name} {heads} heads", calls, num_bytes, 2.0 * heads * (width + LATENT) * pairs)


def prompt_points(heads: int = 16) -> Iterator[Point]:
    """Whole prompts over projected heads and absorbed, from where the former takes fewer products."""
    for tokens in (384, 512, 1024, 2048, 4096):
        yield from _prompt_points(heads, tokens)


def _prompt_points(heads: int, tokens: int) -> Iterator[Point]:
    """One prompt: over projected heads, the projection counted, and absorbed over its cached latents."""
    problem = make_latent_problem(
        [(0, tokens)], heads=heads, latent_dim=LATENT, rope_dim=ROPE, dtype=BF16, device="cuda"
    )
    q = torch.randn(tokens, heads, PLAIN + ROPE, device="cuda", dtype=BF16)
    latent, shared = (torch.randn(tokens, size, device="cuda", dtype=BF16) for size in (LATENT, ROPE))
    weight = torch.randn(heads * (PLAIN + VALUE), LATENT, device="cuda", dtype=BF16) * LATENT**-0.5
    out = q.new_empty(tokens, heads, VALUE)

    def project() -> torch.Tensor:
        up = linear(latent, weight).view(tokens, heads, -1)
        return prompt_attention(q, up, shared, problem.metadata, 0.07, out, most_fresh=0)

    pairs = heads * tokens * (tokens + 1) / 2
    flop = 2.0 * (tokens * LATENT * heads * (PLAIN + VALUE) + pairs * (PLAIN + ROPE + VALUE))
    num_bytes = 2.0 * tokens * heads * (PLAIN + ROPE + 2 * (PLAIN + VALUE) + VALUE)
    yield Point(f"latent prompt of {tokens} projected {heads} heads", [project], num_bytes, flop)
    num_bytes, flop = 2.0 * tokens * heads * (2 * LATENT + ROPE), 2.0 * pairs * (2 * LATENT + ROPE)
    yield Point(
        f"latent prompt of {tokens} absorbed {heads} heads", [_attention_call(problem)], num_bytes, flop
    )


def around_points(heads: int = 16) -> Iterator[Point]:
    """What absorbing adds beside attention: projections of heads, their adapters, and the inputs' launch."""
    stride, num_slots, rank = PLAIN + VALUE, 8, 16
    site = [SiteShape(LATENT, heads * stride)]
    tables = make_tables(site, [[SlotSite(rank)]] * num_slots, dtype=BF16, device="cuda")
    table = torch.randn(8192, 2, ROPE // 2, device="cuda")
    norm = torch.ones(LATENT, device="cuda", dtype=BF16)
    for tokens in (1, 32, 2048):
        slots = (torch.arange(tokens, device="cuda") % num_slots).to(torch.int32)
        segments = make_lora_segments(slots, num_slots, LoraWorkspace(torch.device("cuda")))
        weights = [
            torch.randn(heads, stride, LATENT, device="cuda", dtype=BF16) for _ in range(8)
        ]  # those of layers that follow one another
        down = torch.randn(tokens, heads * (PLAIN + ROPE) + LATENT + ROPE, device="cuda", dtype=BF16)
        query, latent, shared = down.split((heads * (PLAIN + ROPE), LATENT, ROPE), dim=1)
        q = query.view(tokens, heads, -1)
        absorbed = q.new_zeros(tokens, heads, LATENT + ROPE)
        sums, out = absorbed[..., :LATENT].contiguous(), q.new_zeros(tokens, heads, VALUE)
        cache = q.new_zeros(tokens // 16 + 1, 16, 1, LATENT + ROPE)
        places = torch.arange(tokens, device="cuda")
        plain, space = q[..., :PLAIN], absorbed[..., :LATENT]
        rows = 2.0 * tokens * heads
        yield Point(
            f"latent absorb and project T={tokens}",
            [partial(_project_heads, plain, space, sums, out, weight) for weight in weights],
            2.0 * heads * stride * LATENT + rows * (PLAIN + 2 * LATENT + VALUE),
            2.0 * tokens * heads * stride * LATENT,
        )
        used = 2.0 * rank * (2 * LATENT + heads * stride) * min(tokens, num_slots)
        yield Point(
            f"latent adapters on both T={tokens}",
            [partial(_adapt_heads, plain, space, sums, out, segments, tables)] * 8,
            used + rows * (PLAIN + 3 * LATENT + 2 * VALUE),
            0.0,
        )
        yield Point(
            f"latent inputs T={tokens}",
            [
                partial(
                    latent_inputs, q, latent, shared, absorbed, cache, places, places, table, norm, 1e-6,
                    interleaved=True,
                )
            ]
            * 8,
            2.0 * tokens * (3 * heads * ROPE + 3 * LATENT + 3 * ROPE),
            0.0,
        )  # fmt: skip


def _project_heads(
    plain: torch.Tensor, space: torch.Tensor, sums: torch.Tensor, out: torch.Tensor, weight: torch.Tensor
) -> None:
    head_linear(plain, weight[:, :PLAIN], space)
    head_linear(sums, weight[:, PLAIN:].transpose(1, 2), out)


def _adapt_heads(
    plain: torch.Tensor,
    space: torch.Tensor,
    sums: torch.Tensor,
    out: torch.Tensor,
    segments: LoraSegments,
    tables: LoraTables,
) -> None:
    head_lora(space, plain, segments, tables, 0, HeadRows(PLAIN + VALUE, 0, PLAIN), down=True)
    head_lora(out, sums, segments, tables, 0, HeadRows(PLAIN + VALUE, PLAIN, VALUE), down=False)
