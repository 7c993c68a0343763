"""Which warps of a projection add up a delta as those of its own launch do."""

import pytest

from lorikeet_kernels.lora.joined_delta import add_alike
from lorikeet_kernels.tiling import PairTiles


@pytest.mark.parametrize(
    ("tiles", "max_rank", "most_warps"),
    [
        (PairTiles(16, 256, 512, 4), 16, 16),
        (PairTiles(16, 512, 512, 4), 16, 16),  # a row of 512 is two loads of one warp, not one of two
        (PairTiles(32, 256, 256, 4), 32, 32),
        (PairTiles(16, 256, 128, 4), 16, 8),  # 128 rows of B keep 8 warps busy with whole loads
        (PairTiles(32, 256, 256, 4), 8, 8),  # ranks of 8 leave 8 rows of A
        (PairTiles(32, 256, 256, 4), 2, 0),  # two rows of A: its own four warps share them already
    ],
)
def test_warps_that_add_alike(tiles: PairTiles, max_rank: int, most_warps: int) -> None:
    """Each with whole rows of both tiles, eight numbers a lane."""
    assert [n for n in (1, 2, 4, 8, 16, 32) if add_alike(tiles, max_rank, n)] == [
        n for n in (1, 2, 4, 8, 16, 32) if n <= most_warps
    ]
