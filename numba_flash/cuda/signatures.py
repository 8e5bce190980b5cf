"""Numba types of kernel parameters."""

from ..problem import FLOAT64
from .compile import cuda

if cuda is None:
    int32 = none = counters = None
else:
    from numba import boolean, float32, float64, int32, int64, uint16  # noqa: F401 (int32 is for kernels)
    from numba.cuda import types

    none = types.none
    counters = types.Array(int32, 4, "C")


def real_type(dtype):
    """Type of sums: float64 for float64, else float32."""
    return float64 if dtype == FLOAT64 else float32


def array_type(dtype, ndim):
    """Type of an array with any strides; 16-bit floats come as uint16."""
    element = uint16 if dtype.itemsize == 2 else real_type(dtype)
    return types.Array(element, ndim, "A")


def real_array(dtype, ndim):
    """Type of an array of `real_type`."""
    return types.Array(real_type(dtype), ndim, "A")


def option_types(spec):
    """Types of the parameters that all kernels end with: slopes, bias, mask, scale, cap, offset, left, right."""
    real = real_type(spec.dtype)
    return (types.Array(real, 2, "A") if spec.alibi else none,
            types.Array(real, 4, "A") if spec.bias else none,
            types.Array(boolean, 4, "A") if spec.mask else none,
            real, real, int64, int64, int64)
