"""Tiles of latent attention: what fits a multiprocessor, and how work is shared out; no GPU."""

import itertools

import pytest

from lorikeet_kernels.tiling.latent_tiles import (
    MAX_SPLITS,
    MIN_SPLIT_TOKENS,
    MIXED_PARTS,
    LatentDecodeTiles,
    select_latent_decode,
    select_latent_prefill,
)
from lorikeet_kernels.tune_latent import CASES, MIN_TOKENS, LatentCase, candidates, splits_of

SHARED_BYTES = 227 * 1024
WIDTH = 576


@pytest.mark.parametrize("itemsize", [2, 4])
def test_tiles_fit_and_are_what_products_take(itemsize: int) -> None:
    """Queries and three steps of latents in shared memory; rows and steps powers of two from 16."""
    for requests, heads, tokens in itertools.product(
        (1, 7, 32, 300), (1, 4, 16, 20, 128), (16, 4096, 131072)
    ):
        tiles = select_latent_decode(requests, heads, tokens, itemsize)
        assert tiles.rows in (16, 32, 64)
        assert tiles.block_n in (16, 32)
        assert (tiles.rows + 3 * tiles.block_n) * WIDTH * itemsize <= SHARED_BYTES
        assert 1 <= tiles.splits <= min(MAX_SPLITS, max(1, tokens // MIN_SPLIT_TOKENS))
    prefill = select_latent_prefill(16, itemsize)
    assert (prefill.rows + 3 * prefill.block_n) * WIDTH * itemsize <= SHARED_BYTES


def test_one_wave_of_programs() -> None:
    """V2-Lite's 32 requests of 4k take 256 of the 264 places, V3's 128 of 132; one request is split up."""
    assert select_latent_decode(32, 16, 4096, 2) == LatentDecodeTiles(16, 32, 8, 4, 5)
    assert select_latent_decode(32, 128, 4096, 2) == LatentDecodeTiles(64, 32, 2, 8, 5)
    assert select_latent_decode(1, 16, 4096, 2).splits == 32
    assert select_latent_decode(300, 16, 4096, 2).splits == 1


def test_a_mixed_batch_splits_its_few_decodes() -> None:
    """Room for 256 requests leaves those that decode as many parts as memory allows."""
    assert select_latent_decode(256, 16, 131072, 2).splits == 1
    for requests, heads in ((256, 16), (64, 16), (64, 128), (1000, 128)):
        splits = select_latent_decode(requests, heads, 131072, 2, is_mixed=True).splits
        assert splits == 1 or splits * requests * heads <= max(MIXED_PARTS, 264 * 64)
    assert select_latent_decode(64, 16, 131072, 2, is_mixed=True).splits == 16


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_search_begins_with_the_rule(case: LatentCase) -> None:
    """And tries no tiles twice, none that do not fit, no split without work."""
    tried = candidates(case)
    if case.queries == 1:
        assert tried[0] == select_latent_decode(case.requests, case.heads, case.tokens, 2)
    else:
        assert tried[0] == select_latent_prefill(case.heads, 2)
    assert len(set(tried)) == len(tried) <= 60
    for tiles in tried:
        steps = (tiles.num_stages * 512 + tiles.num_key_stages * 64) * 64 if tiles.is_ring else 64 * WIDTH
        assert 2 * (tiles.rows * (WIDTH + 64) + steps) <= SHARED_BYTES
        assert splits_of(tiles) == 1 or splits_of(tiles) * MIN_TOKENS <= case.tokens


def test_floors_of_a_search() -> None:
    """Of few heads the latents' bytes, of many the products."""
    assert CASES["32x4k 16 heads"].floor_us == pytest.approx(35.4, abs=0.05)
    assert CASES["32x4k 128 heads"].floor_us == pytest.approx(46.2, abs=0.05)
    assert CASES["chunk 2k of 8k 16 heads"].floor_us == pytest.approx(647, abs=0.5)
