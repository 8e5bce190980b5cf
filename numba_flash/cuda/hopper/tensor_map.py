"""The host's part of TMA: a tensor map says where the boxes of an array lie."""

import ctypes
from functools import lru_cache

from ...problem import BFLOAT16, FLOAT16, FLOAT32
from ..launch import call_driver
from ..tensor_cores.host import ALIGNMENT

CODES = {FLOAT16: 6, FLOAT32: 7, BFLOAT16: 9}               # CUtensorMapDataType
NO_INTERLEAVE, NO_SWIZZLE, SWIZZLE_128, L2_256, FILL_ZEROS = 0, 0, 3, 3, 0      # CUtensorMapInterleave, ...Swizzle, ...
BOX_BYTES = 128                                             # of a row: as many as the swizzle has


def encode(x, rows, swizzle=SWIZZLE_128):
    """The tensor map of a (batch, heads, n, d) array, in boxes of 128 bytes and so many rows: 128 bytes, too.

    The map goes to the kernel by value. It depends on nothing but what the array is, so that the next array at the same
    place, of the same shape, has the same: allocators give memory back in the same places again and again.
    """
    return _encode(x.dtype, x.data.ptr, x.shape, x.strides, rows, swizzle)


@lru_cache(maxsize=1024)
def _encode(dtype, address, shape, strides, rows, swizzle):
    """``cuTensorMapEncodeTiled``; axes are counted from the innermost one. Asks nothing of the GPU."""
    strides = [stride if size > 1 else ALIGNMENT for size, stride in zip(shape, strides)]
    space = ctypes.create_string_buffer(128 + 64)
    start = -ctypes.addressof(space) % 64                   # the driver wants a multiple of 64
    call_driver("cuTensorMapEncodeTiled", ctypes.byref(space, start),
                CODES[dtype], 4, ctypes.c_void_p(address),
                (ctypes.c_uint64 * 4)(*shape[::-1]), (ctypes.c_uint64 * 3)(*strides[2::-1]),
                (ctypes.c_uint32 * 4)(BOX_BYTES // dtype.itemsize, rows, 1, 1), (ctypes.c_uint32 * 4)(1, 1, 1, 1),
                NO_INTERLEAVE, swizzle, L2_256, FILL_ZEROS)
    return space.raw[start:start + 128]
