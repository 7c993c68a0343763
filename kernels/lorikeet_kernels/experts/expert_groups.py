"""Routing within groups of experts: which groups a token may choose from. For `routing`'s kernel."""

# A Triton kernel's arguments have no Python types.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl


@triton.jit
def allowed_lanes(
    key, NUM_GROUPS_P2: tl.constexpr, MEMBERS_P2: tl.constexpr, TOP_K_GROUPS: tl.constexpr, TWO: tl.constexpr
):
    """Which lanes lie in the groups whose best member, or sum of the TWO best, is largest."""
    grouped = tl.reshape(key, [NUM_GROUPS_P2, MEMBERS_P2])
    score = tl.max(grouped, axis=1)
    if TWO:
        member = tl.arange(0, MEMBERS_P2)
        first = tl.argmax(grouped, axis=1, tie_break_left=True)
        second = tl.max(tl.where(member[None, :] == first[:, None], float("-inf"), grouped), axis=1)
        score += tl.where(second == float("-inf"), 0.0, second)
    group = tl.arange(0, NUM_GROUPS_P2)
    chosen = tl.zeros([NUM_GROUPS_P2], tl.int32)
    for _ in tl.static_range(TOP_K_GROUPS):
        winner = tl.argmax(tl.where(chosen == 1, float("-inf"), score), axis=0, tie_break_left=True)
        chosen = tl.where(group == winner, 1, chosen)
    spread = tl.broadcast_to(chosen[:, None], [NUM_GROUPS_P2, MEMBERS_P2])
    return tl.reshape(spread, [NUM_GROUPS_P2 * MEMBERS_P2]) == 1
