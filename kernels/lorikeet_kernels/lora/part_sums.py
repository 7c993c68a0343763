"""Device code: wait for the parts of rank vectors that other programs of the same launch store, and sum them.

A part is a float32 whose last mantissa bit is the phase, see `pair_lora`. In Gluon.
"""

# A Gluon kernel's arguments have no Python types.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false
# pyright: reportUnnecessaryComparison=false

from functools import cache

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lorikeet_kernels.lora.pair_lora import SPIN_LIMIT


@cache
def waiting_sum(splits: int, vector: int, stride: int) -> str:
    """PTX of one thread's wait: load `vector` words of each split until all carry the phase, then sum them.

    Takes `vector` addresses, of which the first counts, as many phases and as many flags of whether the words
    are wanted; gives the sums, NaN where the wait reached its limit.
    """
    first = 2 * vector  # the phases' operands
    words = [[f"w{split}_{i}" for i in range(vector)] for split in range(splits)]
    width = f".v{vector}" if vector > 1 else ""
    lines = [
        ".reg .pred p, q;",
        ".reg .b32 late, spins, differing;",
        f".reg .b32 {', '.join(w for row in words for w in row)};",
        ".reg .f32 f;",
        *(f"mov.b32 ${i}, 0;" for i in range(vector)),
        f"setp.eq.b32 p, ${first + vector}, 0;",
        "@p bra DONE;",
        "mov.b32 spins, 0;",
        "AGAIN:",
    ]
    for split, row in enumerate(words):
        target = f"{{{', '.join(row)}}}" if vector > 1 else row[0]
        lines.append(f"ld.relaxed.gpu.global{width}.b32 {target}, [${vector} + {split * stride}];")
    lines.append("mov.b32 late, 0;")
    for word in (w for row in words for w in row):
        lines += [f"xor.b32 differing, {word}, ${first};", "or.b32 late, late, differing;"]
    lines += [
        "and.b32 late, late, 1;",
        "add.u32 spins, spins, 1;",
        "setp.ne.b32 p, late, 0;",
        f"setp.lt.u32 q, spins, {SPIN_LIMIT};",
        "and.pred q, p, q;",
        "@q bra AGAIN;",
    ]
    for i in range(vector):
        for row in words:
            lines += [f"and.b32 {row[i]}, {row[i]}, -2;", f"mov.b32 f, {row[i]};", f"add.f32 ${i}, ${i}, f;"]
        lines.append(f"@p mov.b32 ${i}, 0x7fc00000;")
    lines += ["DONE:"]
    return "{ " + " ".join(lines) + " }"


@gluon.jit
def wait_for_parts(
    part_ptr, expected, left, rank,
    H_ROWS: gl.constexpr, BLOCK_M: gl.constexpr, RANK_P2: gl.constexpr, HELD: gl.constexpr,
    VECTOR: gl.constexpr, WAITING_SUM: gl.constexpr, OPERANDS: gl.constexpr,
):  # fmt: skip
    """As `sum_parts`, each thread for its own words: no vote, so no barrier, before they are used."""
    m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, HELD))
    r = gl.arange(0, RANK_P2, layout=gl.SliceLayout(0, HELD))
    wanted = (m < left)[:, None] & (r < rank)[None, :]
    place = part_ptr + m[:, None] * H_ROWS + r[None, :]
    phase = gl.full([BLOCK_M, RANK_P2], 0, gl.int32, layout=HELD) + expected
    return gl.inline_asm_elementwise(
        WAITING_SUM,
        OPERANDS,
        [place.to(gl.int64, bitcast=True), phase, wanted.to(gl.int32)],
        dtype=gl.float32,
        is_pure=False,
        pack=VECTOR,
    )


@gluon.jit
def sum_parts(
    part_ptr, expected, left, rank,
    H_ROWS: gl.constexpr, STRIDE: gl.constexpr, SPLITS: gl.constexpr, BLOCK_M: gl.constexpr,
    RANK_P2: gl.constexpr, SPIN_LIMIT: gl.constexpr, HELD: gl.constexpr,
):  # fmt: skip
    """The rank vectors [BLOCK_M, RANK_P2]: the splits' words, in order, once all carry the phase.

    HELD gives a word to one thread only, so that no two read it at different moments.
    """
    m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, HELD))
    r = gl.arange(0, RANK_P2, layout=gl.SliceLayout(0, HELD))
    wanted = (m < left)[:, None] & (r < rank)[None, :]
    place = part_ptr + m[:, None] * H_ROWS + r[None, :]
    late = 1
    spins = 0
    h = gl.zeros([BLOCK_M, RANK_P2], gl.float32, layout=HELD)
    while (late != 0) & (spins < SPIN_LIMIT):
        h = gl.zeros([BLOCK_M, RANK_P2], gl.float32, layout=HELD)
        differing = gl.zeros([BLOCK_M, RANK_P2], gl.int32, layout=HELD)
        for split in gl.static_range(SPLITS):
            words = gl.load(place + split * STRIDE, mask=wanted, other=0, volatile=True)
            h += (words & -2).to(gl.float32, bitcast=True)
            differing |= words ^ expected
        late = gl.max(gl.max(gl.where(wanted, differing & 1, 0), axis=1), axis=0)
        spins += 1
    return gl.where(late == 0, h, float("nan"))
