"""Tiles of latent attention: what fits a multiprocessor, and how work is shared out; no GPU."""

import itertools

import pytest

from lorikeet_kernels.tiling.latent_tiles import (
    MAX_SPLITS,
    MIN_SPLIT_TOKENS,
    MIXED_PARTS,
    RING_STEP,
    SHARED_BYTES,
    LatentDecodeTiles,
    projects_prompts,
    ring_bytes,
    select_latent_decode,
    select_latent_prefill,
)
from lorikeet_kernels.tune_latent import CASES, MIN_TOKENS, LatentCase, candidates, splits_of

LATENT, WIDTH = 512, 576


@pytest.mark.parametrize("itemsize", [2, 4])
def test_tiles_fit_and_are_what_products_take(itemsize: int) -> None:
    """Queries and three steps of latents in shared memory; rows and steps powers of two from 16."""
    for requests, heads, tokens in itertools.product(
        (1, 7, 32, 300), (1, 4, 16, 20, 128), (16, 4096, 131072)
    ):
        tiles = select_latent_decode(requests, heads, tokens, itemsize, rings=False)
        assert tiles.rows in (16, 32, 64)
        assert tiles.block_n in (16, 32)
        assert (tiles.rows + 3 * tiles.block_n) * WIDTH * itemsize <= SHARED_BYTES
        assert 1 <= tiles.splits <= min(MAX_SPLITS, max(1, tokens // MIN_SPLIT_TOKENS))
        ring = select_latent_decode(requests, heads, tokens, 2, rings=True)
        assert ring.is_ring
        assert ring.rows == tiles.rows or itemsize > 2
        assert ring_bytes(ring, LATENT, WIDTH) <= SHARED_BYTES
        assert 1 <= ring.splits <= min(MAX_SPLITS, max(1, tokens // RING_STEP))
    prefill = select_latent_prefill(16, itemsize, rings=False)
    assert (prefill.rows + 3 * prefill.block_n) * WIDTH * itemsize <= SHARED_BYTES
    assert ring_bytes(select_latent_prefill(16, 2, rings=True), LATENT, WIDTH) <= SHARED_BYTES


def test_float32_takes_no_ring() -> None:
    """Its products are not the tensor cores'."""
    assert not select_latent_decode(32, 16, 4096, 4, rings=False).is_ring
    assert not select_latent_prefill(16, 4, rings=False).is_ring


def test_one_wave_of_programs() -> None:
    """V2-Lite's 32 requests of 4k take 128 of 132 places, V3's as many; one request is split up."""
    assert select_latent_decode(32, 16, 4096, 2, rings=True) == LatentDecodeTiles(16, 64, 4, 4, 2, 2)
    assert select_latent_decode(32, 128, 4096, 2, rings=True) == LatentDecodeTiles(64, 64, 2, 8, 2, 1)
    assert select_latent_decode(1, 16, 4096, 2, rings=True).splits == 64
    assert select_latent_decode(300, 16, 4096, 2, rings=True).splits == 1
    assert select_latent_decode(32, 16, 4096, 2, rings=False) == LatentDecodeTiles(16, 32, 8, 4, 5)


def test_a_mixed_batch_splits_its_few_decodes() -> None:
    """Room for 256 requests leaves those that decode as many parts as memory allows."""
    assert select_latent_decode(256, 16, 131072, 2, rings=True).splits == 1
    for requests, heads in ((256, 16), (64, 16), (64, 128), (1000, 128)):
        splits = select_latent_decode(requests, heads, 131072, 2, rings=True, is_mixed=True).splits
        assert splits == 1 or splits * requests * heads <= max(MIXED_PARTS, 264 * 64)
    assert select_latent_decode(64, 16, 131072, 2, rings=True, is_mixed=True).splits == 16


@pytest.mark.parametrize(("device", "projects"), [("NVIDIA H200", True), ("another", False), ("", False)])
def test_prompts_are_projected_where_that_was_measured(device: str, projects: bool) -> None:
    """Other devices attend over the cache."""
    assert projects_prompts(device) == projects


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_search_begins_with_the_rule(case: LatentCase) -> None:
    """And tries no tiles twice, none that do not fit, no split without work."""
    tried = candidates(case)
    if case.queries == 1:
        assert tried[0] == select_latent_decode(case.requests, case.heads, case.tokens, 2, rings=True)
    else:
        assert tried[0] == select_latent_prefill(case.heads, 2, rings=True)
    assert len(set(tried)) == len(tried) <= 60
    for tiles in tried:
        assert (tiles.rows + tiles.block_n) * WIDTH * 2 <= SHARED_BYTES
        assert not tiles.is_ring or ring_bytes(tiles, LATENT, WIDTH) <= SHARED_BYTES
        assert splits_of(tiles) == 1 or splits_of(tiles) * MIN_TOKENS <= case.tokens


def test_floors_of_a_search() -> None:
    """Of few heads the latents' bytes, of many the products."""
    assert CASES["32x4k 16 heads"].floor_us == pytest.approx(35.4, abs=0.05)
    assert CASES["32x4k 128 heads"].floor_us == pytest.approx(46.2, abs=0.05)
    assert CASES["chunk 2k of 8k 16 heads"].floor_us == pytest.approx(647, abs=0.5)
