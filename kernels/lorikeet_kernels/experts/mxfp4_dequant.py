"""Device functions that turn re-laid MXFP4 words into the MMA's register operand, for the expert kernels.

See `mxfp4_layout` for the words. One multiply a pair dequantises; nothing goes through shared memory.
"""

# A Gluon kernel's arguments have no Python types.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# $0..$7: the word's values (s, u, b) at index 4 s + 2 u + b; $8: the word; $9: its scale as bfloat16.
_UNPACK = gl.constexpr("""{
.reg .b32 a, b, c, s;
mov.b32 s, {$9, $9};
and.b32 a, $8, 0x81C081C0;
mul.bf16x2 a, a, s;
mov.b32 {$0, $1}, a;
shl.b32 b, $8, 3;
and.b32 b, b, 0x81C081C0;
mul.bf16x2 b, b, s;
mov.b32 {$2, $3}, b;
shl.b32 b, $8, 6;
and.b32 b, b, 0x81C081C0;
mul.bf16x2 b, b, s;
mov.b32 {$4, $5}, b;
shl.b32 a, $8, 1;
and.b32 a, a, 0x80008000;
shr.u32 b, $8, 5;
lop3.b32 a, b, 0x01000100, a, 0xEA;
shr.u32 c, $8, 4;
lop3.b32 a, c, 0x00C000C0, a, 0xEA;
mul.bf16x2 a, a, s;
mov.b32 {$6, $7}, a;
}""")
_UNPACK_OPERANDS = gl.constexpr("=h,=h,=h,=h,=h,=h,=h,=h,r,h")
# The four exponent bytes of a scale word to four bfloat16 powers of two, byte i to $i.
_SCALES = gl.constexpr("""{
.reg .b32 a, b;
and.b32 a, $4, 0x00FF00FF;
shl.b32 a, a, 7;
shr.u32 b, $4, 1;
and.b32 b, b, 0x7F807F80;
mov.b32 {$0, $2}, a;
mov.b32 {$1, $3}, b;
}""")
_SCALES_OPERANDS = gl.constexpr("=h,=h,=h,=h,r")


@gluon.jit
def dequantize(words, scale_words, TILES: gl.constexpr, OPERAND: gl.constexpr):
    """Dequantise words [TILES * 128] by a lane's own scale_words [TILES * 32] to [TILES * 16, 64] in OPERAND.

    `words` is to have four in a row a lane, lanes and warps in order; then all of this is a relabelling of
    registers.
    """
    bf16 = gl.bfloat16
    f0, f1, f2, f3 = gl.inline_asm_elementwise(
        _SCALES, _SCALES_OPERANDS, [scale_words], dtype=(bf16, bf16, bf16, bf16), is_pure=True, pack=1
    )
    word = words.reshape([TILES * 32, 2, 2])  # lane, kb, h
    factor = gl.join(gl.join(f0, f2), gl.join(f1, f3)).reshape([TILES * 32, 2, 2])
    factor = gl.convert_layout(factor, word.type.layout)
    v = gl.inline_asm_elementwise(
        _UNPACK,
        _UNPACK_OPERANDS,
        [word, factor],
        dtype=(bf16, bf16, bf16, bf16, bf16, bf16, bf16, bf16),
        is_pure=True,
        pack=1,
    )
    # join appends the newest dimension last, so the slowest of s, u, b is joined first
    a = gl.join(
        gl.join(gl.join(v[0], v[4]), gl.join(v[2], v[6])), gl.join(gl.join(v[1], v[5]), gl.join(v[3], v[7]))
    )
    a = a.reshape([TILES, 8, 4, 2, 2, 2, 2, 2])  # tile g t kb h s u b
    a = a.permute([0, 4, 1, 3, 5, 6, 2, 7]).reshape([TILES * 16, 64])  # tile h g, kb s u t b
    return gl.convert_layout(a, OPERAND)
