"""Shared-memory tiles, 16-byte loads from them, and 16-bit floats: what Numba's arrays can't say.

Each function exists twice, for the GPU and for the CUDA simulator; kernels see no difference.
"""

from functools import lru_cache, partial
from math import prod

import numpy as np

from ..problem import BFLOAT16, FLOAT16
from . import SIMULATOR
from .compile import cuda, device
from .config import elements

if cuda is not None and not SIMULATOR:
    from llvmlite import ir
    from numba.cuda import cgutils, libdevice, types
    from numba.cuda.extending import intrinsic

VECTOR = 4          # elements that `load4` reads at once
ALIGNMENT = 16      # bytes, of a 128-bit load from shared memory
GLOBAL_SPACE, SHARED_SPACE = 1, 3       # numbers of address spaces in NVVM


def make_shared_tiles(shapes, real):
    """Cut the block's dynamic shared memory up.

    Static shared arrays end at 48 KB, and Numba's dynamic one has one axis and no constant sizes.

    Parameters
    ----------
    shapes : list of tuple of int
        One or two axes each.
    real : numba type
        Of all elements.

    Returns
    -------
    list of device functions
        Each, called without arguments in a kernel, returns its tile as an array.
    """
    starts = [elements(shapes[:n]) for n in range(len(shapes))]
    make = _simulated_tile if SIMULATOR else _gpu_tile
    return [make(start, shape, real) for start, shape in zip(starts, shapes)]


def _simulated_tile(start, shape, real):
    @device
    def tile():
        memory = cuda.shared.array(0, real)
        return memory[start:start + prod(shape)].reshape(shape)

    return tile


def _gpu_tile(start, shape, real):
    tile_type = types.Array(real, len(shape), "C")
    size = real.bitwidth // 8
    strides = [prod(shape[axis + 1:]) * size for axis in range(len(shape))]

    @intrinsic
    def tile(typing_context):
        def codegen(context, builder, signature, args):
            memory = builder.module.globals.get("dynamic_shared_memory")
            if memory is None:
                memory = ir.GlobalVariable(builder.module, ir.ArrayType(ir.IntType(8), 0),
                                           "dynamic_shared_memory", SHARED_SPACE)
                memory.linkage = "external"
                memory.align = ALIGNMENT
            address = builder.addrspacecast(memory, memory.type.pointee.as_pointer(), "generic")
            address = builder.gep(builder.bitcast(address, ir.IntType(8).as_pointer()),
                                  [ir.Constant(ir.IntType(64), start * size)])
            array = context.make_array(tile_type)(context, builder)
            intp = partial(context.get_constant, types.intp)
            context.populate_array(array, data=builder.bitcast(address, array.data.type), shape=list(map(intp, shape)),
                                   strides=list(map(intp, strides)), itemsize=intp(size), meminfo=None)
            return array._getvalue()

        return tile_type(), codegen

    return tile


def _make_read():
    """Build ``read(x, index)``: ``x[index]`` of an array in global memory, for indices that are not negative.

    Numba's own indexing makes generic loads, which might read shared memory and so wait for every store to it.
    """
    if SIMULATOR:
        return device(lambda x, index: x[index])

    @intrinsic
    def read(typing_context, x, index):
        def codegen(context, builder, signature, args):
            array = context.make_array(x)(context, builder, args[0])
            indices = cgutils.unpack_tuple(builder, args[1])
            strides = cgutils.unpack_tuple(builder, array.strides)
            address = builder.bitcast(array.data, ir.IntType(8).as_pointer())
            for value, its_type, stride in zip(indices, index, strides):
                wide = context.cast(builder, value, its_type, types.intp)
                address = builder.gep(address, [builder.mul(wide, stride)])
            element = array.data.type.pointee.as_pointer(GLOBAL_SPACE)
            address = builder.addrspacecast(builder.bitcast(address, array.data.type), element)
            return context.data_model_manager[x.dtype].from_data(builder, builder.load(address))

        return x.dtype(x, index), codegen

    return read


def _make_load4():
    """Build ``load4(tile, row, col)``: ``tile[row, col:col + 4]`` by 128-bit loads; the address is a multiple of 16."""
    if SIMULATOR:
        return device(lambda tile, row, col: tile[row, col:col + VECTOR])

    @intrinsic
    def load4(typing_context, tile, row, col):
        def codegen(context, builder, signature, args):
            array = context.make_array(tile)(context, builder, args[0])
            i, j = (context.cast(builder, arg, ty, types.intp) for arg, ty in zip(args[1:], signature.args[1:]))
            columns = builder.extract_value(array.shape, 1)
            address = builder.gep(array.data, [builder.add(builder.mul(i, columns), j)])
            vector = ir.VectorType(context.get_data_type(tile.dtype), VECTOR)
            loaded = builder.load(builder.bitcast(address, vector.as_pointer()), align=ALIGNMENT)
            parts = [builder.extract_element(loaded, ir.Constant(ir.IntType(32), n)) for n in range(VECTOR)]
            return context.make_tuple(builder, signature.return_type, parts)

        return types.UniTuple(tile.dtype, VECTOR)(tile, row, col), codegen

    return load4


read, load4 = (None, None) if cuda is None else (_make_read(), _make_load4())


@lru_cache(maxsize=None)
def make_conversions(dtype):
    """Build ``to_real(element)`` and ``from_real(value)`` for arrays of one dtype.

    Kernels get 16-bit floats as uint16, for Numba has no arrays of bfloat16, and compute in float32.
    """
    if dtype not in (FLOAT16, BFLOAT16):
        def keep(x):
            return x

        return device(keep), device(keep)

    if SIMULATOR:
        def to_real(bits):
            return np.uint16(bits).view(dtype).astype(np.float32)

        def from_real(x):
            return np.float32(x).astype(dtype).view(np.uint16)

    elif dtype == FLOAT16:
        def to_real(bits):
            return libdevice.half2float(types.int16(bits))

        def from_real(x):
            return types.uint16(libdevice.float2half_rn(x))

    else:
        def to_real(bits):
            return libdevice.int_as_float(types.int32(types.uint32(bits) << types.uint32(16)))

        def from_real(x):
            bits = types.uint32(libdevice.float_as_int(x))
            upper = types.uint32(bits >> types.uint32(16))
            if x != x:
                return types.uint16(upper | types.uint32(0x40))         # NaN stays NaN, whichever bits are cut
            half = types.uint32(types.uint32(0x7fff) + (upper & types.uint32(1)))     # ties to even
            return types.uint16(types.uint32(bits + half) >> types.uint32(16))

    return device(to_real), device(from_real)
