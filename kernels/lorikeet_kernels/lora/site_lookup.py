"""Device code shared by the LoRA kernels: where a slot's weights for a site start, and at which rank."""

# A Triton kernel's arguments have no Python types, and its launch takes options that its signature lacks.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

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


@triton.jit
def find_lane(tile, LANES: tl.constexpr, NUM_LANES: tl.constexpr):
    """The lane that `tile` lies in: describe_lanes's (site, half, column, row, width, first, site rows)."""
    index, half, column, row, width, first, site_rows = 0, 0, 0, 0, 0, 0, 0
    for lane in tl.static_range(NUM_LANES):
        inside = tile >= LANES[lane][5]
        index = tl.where(inside, LANES[lane][0], index)
        half = tl.where(inside, LANES[lane][1], half)
        column = tl.where(inside, LANES[lane][2], column)
        row = tl.where(inside, LANES[lane][3], row)
        width = tl.where(inside, LANES[lane][4], width)
        first = tl.where(inside, LANES[lane][5], first)
        site_rows = tl.where(inside, LANES[lane][6], site_rows)
    return index, half, column, row, width, first, site_rows
