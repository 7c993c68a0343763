"""The last part of an MXFP4 expert kernel: bias, activation or routed weight, rounding, store."""

# A Gluon kernel's arguments have no Python types.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

PLAIN, INTERLEAVED, CONCATENATED = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)


@gluon.jit
def matrix_row(row, OUT: gl.constexpr, PAIRING: gl.constexpr):
    """The matrix's row of a row of tiles: with a pairing a tile is 8 gate rows, then their 8 up rows."""
    if PAIRING == 0:
        return row
    place = (row // 16) * 8 + row % 8
    is_up = (row % 16) // 8
    if PAIRING == 1:
        return 2 * place + is_up
    return is_up * (OUT // 2) + place


@gluon.jit
def is_inside(row, OUT: gl.constexpr, PAIRING: gl.constexpr):
    """Whether a row of tiles is one of the matrix and does not only fill the last tile."""
    if PAIRING == 0:
        return row < OUT
    return (row // 16) * 8 + row % 8 < OUT // 2


@gluon.jit
def _activate(gate, up, alpha, limit, up_offset, HAS_LIMIT: gl.constexpr):
    if HAS_LIMIT:  # comparisons keep a NaN, minimum and maximum may not
        gate = gl.where(gate > limit, limit, gate)
        up = gl.where(up > limit, limit, gl.where(up < -limit, -limit, up))
    return gate / (1.0 + gl.exp(-alpha * gate)) * (up + up_offset)


@gluon.jit
def finish(
    acc, out_ptr, bias_ptr, routed_ptr, delta_ptr, first_row, pair, expert, is_row, factor, alpha, limit,
    up_offset, OUT: gl.constexpr, PAIRING: gl.constexpr, ACTIVATE: gl.constexpr, HAS_LIMIT: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_ROUTED: gl.constexpr, HAS_DELTA: gl.constexpr,
    LAYOUT: gl.constexpr, HALF: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """Finish acc [rows, pairs] of LAYOUT, rows from first_row on.

    `pair` and `is_row` (whether a column has a pair) are in LAYOUT's columns. HALF is the layout of half the
    rows, WIDE the one to store in. A value rounds to the output's dtype before the activation, as if it had
    been stored: so a row has the same bits where an adapter's delta is added between.
    """
    ROWS: gl.constexpr = acc.shape[0]
    PAIRS: gl.constexpr = acc.shape[1]
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    tile_row = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    row = matrix_row(tile_row, OUT, PAIRING)
    inside = is_inside(tile_row, OUT, PAIRING)
    value = acc * factor
    if HAS_BIAS:
        bias = gl.load(bias_ptr + expert * OUT + row, mask=inside, other=0.0).to(gl.float32)
        value += bias[:, None]
    if ACTIVATE:
        value = value.to(dtype)
        if HAS_DELTA:
            at = delta_ptr + pair.to(gl.int64)[None, :] * OUT + row[:, None]
            delta = gl.load(at, mask=is_row[None, :] & inside[:, None], other=0.0)
            value = (value.to(gl.float32) + delta.to(gl.float32)).to(dtype)
        halves = value.to(gl.float32).reshape([ROWS // 16, 2, 8, PAIRS]).permute([0, 2, 3, 1])
        gate, up = gl.split(halves)
        gate = gl.convert_layout(gate.reshape([ROWS // 2, PAIRS]), HALF)
        up = gl.convert_layout(up.reshape([ROWS // 2, PAIRS]), HALF)
        value = gl.convert_layout(_activate(gate, up, alpha, limit, up_offset, HAS_LIMIT).to(dtype), WIDE)
        column = first_row // 2 + gl.arange(0, ROWS // 2, layout=gl.SliceLayout(1, WIDE))
        stored = column < OUT // 2
        width: gl.constexpr = OUT // 2
    else:
        if HAS_ROUTED:
            routed = gl.load(routed_ptr + pair, mask=is_row, other=0.0)
            value = value * routed[None, :]
        value = gl.convert_layout(value.to(dtype), WIDE)
        wide_row = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, WIDE))
        column = matrix_row(wide_row, OUT, PAIRING)
        stored = is_inside(wide_row, OUT, PAIRING)
        width: gl.constexpr = OUT
    to = gl.convert_layout(gl.where(is_row, pair, -1), gl.SliceLayout(0, WIDE))
    at = out_ptr + to.to(gl.int64)[None, :] * width + column[:, None]
    gl.store(at, value, mask=(to >= 0)[None, :] & stored[:, None])
