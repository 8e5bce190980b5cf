"""What a fragment is outside of products, by the arrays' dtype: 16-bit numbers in pairs, or longer ones one by one.

*Packed*, a fragment is a tuple of words: what the next product takes for A, and what is stored. For 16-bit numbers
these are the functions of `fragments`; a float32 word is the number itself, and so is a float64 one, of 64 bits.
"""

from functools import lru_cache

from llvmlite import ir
from numba.cuda import types
from numba.cuda.typing import signature as numba_signature

from ...problem import FLOAT32, FLOAT64
from ..compile import device
from .assembly import (CONSTRAINTS, LLVM_TYPES, emit, float32, float64, int32, int64, pack, registers, uint32, uint64,
                       unpack, with_arity)
from .copies import BOX_ROW, element_address, load_global_doubles, load_global_words
from .fragments import make_pack16, make_part, make_store_packed, make_unpack16, store_rows

PART = 16       # rows of one part of a fragment


def _make_same_bits(of, to):
    """Build the function that takes registers of one type for those of another."""
    def same_bits(typing_context, fragment):
        def codegen(context, builder, signature, args):
            return pack(builder, [builder.bitcast(x, LLVM_TYPES[to]) for x in unpack(builder, args[0], fragment.count)])

        return numba_signature(registers(to, fragment.count), registers(of, fragment.count)), codegen

    return with_arity(same_bits, ("fragment",))


_PACK = {FLOAT32: _make_same_bits(float32, uint32), FLOAT64: _make_same_bits(float64, float64)}
_UNPACK = {FLOAT32: _make_same_bits(uint32, float32), FLOAT64: _make_same_bits(float64, float64)}


def word_type(dtype):
    """Numba's type of a word."""
    return float64 if dtype == FLOAT64 else uint32


def make_pack(dtype):
    """Build ``pack(fragment)``."""
    return _PACK.get(dtype) or make_pack16(dtype)


def make_unpack(dtype):
    """Build ``unpack(packed)``, its inverse."""
    return _UNPACK.get(dtype) or make_unpack16(dtype)


def make_load_piece(dtype):
    """Build ``load_piece(address)``: words from 16 bytes of global memory."""
    return load_global_doubles if dtype == FLOAT64 else load_global_words


def _store_numbers(typing_context, packed, address, row_bytes, rows, columns):
    """`fragments.store_rows` for longer numbers: two neighbours at once, and those of a quad's four lanes side by side.
    """
    item = packed.dtype.bitwidth // 8

    def codegen(context, builder, signature, args):
        words, (_, address, row_bytes, rows, columns) = unpack(builder, args[0], packed.count), args
        int32_, int64_ = ir.IntType(32), ir.IntType(64)
        lane = emit(builder, "mov.u32 $0, %tid.x;", int32_, ["=r"], [], [], pure=True)
        first = builder.shl(builder.and_(lane, int32_(3)), int32_(1))
        address = builder.add(address, builder.zext(builder.shl(first, int32_(item.bit_length() - 1)), int64_))
        for half in range(2):
            at = builder.add(address, builder.mul(row_bytes, int64_(8 * half)))
            left = builder.select(builder.icmp_signed(">", rows, int32_(8 * half)), columns, int32_(0))
            left = builder.sub(left, first)
            for group in range(packed.count // 4):
                emit(builder, f"{{ .reg .pred inside; setp.gt.s32 inside, $0, {8 * group}; "
                     f"@inside st.global.v2.b{8 * item} [$1 + {8 * item * group}], {{$2, $3}}; }}", ir.VoidType(), [],
                     [left, at, *words[4 * group + 2 * half:4 * group + 2 * half + 2]],
                     ["r", "l", *[CONSTRAINTS[packed.dtype]] * 2])
        return context.get_dummy_value()

    return numba_signature(types.void, packed, uint64, int64, int32, int32), codegen


_store_number_rows = with_arity(_store_numbers, ("packed", "address", "row_bytes", "rows", "columns"))


def make_store_rows(dtype):
    """Build ``store_rows(packed, address, row_bytes, rows, columns)``: see `fragments.store_rows`."""
    return _store_number_rows if dtype in _PACK else store_rows


@lru_cache(maxsize=None)
def make_store_parts(parts, dtype):
    """Build ``store_parts(packed, array, b, h, row, column)``: write a fragment, from its first row and column on.

    What lies outside of the array is not written.
    """
    store_rows, item = make_store_rows(dtype), dtype.itemsize
    part_0, part_1 = make_part(parts, 0), make_part(parts, parts - 1)

    @device
    def store_part(packed, array, b, h, row, column):
        store_rows(packed, element_address(array, b, h, row) + uint64(column * item), array.strides[2],
                   int32(array.shape[2] - row), int32(array.shape[3] - column))

    @device
    def store_parts(packed, array, b, h, row, column):
        store_part(part_0(packed), array, b, h, row, column)
        if parts == 2:
            store_part(part_1(packed), array, b, h, int32(row + PART), column)

    return store_parts


@lru_cache(maxsize=None)
def make_store_box(parts, dtype, rows):
    """Build ``store_box(packed, address)``: into swizzled boxes of so many rows, behind one another.

    `address`: that of the thread's first number, in the first of its rows.
    """
    if dtype not in _PACK:
        return make_store_packed(parts)         # one box: its rows hold 64 columns of 16 bits
    item = dtype.itemsize

    def store_box(typing_context, packed, address):
        def codegen(context, builder, signature, args):
            words = unpack(builder, args[0], packed.count)
            for pair in range(packed.count // 2):
                part, within = divmod(pair, packed.count // 2 // parts)
                column, half = divmod(within, 2)
                box, column = divmod(column, BOX_ROW // (8 * item))
                emit(builder, f"{{ .reg .b32 at; xor.b32 at, $0, {8 * item * column}; "
                     f"st.shared.v2.b{8 * item} [at + {(box * rows + 16 * part + 8 * half) * BOX_ROW}], {{$1, $2}}; }}",
                     ir.VoidType(), [], [args[1], *words[2 * pair:2 * pair + 2]],
                     ["r", *[CONSTRAINTS[packed.dtype]] * 2])
            return context.get_dummy_value()

        return numba_signature(types.void, packed, uint32), codegen

    return with_arity(store_box, ("packed", "address"))
