"""Conversion of the 16-bit dtypes, for every bit pattern there is."""

import ml_dtypes
import numpy as np
import pytest
from numba import njit

from numba_flash.cpu import half

PATTERNS = np.arange(2**16, dtype=np.uint16)
CONVERSIONS = {np.float16: (half.float16_to_float, half.float_to_float16),
               ml_dtypes.bfloat16: (half.bfloat16_to_float, half.float_to_bfloat16)}


def mapped(function, x, dtype):
    """`function` of every element, in one compiled loop, as in the kernels."""
    @njit
    def loop(x, y):
        for i in range(len(x)):
            y[i] = function(x[i])

    y = np.empty(len(x), dtype)
    loop(x, y)
    return y


@pytest.mark.parametrize("dtype", CONVERSIONS)
def test_every_pattern_reads_as_numpy_reads_it(dtype):
    right = PATTERNS.view(dtype).astype(np.float32)
    got = mapped(CONVERSIONS[dtype][0], PATTERNS, np.float32)
    nan = np.isnan(right)
    np.testing.assert_array_equal(np.isnan(got), nan)
    np.testing.assert_array_equal(got[~nan].view(np.uint32), right[~nan].view(np.uint32))      # bits: -0 is not 0


@pytest.mark.parametrize("dtype", CONVERSIONS)
def test_rounds_to_nearest_even(dtype):
    # Every value, every midpoint of two neighbours, and a float32 step to either side of each.
    with np.errstate(all="ignore"):
        values = np.sort(PATTERNS.view(dtype).astype(np.float32))
        values = values[np.isfinite(values)]
        middles = ((values[1:].astype(np.float64) + values[:-1]) / 2).astype(np.float32)
        around = np.concatenate([values, middles])
        x = np.concatenate([around, np.nextafter(around, np.float32(np.inf)),
                            np.nextafter(around, np.float32(-np.inf)),
                            np.float32([65519.996, 65520, 1e30, 3.4e38, 1e-45, -1e-45, np.inf, -np.inf])])
        right = x.astype(dtype).view(np.uint16)
    got = mapped(CONVERSIONS[dtype][1], x, np.uint16)
    np.testing.assert_array_equal(got, right)


@pytest.mark.parametrize("dtype", CONVERSIONS)
def test_nan_stays_nan(dtype):
    bits = np.uint32([0x7f800001, 0x7fffffff, 0xff800001, 0xffffffff, 0x7fc00000])
    got = mapped(CONVERSIONS[dtype][1], bits.view(np.float32), np.uint16)
    assert np.isnan(got.view(dtype).astype(np.float32)).all()
