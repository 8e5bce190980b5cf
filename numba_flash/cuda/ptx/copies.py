"""Copies from global to shared memory, two kinds, and shared memory itself.

Every thread can copy 16 bytes at once, asynchronously (``cp.async``, since Ampere): `make_copy_rows`. On Hopper one
thread has the hardware copy whole boxes, which tensor maps describe (TMA): `copy_boxes`.

A tensor map describes an array in global memory, its strides, and the shape of the boxes that are copied from it. It
is encoded on the host (`hopper.tensor_map`) and comes by value, as a kernel parameter of 128 bytes; the copies want
its address. One thread starts a copy of a whole box; parts of the box outside of the array are read as zeros, and not
written.

All boxes here are 128 bytes wide: 64 columns of 16 bits, 32 of float32 or 16 of float64. In shared memory they have the
128-byte swizzle: the 16-byte unit u of row r lies at unit ``u ^ (r % 8)``, so that reads down a column touch all banks.
Of float64 numbers, eight lanes read four units of each of two neighbouring rows at once. Those must not be the same
four, so units of odd rows lie in the other half of the row: at ``u ^ (r % 8) ^ 4 (r % 2)``.
"""

from dataclasses import dataclass
from functools import lru_cache

from llvmlite import ir
from numba.cuda import cgutils, types
from numba.cuda.extending import intrinsic, models, register_model
from numba.cuda.typing import signature as numba_signature

from ..compile import device
from .assembly import emit, float64, instruction, int32, int64, pack, registers, uint32, uint64, unpack, with_arity

BOX_ROW, BOX_COLUMNS = 128, 64  # bytes, and numbers of 16 bits
UNIT = 16                       # bytes that a thread copies at once
SWIZZLE_ALIGNMENT = 1024        # bytes: 8 rows of 128, after which the swizzle repeats
SHARED_SPACE = 3                # number of the address space in NVVM


@dataclass(frozen=True)
class Operand:
    """A matrix in shared memory that a product reads: boxes of 128 swizzled bytes a row, behind one another.

    Attributes
    ----------
    rows : int
        Rows of a box.
    depth_down : bool
        Whether the product sums down its rows (V in P V), or along them (Q and K in Q Kᵀ).
    """

    rows: int
    depth_down: bool


class TensorMapType(types.Type):
    """Numba's type of a kernel parameter that is a tensor map."""

    bytes = 128

    def __init__(self):
        super().__init__(name="tensor_map")


tensor_map = TensorMapType()


@register_model(TensorMapType)
class _TensorMapModel(models.PrimitiveModel):
    """A vector, as its natural alignment is its size: a parameter of 128 bytes at a multiple of 128."""

    def __init__(self, manager, type_):
        super().__init__(manager, type_, ir.VectorType(ir.IntType(64), 16))


@lru_cache(maxsize=None)
def make_parameter_address(index):
    """Build ``parameter_address()``: the address of the kernel's parameter number `index`, which lies where it was put.

    ``cvta.param``, ISA: "Data Movement and Conversion Instructions: cvta". To be called in the kernel itself, and where
    all parameters before are tensor maps too: Numba makes several parameters of an array.
    """
    @intrinsic
    def parameter_address(typing_context):
        def codegen(context, builder, signature, args):
            parameter = f"{builder.function.name}_param_{index}".replace("$", "$$")
            text = f"{{ .reg .u64 at; mov.u64 at, {parameter}; cvta.param.u64 $0, at; }}"
            return emit(builder, text, ir.IntType(64), ["=l"], [], [], pure=True)

        return uint64(), codegen

    return parameter_address


@intrinsic
def shared_memory(typing_context):
    """Address of the block's dynamic shared memory, as the instructions take it: 32 bits in the shared space."""
    def codegen(context, builder, signature, args):
        memory = builder.module.globals.get("dynamic_shared_memory")
        if memory is None:
            memory = ir.GlobalVariable(builder.module, ir.ArrayType(ir.IntType(8), 0), "dynamic_shared_memory",
                                       SHARED_SPACE)
            memory.linkage = "external"
            memory.align = SWIZZLE_ALIGNMENT
        return builder.ptrtoint(memory, ir.IntType(32))

    return uint32(), codegen


@instruction("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
             "[$0], [$1, {$3, $4, $5, $6}], [$2];", None, uint32, uint64, uint32, int32, int32, int32, int32)
def copy_to_shared(target, map_address, barrier, column, row, head, batch):
    """Start to copy the box at (batch, head, row, column); the mbarrier counts its bytes.

    ISA: "cp.async.bulk.tensor".
    """


@device
def copy_boxes(target, map_address, barrier, boxes, rows, row, head, batch):
    """Start to copy so many boxes side by side, of so many rows, to behind one another."""
    for box in range(boxes):
        copy_to_shared(target + box * rows * BOX_ROW, map_address, barrier, box * BOX_COLUMNS, row, head, batch)


@intrinsic
def element_address(typing_context, array, batch, head, row):
    """Address in global memory of the first element of a row of an array of four axes."""
    def codegen(context, builder, signature, args):
        value = context.make_array(signature.args[0])(context, builder, args[0])
        address = builder.ptrtoint(value.data, ir.IntType(64))
        for index, stride in zip(args[1:], cgutils.unpack_tuple(builder, value.strides, 3)):
            address = builder.add(address, builder.mul(builder.sext(index, ir.IntType(64)), stride))
        return address

    return uint64(array, int32, int32, int32), codegen


@intrinsic
def unit_address(typing_context, array, batch, head, row, unit):
    """Address of a 16-byte unit of a row, for strides that are multiples of it and less than 64 GB between rows.

    So positions within a batch are 32-bit numbers of units: products of 64 bits take several instructions each.
    """
    def codegen(context, builder, signature, args):
        value = context.make_array(signature.args[0])(context, builder, args[0])
        int32_, int64_ = ir.IntType(32), ir.IntType(64)
        strides = cgutils.unpack_tuple(builder, value.strides, 3)
        units = args[4]
        for index, stride in zip(args[2:4], strides[1:]):
            stride = builder.trunc(builder.lshr(stride, int64_(UNIT.bit_length() - 1)), int32_)
            units = builder.add(units, builder.mul(index, stride))
        base = builder.add(builder.ptrtoint(value.data, int64_), builder.mul(builder.sext(args[1], int64_), strides[0]))
        return builder.add(base, builder.mul(builder.zext(units, int64_), int64_(UNIT)))

    return uint64(array, int32, int32, int32, int32), codegen


@device
def copied_by(thread, array, batch, head, row):
    """Address of what this thread copies first of rows from `row` on."""
    return unit_address(array, batch, head, int32(row + (thread >> 3)), thread & 7)


@lru_cache(maxsize=None)
def make_copy_rows(rows, boxes, threads, item=2):
    """Build ``copy_rows(target, source, row_bytes, rows_left, columns, thread)``: start to copy rows side by side.

    ``cp.async``, ISA: "Data Movement and Conversion Instructions: cp.async". Eight neighbouring threads copy 128 bytes
    of a row, into a box each. Past the last of `rows_left` rows and of `columns` zeros are written, and nothing is
    read. `source` is `copied_by`; `item`: bytes of an element.
    """
    at_once, box_columns, unit_columns = threads // 8, BOX_ROW // item, 16 // item          # rows, columns
    if rows % at_once or at_once not in (4, 8, 16, 32, 64):
        raise ValueError(f"{threads} threads copy {at_once} rows at once, and that must divide {rows}")
    # all in one block: apart, the compiler would keep the address of each row in registers of its own
    lines = ["{ .reg .pred row, both; .reg .b32 size; .reg .b64 at, step;",
             f"mov.b64 at, $1; shl.b64 step, $2, {at_once.bit_length() - 1};"]
    if at_once < 8:         # else the swizzle of a thread's first row is that of all its rows
        lines.append(".reg .b32 four_below; xor.b32 four_below, $0, 64;")
    for first in range(0, rows, at_once):
        lines.append(f"setp.gt.s32 row, $3, {first};")
        target = "four_below" if first % 8 else "$0"
        for box in range(boxes):
            lines += [f"setp.gt.and.s32 both, $4, {box * box_columns}, row; selp.b32 size, 16, 0, both;",
                      f"cp.async.cg.shared.global.L2::128B [{target} + {(box * rows + first) * BOX_ROW}], "
                      f"[at + {box * BOX_ROW}], 16, size;"]
        lines.append("add.s64 at, at, step;")

    def copy_rows(typing_context, target, source, row_bytes, rows_left, columns, thread):
        def codegen(context, builder, signature, args):
            target, source, row_bytes, rows_left, columns, thread = args
            int32_ = ir.IntType(32)
            row, unit = builder.lshr(thread, int32_(3)), builder.and_(thread, int32_(7))
            swizzled = builder.xor(unit, builder.and_(row, int32_(7)))
            if item == 8:
                swizzled = builder.xor(swizzled, builder.shl(builder.and_(row, int32_(1)), int32_(2)))
            target = builder.add(target, builder.add(builder.mul(row, int32_(BOX_ROW)),
                                                     builder.mul(swizzled, int32_(16))))
            rows_left = builder.sub(rows_left, row)
            columns = builder.sub(columns, builder.mul(unit, int32_(unit_columns)))
            emit(builder, " ".join(lines) + " }", ir.VoidType(), [], [target, source, row_bytes, rows_left, columns],
                 ["r", "l", "l", "r", "r"])
            return context.get_dummy_value()

        return numba_signature(types.void, uint32, uint64, int64, int32, int32, int32), codegen

    return with_arity(copy_rows, ("target", "source", "row_bytes", "rows_left", "columns", "thread"))


@instruction("{ .reg .pred mine; setp.lt.s32 mine, $2, $3; @mine cp.async.cg.shared.global [$0], [$1], 16, 16; }",
             None, uint32, uint64, int32, int32)
def copy_unit(target, source, thread, threads):
    """Start to copy 16 bytes, if this thread is one of the first `threads`, with the rows of its group.

    ISA: "cp.async". A branch would let a warp go apart, before a barrier that it must reach as one.
    """


@instruction("cp.async.commit_group;", None)
def commit_rows():
    """Make a group of this thread's `make_copy_rows` copies so far. ISA: "cp.async.commit_group"."""


@instruction("cp.async.wait_group 0;", None)
def wait_rows():
    """Wait until this thread's copies of rows are there; those of other threads: a barrier. ISA: "cp.async.wait_group".
    """


@instruction("ld.acquire.gpu.global.b32 $0, [$1];", int32, uint64)
def load_acquire(address):
    """Read a number that another block has written by `store_release`, and see all that it did before. ISA: "ld"."""


@instruction("st.release.gpu.global.b32 [$0], $1;", None, uint64, int32)
def store_release(address, value):
    """Write a number for `load_acquire`. ISA: "Data Movement and Conversion Instructions: st"."""


@intrinsic
def load_global_words(typing_context, address):
    """Read 16 bytes of global memory as four words. ISA: "Data Movement and Conversion Instructions: ld"."""
    def codegen(context, builder, signature, args):
        words = emit(builder, "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];", ir.LiteralStructType([ir.IntType(32)] * 4),
                     ["=r"] * 4, args, ["l"])
        return pack(builder, unpack(builder, words, 4))

    return registers(uint32, 4)(uint64), codegen


@intrinsic
def load_global_doubles(typing_context, address):
    """Read them as two float64 numbers."""
    def codegen(context, builder, signature, args):
        numbers = emit(builder, "ld.global.v2.f64 {$0, $1}, [$2];", ir.LiteralStructType([ir.DoubleType()] * 2),
                       ["=d"] * 2, args, ["l"])
        return pack(builder, unpack(builder, numbers, 2))

    return registers(float64, 2)(uint64), codegen


@lru_cache(maxsize=None)
def make_swizzled(item=2):
    """Build ``swizzled(box, row, unit)``: address of a 16-byte unit of a row of a box; `item`: bytes of an element."""
    @device
    def swizzled(box, row, unit):
        return box + row * BOX_ROW + ((unit ^ (row & 7)) << 4)

    @device
    def swizzled_in_float64(box, row, unit):
        return box + row * BOX_ROW + ((unit ^ (row & 7) ^ ((row & 1) << 2)) << 4)

    return swizzled_in_float64 if item == 8 else swizzled


swizzled = make_swizzled()


@instruction("st.shared.b32 [$0], $1;", None, uint32, int32)
def store_shared(address, value):
    """Write a number to shared memory. ISA: "Data Movement and Conversion Instructions: st"."""


@instruction("ld.shared.b32 $0, [$1];", int32, uint32)
def load_shared(address):
    """Read a number from shared memory. ISA: "Data Movement and Conversion Instructions: ld"."""
