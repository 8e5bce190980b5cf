"""Tiles: small padded matrices in scratch memory, how they are filled, multiplied and written back.

A tile is a two-dimensional array (layout "A", rows contiguous and aligned) of float32 or float64. Its rows are padded
to whole blocks with zeros or with values that nobody looks at.
"""

import numpy as np
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload, register_jitable
from numba.np.arrayobj import make_array, populate_array

from .half import bfloat16_to_float, float16_to_float, float_to_bfloat16, float_to_float16
from .simd import (ROWS, VECTOR_BYTES, VECTORS, fma, load_block, load_row, rank1, store, sum_of, width, zero_block,
                   zero_row)

ALIGNMENT = 64


@register_jitable
def round_up(n, step):
    """The least multiple of `step` that is at least n."""
    return (n + step - 1) // step * step


@register_jitable
def pitch(columns, itemsize):
    """Elements from one row of a tile to the next.

    An odd number of vectors: with a power of two, a column of the tile would fall into a few sets of the L1 cache.
    """
    vectors = round_up(columns * itemsize, VECTORS * VECTOR_BYTES) // VECTOR_BYTES
    return (vectors + 1) * VECTOR_BYTES // itemsize


def allocate(elements, dtype):
    """Scratch memory for tiles, aligned: a vector that straddles two cache lines costs twice."""
    raw = np.empty(elements * dtype.itemsize + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start:start + elements * dtype.itemsize].view(dtype)


@intrinsic
def _view(typing, array, offset, rows, columns, row_elements):
    """A tile over part of a one-dimensional array. It owns nothing, so that passing it on costs no reference count."""
    tile_type = types.Array(array.dtype, 2, "A")

    def codegen(context, builder, sig, args):
        array_value, offset, rows, columns, row_elements = args
        source = make_array(sig.args[0])(context, builder, array_value)
        itemsize = context.get_constant(types.intp, array.dtype.bitwidth // 8)
        tile = make_array(tile_type)(context, builder)
        populate_array(tile, data=builder.gep(source.data, [offset]), shape=(rows, columns),
                       strides=(builder.mul(row_elements, itemsize), itemsize), itemsize=itemsize, meminfo=None)
        return tile._getvalue()

    return tile_type(array, *[types.intp] * 4), codegen


@njit
def take(scratch, rows, columns):
    """A tile of rows x (columns, padded to whole blocks) from the start of `scratch`, and the rest of `scratch`."""
    row_elements = pitch(columns, scratch.itemsize)
    tile = _view(scratch, 0, rows, round_up(columns, width(scratch)), row_elements)
    return tile, scratch[rows * row_elements:]


@intrinsic
def row_of(typing, array, row):
    """Row of a two-dimensional array whose rows are contiguous, as a type that says so: LLVM vectorises its loops."""
    row_type = types.Array(array.dtype, 1, "C", readonly=not array.mutable, aligned=array.aligned)

    def codegen(context, builder, sig, args):
        source = make_array(sig.args[0])(context, builder, args[0])
        row_stride = cgutils.unpack_tuple(builder, source.strides)[0]
        columns = cgutils.unpack_tuple(builder, source.shape)[1]
        pointer = cgutils.pointer_add(builder, source.data, builder.mul(args[1], row_stride))
        row = make_array(row_type)(context, builder)
        populate_array(row, data=pointer, shape=(columns,), strides=(source.itemsize,), itemsize=source.itemsize,
                       meminfo=None)
        return row._getvalue()

    return row_type(array, types.intp), codegen


def _copy(target, source, bfloat16):
    """Copy one row, or what fits of it, into or out of a tile, converted."""


@overload(_copy)
def _copy_row(target, source, bfloat16):
    if types.uint16 not in (target.dtype, source.dtype):
        def copy(target, source, bfloat16):
            for i in range(min(len(target), len(source))):
                target[i] = source[i]
        return copy

    if source.dtype == types.uint16:
        convert_half, convert_bfloat16 = float16_to_float, bfloat16_to_float
    else:
        convert_half, convert_bfloat16 = float_to_float16, float_to_bfloat16

    def convert(target, source, bfloat16):
        if bfloat16:
            for i in range(min(len(target), len(source))):
                target[i] = convert_bfloat16(source[i])
        else:
            for i in range(min(len(target), len(source))):
                target[i] = convert_half(source[i])

    return convert


@njit
def load(tile, source, bfloat16):
    """Copy `source` (any strides, any dtype) into a tile and fill the rest of the tile with zeros."""
    rows, columns = source.shape
    contiguous = source.strides[1] == source.itemsize
    for r in range(tile.shape[0]):
        target = row_of(tile, r)
        if r >= rows:
            target[:] = 0
        else:
            if contiguous:
                _copy(target, row_of(source, r), bfloat16)
            else:
                _copy(target, source[r], bfloat16)
            target[columns:] = 0


@njit
def unload(target, tile, bfloat16):
    """Copy a tile, or as much of it as there is room for, to `target` (any strides, any dtype)."""
    contiguous = target.strides[1] == target.itemsize
    for r in range(target.shape[0]):
        if contiguous:
            _copy(row_of(target, r), row_of(tile, r), bfloat16)
        else:
            _copy(target[r], row_of(tile, r), bfloat16)


@njit
def transpose(target, source):
    """``target = source.T`` for tiles, of the columns of `source` that `target` has rows for."""
    for r in range(source.shape[0]):
        values = row_of(source, r)
        for c in range(target.shape[0]):
            target[c, r] = values[c]


@njit
def scale_by(tile, factor):
    """``tile *= factor``, with one number for all, or a row of numbers for the columns of a tile one block wide."""
    for r in range(tile.shape[0]):
        for c in range(0, tile.shape[1], width(tile)):
            store(load_row(tile, r, c) * factor, tile, r, c)


@njit
def fill(tile, value):
    """Set every element of a tile."""
    for r in range(tile.shape[0]):
        row_of(tile, r)[:] = value


@njit
def is_finite(tile):
    """Whether no element is NaN or Inf: each of them times 0 is 0."""
    total = zero_row(tile)
    for r in range(tile.shape[0]):
        for c in range(0, tile.shape[1], width(tile)):
            total = fma(load_row(tile, r, c), 0, total)
    return sum_of(total) == 0


@njit
def dot(a, b, r):
    """The dot product of row r of two tiles."""
    total = zero_row(a)
    for c in range(0, a.shape[1], width(a)):
        total = fma(load_row(a, r, c), load_row(b, r, c), total)
    return sum_of(total)


# ---- C = A B. The columns of B and C and the rows of C are whole blocks; A may be a transposed tile.

@njit
def _product(a, b, row, column):
    """The block of A B at (row, column)."""
    total = zero_block(b)
    for k in range(b.shape[0]):
        total = rank1(total, a, row, k, b, column)
    return total


@njit
def multiply(c, a, b):
    """C = A B."""
    for column in range(0, c.shape[1], width(c)):
        for row in range(0, c.shape[0], ROWS):
            store(_product(a, b, row, column), c, row, column)


@njit
def multiply_add(c, a, b, alpha):
    """C = alpha C + A B, with alpha one number, or a row of numbers for the columns of a C one block wide.

    A B is summed for itself, so that the rounding of a long sum grows with the number of tiles, not of keys.
    """
    for column in range(0, c.shape[1], width(c)):
        for row in range(0, c.shape[0], ROWS):
            total = fma(load_block(c, row, column), alpha, _product(a, b, row, column))
            store(total, c, row, column)
