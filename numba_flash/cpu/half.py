"""float16 and bfloat16, which Numba does not know, as their 16 bits: conversion from and to float32.

Plain arithmetic in which both sides of every condition are cheap, so that LLVM turns a loop over it into vector code.
"""

import numpy as np
from numba import njit, types, uint16, uint32
from numba.extending import intrinsic


def _make_bitcast(source, target):
    @intrinsic
    def bitcast(typing, x):
        def codegen(context, builder, sig, args):
            return builder.bitcast(args[0], context.get_value_type(target))

        return target(source), codegen

    return bitcast


float_bits = _make_bitcast(types.float32, types.uint32)
float_from_bits = _make_bitcast(types.uint32, types.float32)

SMALLEST_NORMAL = np.float32(2.0**-14)
SMALLEST_NORMAL_BITS = uint32((127 - 14) << 23)
OVERFLOW_BITS = uint32((127 + 16) << 23)
REBIAS = uint32((127 - 15) << 23)
# At this size the last bit of a float32 is the last bit of a float16 subnormal, so adding it rounds to that bit.
SUBNORMAL_ROUNDER = np.float32(0.5)
SUBNORMAL_ROUNDER_BITS = uint32((127 - 1) << 23)


@njit
def bfloat16_to_float(h):
    """float32 value of bfloat16 bits: they are its upper half."""
    return float_from_bits(uint32(uint32(h) << uint32(16)))


@njit
def float_to_bfloat16(x):
    """bfloat16 bits of a float32, rounded to nearest, ties to even."""
    bits = float_bits(x)
    rounded = uint32(bits + uint32(0x7fff) + ((bits >> uint32(16)) & uint32(1))) >> uint32(16)
    quiet_nan = (bits >> uint32(16)) | uint32(0x40)
    return uint16(quiet_nan if x != x else rounded)


@njit
def float16_to_float(h):
    """float32 value of float16 bits."""
    magnitude = uint32(uint32(h & 0x7fff) << uint32(13))
    sign = uint32(uint32(h & 0x8000) << uint32(16))
    normal = uint32(magnitude + REBIAS)
    special = uint32(normal + REBIAS)           # the exponent of Inf and NaN is all ones in both formats
    # A subnormal m * 2**-24 is (1 + m * 2**-10) * 2**-14 less 2**-14.
    subnormal = float_bits(float_from_bits(uint32(magnitude + SMALLEST_NORMAL_BITS)) - SMALLEST_NORMAL)
    bits = special if magnitude >= uint32(0x7c00 << 13) else normal
    bits = subnormal if magnitude < uint32(0x0400 << 13) else bits
    return float_from_bits(uint32(bits | sign))


@njit
def float_to_float16(x):
    """float16 bits of a float32, rounded to nearest, ties to even."""
    bits = float_bits(x)
    magnitude = bits & uint32(0x7fffffff)
    sign = (bits >> uint32(16)) & uint32(0x8000)
    # Rounding may carry into the exponent, up to Inf: the bits of the next larger number follow on.
    normal = uint32(magnitude - REBIAS + uint32(0xfff) + ((magnitude >> uint32(13)) & uint32(1))) >> uint32(13)
    subnormal = uint32(float_bits(float_from_bits(magnitude) + SUBNORMAL_ROUNDER) - SUBNORMAL_ROUNDER_BITS)
    half = subnormal if magnitude < SMALLEST_NORMAL_BITS else normal
    half = uint32(0x7c00) if magnitude >= OVERFLOW_BITS else half
    half = uint32(0x7e00) if x != x else half
    return uint16(half | sign)
