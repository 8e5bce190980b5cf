"""Whole matrix products of a warp: ``mma.sync.m16n8k16``, and ``ldmatrix``, which reads operands from shared memory.

One instruction multiplies 16 x 16 by 16 x 8. A product is as many of them as it takes, in one block of PTX, with the
loads of its operands between them; the assembler moves the loads ahead of what waits for them.

An accumulator is a fragment (see `fragments`) of one part, 16 rows, or of two: what is loaded of B then serves twice.

``ldmatrix.x4`` reads four matrices of 8 x 8. Lanes 0 to 7 give the addresses of the first one's rows, 16 bytes each,
lanes 8 to 15 those of the second, and so on. Of each matrix, or of its transpose (``.trans``), a lane gets the two
elements that it holds of a fragment. The four are the quarters of 16 x 16 elements, in an order that depends on how an
operand lies in shared memory::

                          the depth runs along its rows          down its rows (.trans)
    A, 16 rows            0 2   Q in Q K^T                       0 1   dS in dS K, if its transpose is there
                          1 3                                    2 3
    B, 16 columns         0 1   K in Q K^T                       0 2   V in P V
                          2 3                                    1 3
"""

from functools import lru_cache

from llvmlite import ir
from numba.cuda.typing import signature as numba_signature

from ...problem import FLOAT16
from .assembly import emit, float32, pack, registers, uint32, unpack, with_arity
from .copies import BOX_ROW

STEP = 16                       # depth of one instruction, rows of A's and columns of B's `ldmatrix`
BOX_STEPS = 4                   # in a box of 64 columns


def _lane_address(builder, address, downwards):
    """Address that this lane gives for the first 16 x 16 elements of a swizzled tile.

    `address` is that of the first of them, whose row's number is a multiple of 8.
    `downwards`: matrix 1 lies below matrix 0, and not beside it.
    """
    lane = emit(builder, "mov.u32 $0, %laneid;", ir.IntType(32), ["=r"], [], [], pure=True)

    def bits(shift, mask):
        return builder.and_(builder.lshr(lane, lane.type(shift)), lane.type(mask))

    within, lower, beside = bits(0, 7), bits(3, 1), bits(4, 1)
    if not downwards:
        lower, beside = beside, lower
    row = builder.or_(within, builder.shl(lower, lane.type(3)))
    unit = builder.xor(beside, within)
    return builder.xor(builder.add(address, builder.mul(row, lane.type(BOX_ROW))), builder.shl(unit, lane.type(4)))


def _place(operand, outer, k):
    """Where 16 x 16 elements of an operand are: what to xor the lane's address with, and what to add then."""
    row, column = (k, outer) if operand.depth_down else (outer, k)
    box, within = divmod(column, BOX_STEPS)
    return within, row * STEP * BOX_ROW + box * operand.rows * BOX_ROW


def _load(name, address, operand, outer, k):
    """A line of PTX: registers ``name0`` to ``name3`` from 16 x 16 elements."""
    within, offset = _place(operand, outer, k)
    trans = ".trans" if operand.depth_down else ""
    return (f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{{name}0, {name}1, {name}2, {name}3}}, "
            f"[{address}{within} + {offset}];")


def _list(*names):
    return "{" + ", ".join(names) + "}"


@lru_cache(maxsize=None)
def make_warp_product(parts, columns, depth, dtype, a_operand, b_operand, accumulate):
    """Build ``product(acc, a, b)``, ``acc + A B``; without `accumulate` ``product(a, b)``, ``A B``.

    ``mma.sync.m16n8k16``, ISA: "Warp Level Matrix Multiply-Accumulate Instructions: mma", "Matrix Fragments for
    mma.m16n8k16"; "Warp-level matrix load instruction: ldmatrix".

    Parameters
    ----------
    parts : int
        Of the accumulator, and of A.
    columns, depth : int
        Multiples of 16.
    dtype : numpy.dtype
    a_operand, b_operand : Operand
        How A and B lie in shared memory: their addresses are passed. If `a_operand` is None, A is a packed fragment.
    accumulate : bool

    Notes
    -----
    An operand may be a part of the tile that lies there: the address is then that of its first element. Its columns
    must not go on in another box if they begin within one.
    """
    count, element = parts * columns // 2, "f16" if dtype == FLOAT16 else "bf16"
    a_count = 1 if a_operand else parts * depth // 4

    def text():
        first = count * (2 if accumulate else 1)                    # number of the first operand that is not acc
        a_first, b_address = f"${first}", f"${first + a_count}"
        # a: A of each part; b: B; at_a, at_b: this lane's address for each step within a box
        lines = ["{ .reg .b32 a0_<4>, a1_<4>, b<4>, at_a<4>, at_b<4>; .reg .f32 zero; mov.f32 zero, 0f00000000;"]
        lines += [f"xor.b32 at_b{n}, {b_address}, {32 * n};" for n in range(BOX_STEPS)]
        if a_operand:
            lines += [f"xor.b32 at_a{n}, {a_first}, {32 * n};" for n in range(BOX_STEPS)]
        for k in range(depth // STEP):
            if a_operand:
                lines += [_load(f"a{part}_", "at_a", a_operand, part, k) for part in range(parts)]
                a = [_list(*(f"a{part}_{n}" for n in range(4))) for part in range(parts)]
            else:
                starts = [first + part * depth // 4 + 4 * k for part in range(parts)]
                a = [_list(*(f"${start + n}" for n in range(4))) for start in starts]
            for outer in range(columns // STEP):
                lines.append(_load("b", "at_b", b_operand, outer, k))
                for part in range(parts):
                    for half in range(2):
                        start = part * columns // 2 + 8 * outer + 4 * half
                        acc = _list(*(f"${start + n}" for n in range(4)))
                        lines.append(f"mma.sync.aligned.m16n8k16.row.col.f32.{element}.{element}.f32 {acc}, {a[part]}, "
                                     + _list(f"b{2 * half}", f"b{2 * half + 1}") + ", "
                                     + (acc if k or accumulate else _list(*["zero"] * 4)) + ";")
        return " ".join(lines) + " }"

    def generate(builder, acc, a, b):
        b = _lane_address(builder, b, downwards=b_operand.depth_down)
        if a_operand:
            a = [_lane_address(builder, a, downwards=not a_operand.depth_down)]
        else:
            a = unpack(builder, a, a_count)
        # "&": results are written before all arguments have been read
        out = emit(builder, text(), ir.LiteralStructType([ir.FloatType()] * count), ["=&f"] * count, [*acc, *a, b],
                   [*map(str, range(len(acc))), *["r"] * (len(a) + 1)])
        return pack(builder, unpack(builder, out, count))

    fragment = registers(float32, count)
    a_type = uint32 if a_operand else registers(uint32, a_count)

    def product(typing_context, acc, a, b):
        def codegen(context, builder, signature, args):
            return generate(builder, unpack(builder, args[0], count), *args[1:])

        return numba_signature(fragment, fragment, a_type, uint32), codegen

    def first_product(typing_context, a, b):
        def codegen(context, builder, signature, args):
            return generate(builder, [], *args)

        return numba_signature(fragment, a_type, uint32), codegen

    return with_arity(product, ("acc", "a", "b")) if accumulate else with_arity(first_product, ("a", "b"))
