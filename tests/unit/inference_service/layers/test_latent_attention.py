"""The latent layer: absorbed and projected prompts agree, with adapters and without, whole and in chunks."""

from dataclasses import replace

import pytest
import torch

from inference_service.layers.batch import ForwardBatch, LayerCache, LoraBatch
from inference_service.layers.latent_attention import LatentAttention, LatentQuery, LatentShape
from inference_service.layers.linear import Linear, LinearSites
from inference_service.layers.norm import RmsNorm
from lorikeet_kernels.attention.attention_metadata import AttentionMetadata
from lorikeet_kernels.attention.latent_attention import NEVER_FRESH
from lorikeet_kernels.lora.lora_segments import make_lora_segments
from lorikeet_kernels.lora.side_stream import SideStream
from lorikeet_kernels.testing import SiteShape, SlotSite, make_tables, relative_error
from lorikeet_kernels.tiling.lora_overlap import BesideRows

HIDDEN, BLOCK = 24, 4
SHAPE = LatentShape(3, 16, 10, 4, 6, 0.3, is_pairwise=True, most_fresh=NEVER_FRESH)
QUERY = SHAPE.num_heads * (SHAPE.plain_dim + SHAPE.rope_dim)
DOWN = QUERY + SHAPE.latent_dim + SHAPE.rope_dim
UP, VALUES = SHAPE.num_heads * (SHAPE.plain_dim + SHAPE.value_dim), SHAPE.num_heads * SHAPE.value_dim
SITES = ((HIDDEN, QUERY), (HIDDEN, DOWN - QUERY), (SHAPE.latent_dim, UP), (VALUES, HIDDEN))
QUERY_LATENT = 20
LATENT_SITES = ((HIDDEN, QUERY_LATENT), *SITES[1:], (QUERY_LATENT, QUERY))


def make_layer(most_fresh: int, *, has_query_latent: bool = False) -> LatentAttention:
    """Four sites, the first two side by side, and the queries' own; the same weights each time."""
    generator = torch.Generator().manual_seed(3)

    def linear(rows: int, columns: int, indices: tuple[int, ...], widths: tuple[int, ...]) -> Linear:
        weight = torch.randn(rows, columns, generator=generator) * columns**-0.5
        return Linear(weight, None, LinearSites(indices, widths, (1,) * len(indices)))

    first, query = QUERY, None
    if has_query_latent:
        first, norm = QUERY_LATENT, RmsNorm(torch.rand(QUERY_LATENT, generator=generator), 1e-6)
        query = LatentQuery(norm, linear(QUERY, QUERY_LATENT, (4,), (QUERY,)))
    return LatentAttention(
        replace(SHAPE, most_fresh=most_fresh),
        linear(first + DOWN - QUERY, HIDDEN, (0, 1), (first, DOWN - QUERY)),
        query,
        RmsNorm(torch.rand(SHAPE.latent_dim, generator=generator), 1e-6),
        linear(UP, SHAPE.latent_dim, (2,), (UP,)),
        linear(HIDDEN, VALUES, (3,), (HIDDEN,)),
        rope_table=torch.randn(64, 2, SHAPE.rope_dim // 2, generator=generator),
    )


def run(
    layer: LatentAttention,
    x: torch.Tensor,
    chunks: list[list[int]],
    slots: list[int],
    side: SideStream | None = None,
) -> torch.Tensor:
    """Requests of x's rows, one after another in x; `chunks[i]` are the tokens that step i takes of each."""
    sites = [SiteShape(*site) for site in (SITES if layer.query is None else LATENT_SITES)]
    tables = make_tables(sites, [[SlotSite(rank) for _ in sites] for rank in (8, 0)], dtype=torch.float32)
    lengths = [sum(counts) for counts in zip(*chunks, strict=True)]
    offsets = [sum(lengths[:index]) for index in range(len(lengths))]
    width = -(-max(lengths) // BLOCK)
    blocks = torch.arange(len(lengths) * width, dtype=torch.int32).view(len(lengths), width)
    rows = torch.full((blocks.numel(), BLOCK, 1, SHAPE.latent_dim + SHAPE.rope_dim), float("nan"))
    cache = LayerCache(rows, rows[..., : SHAPE.latent_dim])
    out, done = torch.empty_like(x), [0] * len(lengths)
    for counts in chunks:
        ranges = [(begin, begin + count) for begin, count in zip(done, counts, strict=True)]
        positions = torch.cat([torch.arange(*one) for one in ranges])
        place = torch.cat([torch.arange(*one) + at for one, at in zip(ranges, offsets, strict=True)])
        request = torch.cat([torch.full((count,), index) for index, count in enumerate(counts)])
        done = [end for _, end in ranges]
        starts = [sum(counts[:index]) for index in range(len(counts) + 1)]
        metadata = AttentionMetadata(
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor(done, dtype=torch.int32),
            blocks,
            request * width * BLOCK + positions,
            tuple(starts),
            tuple(done),
        )
        token_slot = torch.tensor(slots, dtype=torch.int32)[request]
        lora = LoraBatch(
            make_lora_segments(token_slot, 2), tables, is_active=any(s >= 0 for s in slots), side=side
        )
        batch = ForwardBatch(positions, positions, metadata, (cache,), lora)
        out[place] = layer(x[place], batch, cache).whole()
    return out


@pytest.mark.parametrize("slots", [[-1, -1, -1], [0, -1, 1]])
def test_all_ways_agree(slots: list[int]) -> None:
    """Prompts absorbed, projected, in chunks of which the first is projected, and token by token."""
    x = torch.randn(3 * 11, HIDDEN)
    whole = [[11, 11, 11]]
    expected = run(make_layer(NEVER_FRESH), x, whole, slots)
    assert expected.isfinite().all()
    for most_fresh, chunks in (
        (3, whole),
        (3, [[7, 2, 4], [4, 9, 7]]),
        (3, [[1, 1, 1]] * 11),
        (NEVER_FRESH, [[5, 1, 9], [5, 9, 1], [1, 1, 1]]),
    ):
        got = run(make_layer(most_fresh), x, chunks, slots)
        assert relative_error(got, expected) < 5e-6


def test_rows_of_the_base_keep_their_bits_beside_adapters() -> None:
    """The second request is the base model's."""
    x = torch.randn(3 * 5, HIDDEN)
    alone = run(make_layer(NEVER_FRESH), x, [[5, 5, 5]], [-1, -1, -1])
    beside = run(make_layer(NEVER_FRESH), x, [[5, 5, 5]], [0, -1, 1])
    assert torch.equal(alone[5:], beside[5:])
    assert not torch.equal(alone[:5], beside[:5])


@pytest.mark.parametrize("has_query_latent", [False, True])
@pytest.mark.parametrize("most_fresh", [NEVER_FRESH, 3])
def test_adapters_beside_give_the_same_bits(most_fresh: int, has_query_latent: bool) -> None:
    """Deltas apart, which the inputs' launch adds, and the norm of the queries' latent."""
    x = torch.randn(3 * 5, HIDDEN)
    layer = make_layer(most_fresh, has_query_latent=has_query_latent)
    in_place = run(layer, x, [[5, 5, 5]], [0, -1, 1])
    beside = run(layer, x, [[5, 5, 5]], [0, -1, 1], SideStream(None, BesideRows()))
    assert torch.equal(beside, in_place)
    assert not torch.equal(run(layer, x, [[5, 5, 5]], [-1, -1, -1]), in_place)
