"""The host's part of TMA: a tensor map says where the boxes of an array lie."""

import ctypes
from functools import lru_cache

from ...problem import FLOAT16
from ..launch import call_driver
from .config import BOX

FLOAT16_CODE, BFLOAT16_CODE = 6, 9                          # CUtensorMapDataType
NO_INTERLEAVE, SWIZZLE_128, L2_256, FILL_ZEROS = 0, 3, 3, 0     # CUtensorMapInterleave, ...Swizzle, ...
ALIGNMENT = 16                                              # bytes, of the base and of all strides
LARGEST_STRIDE = 1 << 40


def addressable(x):
    """Whether a tensor map can describe an array of four axes."""
    return (x.data.ptr % ALIGNMENT == 0 and (x.strides[3] == x.itemsize or x.shape[3] == 1)
            and all(size == 1 or (stride % ALIGNMENT == 0 and 0 < stride < LARGEST_STRIDE)
                    for size, stride in zip(x.shape[:3], x.strides)))


def for_copies(x):
    """`x`, or a copy of it if it isn't `addressable`."""
    if addressable(x):
        return x
    import cupy
    return cupy.ascontiguousarray(x.view("uint16")).view(x.dtype)


def encode(x, rows):
    """The tensor map of a (batch, heads, n, d) array, in boxes of 64 columns and so many rows: 128 bytes.

    ``cuTensorMapEncodeTiled``; axes are counted from the innermost one. Costs about a microsecond, and no call of the
    GPU: the map goes to the kernel by value.
    """
    strides = [stride if size > 1 else ALIGNMENT for size, stride in zip(x.shape, x.strides)]
    return _encode(x.dtype == FLOAT16, x.data.ptr, x.shape, tuple(strides), rows)


@lru_cache(maxsize=1024)
def _encode(is_float16, address, shape, strides, rows):
    space = ctypes.create_string_buffer(128 + 64)
    start = -ctypes.addressof(space) % 64                   # the driver wants a multiple of 64
    call_driver("cuTensorMapEncodeTiled", ctypes.byref(space, start), FLOAT16_CODE if is_float16 else BFLOAT16_CODE, 4,
                ctypes.c_void_p(address), (ctypes.c_uint64 * 4)(*shape[::-1]), (ctypes.c_uint64 * 3)(*strides[2::-1]),
                (ctypes.c_uint32 * 4)(BOX, rows, 1, 1), (ctypes.c_uint32 * 4)(1, 1, 1, 1),
                NO_INTERLEAVE, SWIZZLE_128, L2_256, FILL_ZEROS)
    return space.raw[start:start + 128]
