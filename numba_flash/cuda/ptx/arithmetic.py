"""Arithmetic that Numba has no short form of: in float32 one instruction each, in float64 sometimes more."""

import math
import struct

from .assembly import float32, instruction, int32


def _literal(x):
    """A float64 number in PTX."""
    return "0d" + struct.pack(">d", x).hex()


# (2^f - 1) / f for -1/2 <= f <= 1/2, by powers of f: the polynomial that agrees with it at the 11 nodes of Chebyshev.
# What is made of it is off by 2e-17 of 2^f.
POWER = (0.6931471805599453, 0.24022650695910097, 0.0555041086648216, 0.009618129107606888, 0.0013333558146416936,
         0.0001540353044173605, 1.525273382983612e-05, 1.321544258792169e-06, 1.0178062445845774e-07,
         7.072585949269223e-09, 4.4549605981865186e-10)
ROUNDING = 1.5 * 2.0**52        # a number that is added to it has no fraction left, and its whole part in the low word


def _exp2(result, x):
    """PTX that writes the float64 number 2^x into a register: 2^n 2^f, where n is whole and f at most a half."""
    return " ".join([
        "{ .reg .f64 n, f, p, scale; .reg .b32 whole; .reg .pred tiny, huge;",
        f"add.rn.f64 n, {x}, {_literal(ROUNDING)}; mov.b64 {{whole, _}}, n; sub.rn.f64 n, n, {_literal(ROUNDING)};",
        f"sub.rn.f64 f, {x}, n; mov.f64 p, {_literal(POWER[-1])};",
        *(f"fma.rn.f64 p, p, f, {_literal(factor)};" for factor in (*POWER[-2::-1], 1.0)),
        # the exponent's place is behind the 20 bits of the high word that are a number's first; NaN stays NaN
        "shl.b32 whole, whole, 20; add.s32 whole, whole, 0x3ff00000; mov.b64 scale, {0, whole};",
        "mul.rn.f64 p, p, scale;",
        f"setp.lt.f64 tiny, {x}, {_literal(-1022.0)}; selp.f64 p, {_literal(0.0)}, p, tiny;",
        f"setp.ge.f64 huge, {x}, {_literal(1024.0)}; selp.f64 {result}, {_literal(float('inf'))}, p, huge; }}"])


@instruction("ex2.approx.ftz.f32 $0, $1;", float32, float32, pure=True, in_float64=_exp2("$0", "$1"))
def exp2(x):
    """2^x to two units in the last place; 0 for -inf, and where it is less than the smallest normal number.

    ISA: "Floating Point Instructions: ex2". In float64: `_exp2`.
    """


@instruction("lg2.approx.ftz.f32 $0, $1;", float32, float32, pure=True, in_float64=(
    "{ .reg .f32 about; .reg .f64 y, e, t; cvt.rn.f32.f64 about, $1; lg2.approx.f32 about, about; "
    f"cvt.f64.f32 y, about; neg.f64 e, y; {_exp2('e', 'e')} fma.rn.f64 e, e, $1, {_literal(-1.0)}; "
    f"fma.rn.f64 t, e, {_literal(-0.5)}, {_literal(1.0)}; mul.rn.f64 e, e, t; "
    f"fma.rn.f64 $0, e, {_literal(1 / math.log(2))}, y; }}"))
def log2(x):
    """Base-2 logarithm; -inf for 0. ISA: "Floating Point Instructions: lg2".

    In float64 for numbers in float32's range: y is the logarithm in float32, and to it comes log2(1 + e) with
    ``e = x 2^-y - 1``, some 1e-6, for which e - e^2 / 2 is the natural logarithm.
    """


@instruction("rcp.approx.ftz.f32 $0, $1;", float32, float32, pure=True, in_float64="rcp.rn.f64 $0, $1;")
def reciprocal(x):
    """1 / x to one unit in the last place, and exact for powers of two. ISA: "Floating Point Instructions: rcp"."""


@instruction("div.approx.ftz.f32 $0, $1, $2;", float32, float32, float32, pure=True,
             in_float64="div.rn.f64 $0, $1, $2;")
def quotient(x, y):
    """x / y to two units in the last place. ISA: "Floating Point Instructions: div".

    In float32: an exact division is a function call for rare operands, and a kernel that calls functions must not keep
    registers in flight: the linker then serialises all its wgmma (C7509).
    """


@instruction("fma.rn.f32 $0, $1, $2, $3;", float32, float32, float32, float32, pure=True,
             in_float64="fma.rn.f64 $0, $1, $2, $3;")
def fma(x, y, z):
    """``x * y + z``, rounded once. ISA: "Floating Point Instructions: fma"."""


@instruction("max.f32 $0, $1, $2;", float32, float32, float32, pure=True,
             in_float64="max.f64 $0, $1, $2;")
def maximum(x, y):
    """The larger number; a NaN is passed over. ISA: "Floating Point Instructions: max"."""


@instruction("min.NaN.f32 $0, $1, $2;", float32, float32, float32, pure=True)
def at_most(x, limit):
    """The smaller number, or NaN if there is one. ISA: "Floating Point Instructions: min"."""


@instruction("bmsk.clamp.b32 $0, 0, $1;", int32, int32, pure=True)
def low_bits(count):
    """So many ones, 32 at most, and zeros. ISA: "Integer Arithmetic Instructions: bmsk"."""


@instruction("redux.sync.or.b32 $0, $1, -1;", int32, int32, pure=True)
def uniform(x):
    """A number that is the same in all threads of a warp, who all call this, told to the compiler. ISA: "redux.sync".

    It then keeps the number, and addresses made of it, in the registers that a warp has once, where wgmma wants them.
    """


@instruction("{ .reg .pred any; setp.ne.s32 any, $1, 0; vote.sync.any.pred any, any, -1; selp.s32 $0, 1, 0, any; }",
             int32, int32)
def in_any_lane(x):
    """Whether x is not 0 in some thread of the warp, who all call this.

    ISA: "Parallel Synchronization and Communication Instructions: vote.sync".
    """


@instruction("mov.u32 $0, %tid.x;", int32)
def thread_number():
    """threadIdx.x, read again instead of remembered. ISA: "Special Registers: %tid"."""


@instruction("mov.u32 $0, %laneid;", int32)
def lane_number():
    """threadIdx.x % 32, read again instead of remembered. ISA: "Special Registers: %laneid"."""
