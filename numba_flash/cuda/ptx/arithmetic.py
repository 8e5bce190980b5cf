"""Float32 arithmetic that Numba has no short form of."""

from .assembly import float32, instruction, int32


@instruction("ex2.approx.ftz.f32 $0, $1;", float32, float32, pure=True)
def exp2(x):
    """2^x to two units in the last place; 0 for -inf. ISA: "Floating Point Instructions: ex2"."""


@instruction("lg2.approx.ftz.f32 $0, $1;", float32, float32, pure=True)
def log2(x):
    """Base-2 logarithm; -inf for 0. ISA: "Floating Point Instructions: lg2"."""


@instruction("rcp.approx.ftz.f32 $0, $1;", float32, float32, pure=True)
def reciprocal(x):
    """1 / x to one unit in the last place, and exact for powers of two. ISA: "Floating Point Instructions: rcp"."""


@instruction("div.approx.ftz.f32 $0, $1, $2;", float32, float32, float32, pure=True)
def quotient(x, y):
    """x / y to two units in the last place. ISA: "Floating Point Instructions: div".

    An exact division is a function call for rare operands, and a kernel that calls functions must not keep registers in
    flight: the linker then serialises all its wgmma (C7509).
    """


@instruction("fma.rn.f32 $0, $1, $2, $3;", float32, float32, float32, float32, pure=True)
def fma(x, y, z):
    """``x * y + z``, rounded once. ISA: "Floating Point Instructions: fma"."""


@instruction("max.f32 $0, $1, $2;", float32, float32, float32, pure=True)
def maximum(x, y):
    """The larger number; a NaN is passed over. ISA: "Floating Point Instructions: max"."""


@instruction("bmsk.clamp.b32 $0, 0, $1;", int32, int32, pure=True)
def low_bits(count):
    """So many ones, 32 at most, and zeros. ISA: "Integer Arithmetic Instructions: bmsk"."""


@instruction("redux.sync.or.b32 $0, $1, -1;", int32, int32, pure=True)
def uniform(x):
    """A number that is the same in all threads of a warp, who all call this, told to the compiler. ISA: "redux.sync".

    It then keeps the number, and addresses made of it, in the registers that a warp has once, where wgmma wants them.
    """


@instruction("mov.u32 $0, %tid.x;", int32)
def thread_number():
    """threadIdx.x, read again instead of remembered. ISA: "Special Registers: %tid"."""


@instruction("mov.u32 $0, %laneid;", int32)
def lane_number():
    """threadIdx.x % 32, read again instead of remembered. ISA: "Special Registers: %laneid"."""
