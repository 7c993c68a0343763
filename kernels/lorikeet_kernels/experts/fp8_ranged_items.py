"""Device code in Gluon: how `fp8_ranged_down` divides its work into phases, and these among its programs.

A range is a phase, and a program's items are its blocks, while these stay in shared memory. More would come
again in each range: then all ranges are one phase, have a buffer each, and items are parts of blocks, for as
much work in every program.
"""

# A Gluon kernel's arguments have no Python types.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lorikeet_kernels.experts.fp8_warps import turn_place

STAYING = gl.constexpr(2)
"""Blocks of a program that stay in shared memory."""
PARTS = gl.constexpr(4)
"""Items of a block where more than these are a program's: a power of two, each item is divided by it."""


@gluon.jit
def is_many(used):
    """Whether more of the blocks that there are, `used`, are a program's than stay."""
    return used > STAYING * gl.num_programs(0)


@gluon.jit
def ranges_of(phase, has_many, RANGES: gl.constexpr):
    """A phase's ranges, from one to before another."""
    return gl.where(has_many, 0, phase), gl.where(has_many, RANGES, phase + 1)


@gluon.jit
def buffer_of(number, has_many, BUFFERS: gl.constexpr):
    """Which buffer has a range's rows."""
    return gl.where(has_many, number, number % BUFFERS)


@gluon.jit
def own_items(used):
    """How many items this program has: one of each round, and one of the last if that is long enough."""
    programs = gl.num_programs(0)
    num_items = gl.where(is_many(used), PARTS * used, used)
    rounds = num_items // programs
    return rounds + (turn_place(rounds) < num_items % programs).to(gl.int32)


@gluon.jit
def own_item(index, phase, has_many, RANGES: gl.constexpr):
    """The block of this program's `index`-th item, and its ranges in a phase, from one to before another."""
    PER_PART: gl.constexpr = (RANGES + PARTS - 1) // PARTS
    item = index * gl.num_programs(0) + turn_place(index)
    begin = gl.where(has_many, item % PARTS * PER_PART, phase)
    end = gl.where(has_many, gl.minimum(begin + PER_PART, RANGES), phase + 1)
    return gl.where(has_many, item // PARTS, item), begin, end


@gluon.jit
def own_sums(num_tokens, TOKENS: gl.constexpr):
    """How many times TOKENS tokens this program sums in each range."""
    programs = gl.num_programs(0)
    return (gl.cdiv(num_tokens, TOKENS) - gl.program_id(0) + programs - 1) // programs
