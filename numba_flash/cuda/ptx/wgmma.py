"""Whole matrix products of a warpgroup: ``wgmma.mma_async``, which runs while its threads go on.

One instruction multiplies 64 x 16 by 16 x N; a product over a longer depth is a row of them, all in one block of PTX.
So the addresses of the steps are constants from one register, and no other instruction comes between.

The accumulator is a fragment (see `fragments`). A product *takes* one and *returns* one: the same registers, but only
after `wait` may the result be used. Other products may be started meanwhile, and do not wait for one another.
"""

from dataclasses import dataclass
from functools import lru_cache

from llvmlite import ir
from numba.cuda.typing import signature as numba_signature

from ...problem import FLOAT16
from . import copies
from .assembly import emit, float32, pack, registers, uint32, unpack, with_arity
from .copies import BOX_ROW

DEPTH = 16                      # of one instruction, for 16-bit operands
SWIZZLE_128 = 1 << 30           # in the upper half of a descriptor
EIGHT_ROWS, EIGHT_NARROW_ROWS = 8 * BOX_ROW, 8 * 16


@dataclass(frozen=True)
class Operand(copies.Operand):
    """`copies.Operand`, with its descriptors.

    Notes
    -----
    ISA: "Asynchronous Warpgroup Level Matrix Shared Memory Layout" and "Matrix Descriptor Format". A descriptor is 64
    bits, all lengths in units of 16 bytes: the address (from bit 0), two strides (from bits 16 and 32), and the
    swizzle. The second stride is that of eight rows. The first is used if the depth runs down: from box to box.
    """

    @property
    def upper(self):
        """The upper half of the descriptor."""
        return SWIZZLE_128 | EIGHT_ROWS // 16

    @property
    def lower(self):
        """The lower half, to which the address comes."""
        return (self.rows * BOX_ROW // 16 if self.depth_down else 1) << 16

    def step(self, k):
        """From the address to that of step k."""
        if self.depth_down:
            return k * DEPTH * BOX_ROW // 16
        box, within = divmod(k * DEPTH, 64)
        return (box * self.rows * BOX_ROW + within * 2) // 16


@dataclass(frozen=True)
class NarrowOperand:
    """The second operand of one instruction, 16 columns, not swizzled.

    Eight columns of all rows lie behind one another, 16 bytes a row, and then the other eight, where the first stride
    leads.

    Attributes
    ----------
    rows : int
    """

    rows: int
    upper, depth_down = EIGHT_NARROW_ROWS // 16, False

    @property
    def lower(self):
        """The lower half of the descriptor, to which the address comes."""
        return self.rows << 16

    def step(self, k):
        """There is only one."""
        return 0


def _product(builder, columns, depth, dtype, acc, a, a_operand, b_address, b_operand, accumulate):
    """Emit all steps of a product; `a` is an address in a list of one, or the registers of a packed fragment."""
    count, element = columns // 2, "f16" if dtype == FLOAT16 else "bf16"
    a_first, b_first = 2 * count, 2 * count + len(a)            # numbers of the operands in the text
    acc_list = ", ".join(f"${index}" for index in range(count))
    lines = ["{ .reg .pred add, set; .reg .b64 a_at, b_at; .reg .b32 low;",
             f"setp.ne.b32 add, 1, 0; setp.ne.b32 set, {int(accumulate)}, 0;", "wgmma.fence.sync.aligned;"]
    for k in range(depth // DEPTH):
        if a_operand:
            lines.append(f"add.u32 low, ${a_first}, {a_operand.step(k)}; mov.b64 a_at, {{low, {a_operand.upper}}};")
            a_text, a_flags = "a_at", f"{int(a_operand.depth_down)}, "
        else:
            a_text, a_flags = f"{{{', '.join(f'${a_first + 4 * k + index}' for index in range(4))}}}", ""
        lines.append(f"add.u32 low, ${b_first}, {b_operand.step(k)}; mov.b64 b_at, {{low, {b_operand.upper}}};")
        lines.append(f"wgmma.mma_async.sync.aligned.m64n{columns}k{DEPTH}.f32.{element}.{element} {{{acc_list}}}, "
                     f"{a_text}, b_at, {'add' if k else 'set'}, 1, 1, {a_flags}{int(b_operand.depth_down)};")
    lines.append("wgmma.commit_group.sync.aligned; }")
    out = emit(builder, " ".join(lines), ir.LiteralStructType([ir.FloatType()] * count), ["=f"] * count,
               [*acc, *a, b_address], [*map(str, range(count)), *["r"] * (len(a) + 1)])
    return pack(builder, unpack(builder, out, count))


def _lower(builder, address, operand):
    """The lower half of a descriptor."""
    units = builder.lshr(builder.and_(address, address.type(0x3ffff)), address.type(4))
    return builder.or_(units, address.type(operand.lower))


@lru_cache(maxsize=None)
def make_product_of_shared(columns, depth, dtype, a_operand, b_operand):
    """Build ``product(acc, a, b)``: start ``acc = A B``, 64 x `columns`, both at addresses in shared memory.

    ``wgmma.mma_async``, ISA: "Asynchronous Warpgroup Level Matrix Instructions". What `acc` held doesn't matter.
    """
    def product(typing_context, acc, a, b):
        def codegen(context, builder, signature, args):
            acc, a, b = args
            return _product(builder, columns, depth, dtype, unpack(builder, acc, columns // 2),
                            [_lower(builder, a, a_operand)], a_operand, _lower(builder, b, b_operand), b_operand, False)

        fragment = registers(float32, columns // 2)
        return numba_signature(fragment, fragment, uint32, uint32), codegen

    return with_arity(product, ("acc", "a", "b"))


@lru_cache(maxsize=None)
def make_product_of_registers(columns, depth, dtype, b_operand, accumulate=True):
    """Build ``product(acc, a, b)``: start ``acc += A B``, A a packed fragment, B at an address in shared memory.

    Without `accumulate`, ``acc = A B``.
    """
    def product(typing_context, acc, a, b):
        def codegen(context, builder, signature, args):
            acc, a, b = args
            return _product(builder, columns, depth, dtype, unpack(builder, acc, columns // 2),
                            unpack(builder, a, depth // 4), None, _lower(builder, b, b_operand), b_operand, accumulate)

        fragment = registers(float32, columns // 2)
        return numba_signature(fragment, fragment, registers(uint32, depth // 4), uint32), codegen

    return with_arity(product, ("acc", "a", "b"))


@lru_cache(maxsize=None)
def make_wait(in_flight):
    """Build ``wait(acc)``: the accumulator, once at most `in_flight` products started after its own still run.

    ``wgmma.wait_group``, ISA: "Asynchronous Warpgroup Level Matrix Operation: wgmma.wait_group". Its registers go in
    and out, so that no use of them can move before the wait.
    """
    def wait(typing_context, acc):
        def codegen(context, builder, signature, args):
            out = emit(builder, f"wgmma.wait_group.sync.aligned {in_flight};",
                       ir.LiteralStructType([ir.FloatType()] * acc.count), ["=f"] * acc.count,
                       unpack(builder, args[0], acc.count), list(map(str, range(acc.count))))
            return pack(builder, unpack(builder, out, acc.count))

        return numba_signature(acc, acc), codegen

    return with_arity(wait, ("acc",))
