"""The activations of `activations` on float32 registers, with NaN kept.

exp and 1/x are those of the hardware, off by a few units in the last place.
"""

from cutlass import Float32
from cutlass.cutlass_dsl import T, dsl_user_op

from ...gemm._cutedsl_wgmma.ptx import asm

__all__ = ["activate", "activation_ptx"]

LOG2_E = 1.4426950408889634
# The normal distribution's tail: P(X > z sqrt(2)) = exp(-z^2) * (t C0 + t^2 C1 + ...), t = 1 / (1 + TAIL_STEP z). A
# least-squares fit of ours with weights that level the error: 7e-8 in relative terms for z in [0, 14]; beyond it the
# tail is no float32.
TAIL_STEP = 0.3
TAIL = (
    0.08460237830877304,
    0.0852118730545044,
    0.07523433119058609,
    0.10319305211305618,
    -0.037025872617959976,
    0.25852662324905396,
    -0.24234811961650848,
    0.23591433465480804,
    -0.06330856680870056,
)
TANH = (-1 / 3, 2 / 15, -17 / 315, 62 / 2835)  # x + x^3 (T0 + T1 x^2 + ...), for |x| below 1/4


def number(value: float) -> str:
    """A float32 as PTX writes it."""
    import struct

    return f"0f{struct.unpack('<I', struct.pack('<f', value))[0]:08X}"


def _sigmoid(out: str, x: str) -> str:
    """1 / (1 + exp(-x))."""
    return (
        f"mul.rn.f32 {out}, {x}, {number(-LOG2_E)}; ex2.approx.f32 {out}, {out};"
        f"add.rn.f32 {out}, {out}, {number(1)}; rcp.approx.f32 {out}, {out};"
    )


def _within(out: str, x: str, limit: str) -> str:
    """x within [-limit, limit]."""
    return f"neg.f32 low, {limit}; min.NaN.f32 {out}, {x}, {limit}; max.NaN.f32 {out}, {out}, low;"


def _tanh(out: str, x: str) -> str:
    """Right in relative terms near 0 too, where 1 - exp(-2x) cancels: the first terms of the series below 1/4."""
    text = f"abs.f32 ta, {x}; mul.rn.f32 tb, {x}, {x}; mov.f32 tc, {number(TANH[-1])};"
    for value in TANH[-2::-1]:
        text += f"fma.rn.f32 tc, tc, tb, {number(value)};"
    text += f"mul.rn.f32 tc, tc, tb; fma.rn.f32 tc, tc, {x}, {x};"
    text += f"mul.rn.f32 tb, ta, {number(-2 * LOG2_E)}; ex2.approx.f32 tb, tb; neg.f32 td, tb;"
    text += f"add.rn.f32 td, td, {number(1)}; add.rn.f32 tb, tb, {number(1)}; rcp.approx.f32 tb, tb;"
    text += f"mul.rn.f32 td, td, tb; copysign.f32 td, {x}, td;"
    return text + f"setp.lt.f32 near, ta, {number(0.25)}; selp.f32 {out}, tc, td, near;"


def _normal(out: str, x: str) -> str:
    """The share of a normal distribution below x: (1 + erf(x / sqrt(2))) / 2, right in relative terms far below 0."""
    text = f"abs.f32 ta, {x}; mul.rn.f32 ta, ta, {number(0.5**0.5)};"
    text += f"fma.rn.f32 tb, ta, {number(TAIL_STEP)}, {number(1)}; rcp.approx.f32 tb, tb;"
    text += f"mov.f32 tc, {number(TAIL[-1])};"
    for value in TAIL[-2::-1]:
        text += f"fma.rn.f32 tc, tc, tb, {number(value)};"
    text += f"mul.rn.f32 tc, tc, tb; mul.rn.f32 td, ta, ta; mul.rn.f32 td, td, {number(-LOG2_E)};"
    text += "ex2.approx.f32 td, td; mul.rn.f32 tc, tc, td;"
    text += f"neg.f32 td, tc; add.rn.f32 td, td, {number(1)};"
    return text + f"setp.lt.f32 near, {x}, {number(0)}; selp.f32 {out}, tc, td, near;"


def activation_ptx(name: str) -> str:
    """PTX that makes $0 of gate $1, up $2, limit $3, alpha $4 and beta $5."""
    registers = "{.reg .f32 g, u, s, low, ta, tb, tc, td; .reg .pred near, open;"
    if name == "relu2":
        text = f"max.NaN.f32 g, $1, {number(0)}; mul.rn.f32 $0, g, g;"
    elif name == "swiglu":
        text = "min.NaN.f32 g, $1, $3;" + _sigmoid("s", "g") + "mul.rn.f32 s, s, g;" + _within("u", "$2", "$3")
        text += "mul.rn.f32 $0, s, u;"
    elif name == "swigluoai":
        text = "min.NaN.f32 g, $1, $3; mul.rn.f32 s, g, $4;" + _sigmoid("s", "s") + "mul.rn.f32 s, s, g;"
        text += _within("u", "$2", "$3") + "add.rn.f32 u, u, $5; mul.rn.f32 $0, s, u;"
    elif name == "swiglustep":
        text = _sigmoid("s", "$1") + "mul.rn.f32 s, s, $1; min.NaN.f32 s, s, $3;" + _within("u", "$2", "$3")
        text += "mul.rn.f32 $0, s, u;"
    elif name == "geglu":
        text = _normal("s", "$1") + "mul.rn.f32 s, s, $1; mul.rn.f32 $0, s, $2;"
    elif name == "geglu_tanh":  # (1 + tanh(z)) / 2 = sigmoid(2 z)
        text = f"mul.rn.f32 s, $1, $1; fma.rn.f32 s, s, {number(0.044715)}, {number(1)}; mul.rn.f32 s, s, $1;"
        text += f"mul.rn.f32 s, s, {number(1.5957691216057308)};" + _sigmoid("s", "s")
        text += "mul.rn.f32 s, s, $1; mul.rn.f32 $0, s, $2;"
    else:
        assert name == "situ", name
        text = "rcp.approx.f32 s, $5; mul.rn.f32 s, s, $1;" + _tanh("g", "s") + "mul.rn.f32 g, g, $5;"
        text += _sigmoid("s", "$1") + "mul.rn.f32 g, g, s;"
        text += "rcp.approx.f32 s, $3; mul.rn.f32 s, s, $2;" + _tanh("u", "s") + "mul.rn.f32 u, u, $3;"
        text += f"setp.eq.f32 open, $3, {number(float('inf'))}; selp.f32 u, $2, u, open; mul.rn.f32 $0, g, u;"
    return registers + text + "}"


@dsl_user_op
def activate(name: str, g: Float32, u: Float32, limit: Float32, alpha: Float32, beta: Float32, *, loc=None, ip=None):
    """The activation's result; without a gate u is not looked at."""
    values = [Float32(value) for value in (g, u, limit, alpha, beta)]
    return Float32(asm(T.f32(), values, activation_ptx(name), "=&f,f,f,f,f,f", effects=False, loc=loc, ip=ip))
