"""Eight 4-bit codes and their scales to the four registers of mma.m16n8k16's first operand.

Codes in the layouts "bf16" and "fp16" become floats by shifts and masks, as in `cutedsl_wgmma`. Those of "nib" are
converted by the hardware, to float16; for bfloat16 a shift by 3 then aligns the fields: the bits of a code as float16
are those of code * 2^-112 as bfloat16, because no code is a subnormal float16.

What x is multiplied with is code * scale * 2^-7, exact in either type; with "nib" and bfloat16 code * scale * 2^7.
"""

import cutlass
from cutlass import Int32
from cutlass.cutlass_dsl import dsl_user_op

from .._cutedsl_wgmma.decode import _BFLOAT16, _FLOAT16, _SCALE
from .._cutedsl_wgmma.ptx import asm, several, unpack

# All four bytes are converted at once: ptxas of 13.3 crashes when one of them is not used.
_CONVERT = (
    "{.reg .b8 b0, b1, b2, b3; mov.b32 {b0, b1, b2, b3}, $4;"
    "cvt.rn.f16x2.e2m1x2 e0, b0; cvt.rn.f16x2.e2m1x2 e1, b1;"
    "cvt.rn.f16x2.e2m1x2 e2, b2; cvt.rn.f16x2.e2m1x2 e3, b3;}"
)
_ALIGN = "".join(
    f"shr.u32 a, e{r}, 3; and.b32 a, a, 0x0FFF0FFF; and.b32 b, e{r}, 0x80008000; or.b32 e{r}, a, b;" for r in range(4)
)


def unscale(encoding: str, float16: bool) -> float:
    """What an accumulator is short of."""
    return 2.0**-7 if encoding == "nib" and not float16 else 2.0**7


def decode_ptx(encoding: str, float16: bool, odd: int, hopper: bool) -> str:
    """The instructions; results are $0 to $3, $4 is the word and $5 the scale codes. See `decode`."""
    if encoding == "nib":
        codes = _CONVERT if float16 else _CONVERT + _ALIGN
    else:
        codes = _FLOAT16 if float16 else _BFLOAT16
    scale = _SCALE[float16, odd]
    if encoding == "nib" and float16:
        scale += "mov.b32 s, 0x04000400; mul.rn.f16x2 p, p, s;"  # by 2^-14, exact: with scale * 2^7 products overflow
    kind = "f16x2" if float16 else "bf16x2"
    if float16 or hopper:
        products = [f"mul.rn.{kind} ${r}, e{r}, {'ph' if r % 2 else 'pl'};" for r in range(4)]
    else:  # no mul.bf16x2 before sm_90; a * b + -0 is a * b
        products = ["mov.b32 s, 0x80008000;"]
        products += [f"fma.rn.{kind} ${r}, e{r}, {'ph' if r % 2 else 'pl'}, s;" for r in range(4)]
    return (
        "{.reg .b32 a, b, c, d, e0, e1, e2, e3, s, p, pl, ph; .reg .b16 l, h;"
        + codes
        + scale
        + "mov.b32 {l, h}, p; mov.b32 pl, {l, l}; mov.b32 ph, {h, h};"
        + "".join(products)
        + "}"
    )


@dsl_user_op
def decode(
    word: Int32,
    scales: Int32,
    odd: cutlass.Constexpr[int],
    encoding: cutlass.Constexpr[str],
    float16: cutlass.Constexpr[bool],
    hopper: cutlass.Constexpr[bool],
    *,
    loc=None,
    ip=None,
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
    encoding, float16, hopper
        See `Shape`.
    """
    text = decode_ptx(encoding, float16, odd, hopper)
    found = asm(several("i32", 4), [Int32(word), Int32(scales)], text, "=r,=r,=r,=r,r,r", effects=False, loc=loc, ip=ip)
    return unpack(found, Int32, 4, loc, ip)
