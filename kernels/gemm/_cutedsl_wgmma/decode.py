"""Eight 4-bit codes and their scales to four registers of a wgmma fragment, in 15 or 16 instructions.

A word holds the codes so that a few shifts and masks make 16-bit floats of them: code * 2^-126 in bfloat16 or
code * 2^-14 in float16, both exact (0.5 is a subnormal bfloat16, which the multiplication honours). A scale code
becomes scale * 2^119 or scale * 2^7 by one shift and one or two masks. Their product is code * scale * 2^-7, exact in
either type: six significant bits, and exponents that both have. The factor 2^7 joins the global scale on the way out.
"""

import cutlass
from cutlass import Int32
from cutlass.cutlass_dsl import dsl_user_op

from .ptx import asm, several, unpack

UNSCALE = 128.0  # what an accumulator is short of

# $4: word, $5: scale codes of rows g and g + 8. p: a pair of scales, broadcast to both halves by the multiplication
# itself (.H0_H0, .H1_H1 in the machine code).
_BFLOAT16 = (
    "and.b32 e0, $4, 0x81C081C0;"
    "shl.b32 a, $4, 4; and.b32 e1, a, 0x81C081C0;"
    "shf.l.wrap.b32 b, $4, $4, 26; and.b32 e2, b, 0x81C081C0;"
    "shf.l.wrap.b32 c, $4, $4, 30; and.b32 c, c, 0x81808180; shl.b32 d, $4, 6; and.b32 d, d, 0x00400040;"
    "or.b32 e3, c, d;"
)
_FLOAT16 = (
    "shl.b32 a, $4, 2; shf.l.wrap.b32 b, $4, $4, 29;"
    "and.b32 e0, $4, 0x8C008C00; and.b32 c, a, 0x02000200; or.b32 e0, e0, c;"
    "and.b32 e1, a, 0x84008400; and.b32 d, b, 0x0A000A00; or.b32 e1, e1, d;"
    "shl.b32 e2, $4, 6; and.b32 e2, e2, 0x8E008E00;"
    "shf.l.wrap.b32 e3, $4, $4, 25; and.b32 e3, e3, 0x8E008E00;"
)
_SCALE = {  # by (float16, odd step)
    (False, 0): "shl.b32 s, $5, 4; and.b32 s, s, 0x0FF00FF0; or.b32 p, s, 0x70007000;",
    (False, 1): "shr.u32 s, $5, 4; and.b32 s, s, 0x0FF00FF0; or.b32 p, s, 0x70007000;",
    (True, 0): "shl.b32 s, $5, 7; and.b32 p, s, 0x7F807F80;",
    (True, 1): "shr.u32 s, $5, 1; and.b32 p, s, 0x7F807F80;",
}


@dsl_user_op
def decode(
    word: Int32, scales: Int32, odd: cutlass.Constexpr[int], float16: cutlass.Constexpr[bool], *, loc=None, ip=None
):
    """Registers 0 to 3: rows g and g + 8 of k 2q, 2q + 1, then of k 2q + 8, 2q + 9.

    Parameters
    ----------
    word
        Eight codes.
    scales
        Two rows' codes of two steps along k.
    odd
        Which of the two steps.
    """
    kind = "f16x2" if float16 else "bf16x2"
    text = (
        "{.reg .b32 a, b, c, d, e0, e1, e2, e3, s, p, pl, ph; .reg .b16 l, h;"
        + (_FLOAT16 if float16 else _BFLOAT16)
        + _SCALE[float16, odd]
        + "mov.b32 {l, h}, p; mov.b32 pl, {l, l}; mov.b32 ph, {h, h};"
        + f"mul.rn.{kind} $0, e0, pl; mul.rn.{kind} $1, e1, ph; mul.rn.{kind} $2, e2, pl; mul.rn.{kind} $3, e3, ph;}}"
    )
    found = asm(several("i32", 4), [Int32(word), Int32(scales)], text, "=r,=r,=r,=r,r,r", effects=False, loc=loc, ip=ip)
    return unpack(found, Int32, 4, loc, ip)
