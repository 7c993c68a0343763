"""Random batches over a paged cache of latents, and plain float64 answers: for tests and bench."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lorikeet_kernels.attention.attention_metadata import AttentionMetadata

SPARE_BLOCKS = 3


@dataclass(frozen=True, slots=True)
class LatentProblem:
    """Queries [T, H, latent + rope], a cache whose unused places are NaN, and where all lies."""

    q: torch.Tensor
    cache: torch.Tensor  # [blocks, block_tokens, 1, latent + rope]
    metadata: AttentionMetadata
    latent_dim: int
    scale: float

    def empty_out(self) -> torch.Tensor:
        """NaN where a kernel writes nothing."""
        return self.q.new_full((*self.q.shape[:2], self.latent_dim), float("nan"))


def make_latent_problem(
    shares: Sequence[tuple[int, int]],
    *,
    heads: int,
    latent_dim: int,
    rope_dim: int,
    dtype: torch.dtype,
    block_tokens: int = 16,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> LatentProblem:
    """`shares` are each request's tokens computed before and in this batch; its blocks are shuffled."""
    generator = torch.Generator(device=device).manual_seed(seed)
    lengths = [sum(share) for share in shares]
    counts = [-(-length // block_tokens) for length in lengths]
    num_blocks = sum(counts) + SPARE_BLOCKS
    width = latent_dim + rope_dim
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    tables = torch.zeros((len(shares), max(1, *counts)), dtype=torch.int32)
    cache = torch.randn((num_blocks, block_tokens, 1, width), generator=generator, device=device)
    cache = cache.mul_(0.5).to(dtype)
    starts, first = [0], 0
    for index, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        tables[index, :count] = order[first : first + count]
        if length < count * block_tokens:
            cache[int(order[first + count - 1]), length - (count - 1) * block_tokens :] = float("nan")
        first += count
        starts.append(starts[-1] + shares[index][1])
    cache[order[first:].long()] = float("nan")
    # wider than a query, so that a row's stride is not its size
    rows = torch.randn((starts[-1], heads + 1, width), generator=generator, device=device).to(dtype)
    metadata = AttentionMetadata(
        query_starts=torch.tensor(starts, dtype=torch.int32, device=device),
        sequence_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        slot_mapping=torch.zeros(0, dtype=torch.int64, device=device),
        query_starts_host=tuple(starts),
        sequence_lens_host=tuple(lengths),
    )
    return LatentProblem(rows[:, :heads], cache, metadata, latent_dim, 2.0 * width**-0.5)


def exact_latent_attention(problem: LatentProblem) -> torch.Tensor:
    """Float64, a request at a time; zeros for requests without tokens."""
    out = torch.zeros(
        (*problem.q.shape[:2], problem.latent_dim), dtype=torch.float64, device=problem.q.device
    )
    starts = problem.metadata.query_starts.tolist()
    for index, length in enumerate(problem.metadata.sequence_lens.tolist()):
        begin, end = starts[index], starts[index + 1]
        if length == 0:
            continue
        table = problem.metadata.block_tables[index].long()
        rows = problem.cache[table].flatten(0, 2)[:length].double()
        score = torch.einsum("nhd,sd->hns", problem.q[begin:end].double(), rows) * problem.scale
        position = torch.arange(length - (end - begin), length, device=rows.device)[:, None]
        score.masked_fill_(torch.arange(length, device=rows.device) > position, float("-inf"))
        values = rows[:, : problem.latent_dim]
        out[begin:end] = torch.einsum("hns,sd->nhd", score.softmax(-1), values)
    return out
