"""Tiles of paged attention: rules found by measurement on an H200, the same on other cards."""

from dataclasses import dataclass

TARGET_PROGRAMS = 256  # about two on each of an H200's multiprocessors
MIN_SPLIT_TOKENS = 256
MAX_SPLITS = 64


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """`block_n` keys a step, `splits` programs along the sequence."""

    block_n: int
    splits: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    """`block_m` rows (queries times heads of a group) by `block_n` keys a step."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


def visible_keys(max_tokens: int, window: int | None, chunk: int | None) -> int:
    """How many keys a query of a sequence of up to `max_tokens` sees: what its splits share."""
    return min(max_tokens, window or max_tokens, chunk or max_tokens)


def select_decode(num_requests: int, kv_heads: int, dim: int, max_tokens: int, itemsize: int) -> DecodeTiles:
    """Tiles for `num_requests` of up to `max_tokens` visible keys; the number of splits is fixed by them."""
    splits = 1
    while (
        splits < MAX_SPLITS
        and num_requests * kv_heads * splits < TARGET_PROGRAMS
        and max_tokens >= 2 * splits * MIN_SPLIT_TOKENS
    ):
        splits *= 2
    if itemsize > 2:
        return DecodeTiles(32 if dim <= 256 else 16, splits, 4, 2)
    if dim > 256:
        return DecodeTiles(16, splits, 4, 4)
    if dim <= 64:
        return DecodeTiles(128, splits, 4, 6)
    return DecodeTiles(64 if dim <= 128 else 32, splits, 4, 6)


def select_prefill(dim: int, group: int, itemsize: int) -> PrefillTiles:
    """Tiles of the prefill kernel; `group` query heads share a key head."""
    if dim > 256:
        return PrefillTiles(max(32, group), 16, 8, 2)
    if itemsize > 2 or dim > 128:
        return PrefillTiles(max(64, group), 32, 4, 2)
    if dim <= 64:
        return PrefillTiles(max(128, group), 64, 8, 6, 128)
    return PrefillTiles(max(128, group), 64, 8, 3, 128)
