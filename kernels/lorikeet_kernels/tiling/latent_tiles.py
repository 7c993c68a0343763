"""Tiles of latent attention: a rule from what fits an H200's shared memory and registers."""

from dataclasses import dataclass

from lorikeet_kernels.tiling.measured import MEASURED

MIN_SPLIT_TOKENS = 128
MAX_SPLITS = 128
MAX_ROWS = 64  # (query, head) pairs a program: their sums take 128 registers of each of 256 threads
# Programs that an H200's 132 multiprocessors hold at once: two each of up to 16 rows, one of more.
PROGRAMS_OF_FEW_ROWS, PROGRAMS_OF_MANY_ROWS = 264, 132
FEW_ROWS = 16
RING_STEP = 64
# Of a program's rows: steps of latents, steps of keys, warps. Queries take the rest of the shared memory.
RINGS = {16: (2, 2, 4), 32: (2, 2, 4), 64: (2, 1, 8)}
SHARED_BYTES = 227 * 1024
"""Of a program, on Hopper."""
_BARRIER_BYTES = 2048  # of a ring's kernel: its barriers, and what warps exchange a step's largest scores by
# Of a mixed batch, as long as all parts' sums (2 KB a head and part) stay below 32 MB.
MIXED_SPLITS, MIXED_PARTS = 16, 16384

# Measured there for 16 heads: a prompt of 384 takes 20 us over projected heads and 47 absorbed, one of 2,048
# takes 76 and 423.
FASTER_PROJECTED = frozenset({"NVIDIA H200"})
"""Devices, by name, where whole prompts were measured to take less over projected heads than absorbed."""


@dataclass(frozen=True, slots=True)
class LatentDecodeTiles:
    """`rows` heads a program, `block_n` latents a step, `splits` programs along the sequence.

    With `num_key_stages` latents pass a ring of `num_stages` steps and their keys one of that many.
    """

    rows: int
    block_n: int
    splits: int
    num_warps: int
    num_stages: int
    num_key_stages: int = 0

    @property
    def is_ring(self) -> bool:
        """Whether the kernel is that of latent_ring, whose steps are of 64 latents."""
        return self.num_key_stages > 0


@dataclass(frozen=True, slots=True)
class LatentPrefillTiles:
    """`rows` (queries times heads) by `block_n` latents a step; `num_key_stages` as of a decode."""

    rows: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    num_key_stages: int = 0

    @property
    def is_ring(self) -> bool:
        """As of a decode."""
        return self.num_key_stages > 0


def ring_bytes(tiles: LatentDecodeTiles | LatentPrefillTiles, latent_dim: int, width: int) -> int:
    """Shared memory of 16-bit queries, probabilities and the rings of latents and keys, and barriers."""
    ring = tiles.num_stages * latent_dim + tiles.num_key_stages * (width - latent_dim)
    return 2 * (tiles.rows * (width + RING_STEP) + ring * RING_STEP) + _BARRIER_BYTES


def most_ring_bytes(latent_dim: int, width: int) -> int:
    """The most that a ring's kernel takes over cached rows of `width` elements, whatever the batch."""
    return max(
        ring_bytes(LatentDecodeTiles(rows, RING_STEP, 1, num_warps, stages, key_stages), latent_dim, width)
        for rows, (stages, key_stages, num_warps) in RINGS.items()
    )


def projects_prompts(device: str) -> bool:
    """Whether whole prompts are attended over projected heads: where that was measured to be faster."""
    return MEASURED.name(device) in FASTER_PROJECTED


def select_latent_decode(
    num_requests: int, heads: int, max_tokens: int, itemsize: int, *, rings: bool, is_mixed: bool = False
) -> LatentDecodeTiles:
    """Tiles for `num_requests` of up to `max_tokens` latents each; of the ring's kernel with `rings`.

    A batch that `is_mixed` has room for requests that are no decodes: few long ones fill what they leave.

    A row of latents is so wide (1,152 bytes in DeepSeek's models) that a ring of two steps of 64 fills a
    multiprocessor's shared memory. In Triton's pipeline two steps of 32 fill half of it: with up to 16 heads
    two programs take turns at copying and multiplying. Its stages count the copy of the block table's entries
    too: five keep two steps of latents in flight.
    """
    rows = FEW_ROWS
    while rows < min(heads, MAX_ROWS):
        rows *= 2
    programs = num_requests * -(-heads // rows)
    room = PROGRAMS_OF_FEW_ROWS if rows == FEW_ROWS and not rings else PROGRAMS_OF_MANY_ROWS
    splits = room // programs
    if is_mixed:
        splits = max(splits, min(MIXED_SPLITS, MIXED_PARTS // (num_requests * heads)))
    splits = max(1, min(splits, max_tokens // (RING_STEP if rings else MIN_SPLIT_TOKENS), MAX_SPLITS))
    if itemsize > 2:
        return LatentDecodeTiles(FEW_ROWS, 16, splits, 4, 3)
    if rings:
        stages, key_stages, num_warps = RINGS[rows]
        return LatentDecodeTiles(rows, RING_STEP, splits, num_warps, stages, key_stages)
    return LatentDecodeTiles(rows, 32, splits, 4 if rows == FEW_ROWS else 8, 5)


def select_latent_prefill(heads: int, itemsize: int, *, rings: bool) -> LatentPrefillTiles:
    """Tiles of the prefill kernel, of the ring's with `rings`."""
    del heads
    if itemsize > 2:
        return LatentPrefillTiles(FEW_ROWS, 16, 4, 3)
    if rings:
        stages, key_stages, num_warps = RINGS[MAX_ROWS]
        return LatentPrefillTiles(MAX_ROWS, RING_STEP, num_warps, stages, num_key_stages=key_stages)
    return LatentPrefillTiles(MAX_ROWS, 32, 8, 5)


def select_prompt(dim: int, itemsize: int) -> LatentPrefillTiles:
    """Tiles over whole prompts, whose heads are projected up: queries of one head by keys."""
    if itemsize > 2 or dim > 256:
        return LatentPrefillTiles(32, 16, 4, 2)
    return LatentPrefillTiles(128, 64, 8, 3)
