"""Device code shared by the LoRA kernels: where a slot's weights for a site start, and at which rank."""

import triton
import triton.language as tl


@triton.jit
def find_site(
    offset_ptr,
    rank_ptr,
    num_a_ptr,
    slot,
    site,
    num_sites,
    num_slots,
    SLOT_SCAN: tl.constexpr,
):
    """(offset, rank, num_a) of (slot, site); rank 0 for slot -1 and for a site without weights.

    With SLOT_SCAN > 0, a power of two of at least num_slots, the site's whole table column is read while the
    slot itself is still on its way: one DRAM round trip less in a decode kernel's chain of loads.
    """
    if SLOT_SCAN > 0:
        lane = tl.arange(0, SLOT_SCAN)
        place = lane * num_sites + site
        known = lane < num_slots
        offsets = tl.load(offset_ptr + place, mask=known, other=0)
        ranks = tl.load(rank_ptr + place, mask=known, other=0)
        counts = tl.load(num_a_ptr + place, mask=known, other=0)
        hit = lane == slot
        # a sum forgets what divides it: offsets are multiples of 64 elements, ranks of 8, and loads that the
        # compiler cannot prove aligned are 2 bytes wide
        offset = tl.sum(tl.where(hit, offsets // 64, 0)) * 64
        # rank and num_a share one reduction: num_a is 1 or 2
        packed = tl.sum(tl.where(hit, ranks // 8 * 4 + counts, 0))
        rank = packed // 4 * 8
        num_a = packed % 4
    else:
        safe = tl.maximum(slot, 0).to(tl.int64) * num_sites + site
        offset = tl.load(offset_ptr + safe)
        rank = tl.load(rank_ptr + safe)
        num_a = tl.load(num_a_ptr + safe)
        offset = tl.multiple_of(offset, 64)
        rank = tl.where(slot < 0, 0, tl.multiple_of(rank, 8))
    return offset, rank, num_a
