"""NumPy, CuPy or something else? Which device, and may it be written?

Imports nothing that the caller did not bring: CuPy is looked for in ``sys.modules``, and imported only to adopt an
array that already lives on a GPU.
"""

import sys
from contextlib import nullcontext

import numpy as np

DLPACK_CPU, DLPACK_CUDA, DLPACK_CUDA_HOST = 1, 2, 3      # the last is pinned host memory
HERE = nullcontext()        # entering a device, even the current one, takes a microsecond


def alike(q, k, v):
    """Whether these are NumPy arrays, or CuPy arrays of one device, so that there is nothing to `adopt`."""
    kind = type(q)
    if type(k) is not kind or type(v) is not kind:
        return False
    if kind is np.ndarray:
        return True
    cupy = sys.modules.get("cupy")
    return (cupy is not None and kind is cupy.ndarray
            and q.data.device_id == k.data.device_id == v.data.device_id)


def adopt(x, name):
    """Take an argument as a NumPy or CuPy array, without copying.

    Parameters
    ----------
    x : object
        A NumPy or CuPy array, or anything that speaks ``__cuda_array_interface__`` or DLPack.
    name : str
        What to call it in an error.

    Returns
    -------
    array : numpy.ndarray or cupy.ndarray
        The same memory; foreign GPU arrays become CuPy arrays, foreign host arrays NumPy arrays.
    origin : str
        The library that it came from, for "arrays of different libraries".

    Raises
    ------
    TypeError
        For lists, matrices, masked arrays, and whatever can't be viewed as an array.
    """
    if type(x) is np.ndarray:
        return x, "numpy"
    if isinstance(x, np.ndarray):
        if isinstance(x, (np.matrix, np.ma.MaskedArray)):
            raise TypeError(f"{name} must be a plain array, got {type(x).__name__}: its rules for shapes and missing "
                            f"values are not those of attention; pass np.asarray({name}) or its .data and a mask")
        return x.view(np.ndarray), "numpy"
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(x, cupy.ndarray):
        return x, "cupy"
    if x is None:
        raise TypeError(f"{name} must be an array, got None")
    if isinstance(x, (list, tuple, str, bytes, int, float, complex, np.generic)):
        advice = "np.empty(shape, dtype)" if name == "out" else f"np.asarray({name})"      # asarray copies
        raise TypeError(f"{name} must be an array, got {type(x).__name__}; pass {advice}")
    origin = type(x).__module__.partition(".")[0]
    try:
        return _adopt_foreign(x, name), origin
    except (TypeError, ValueError, BufferError, RuntimeError, AttributeError, ImportError) as error:
        raise TypeError(f"{name} must be a NumPy or CuPy array or speak DLPack or __cuda_array_interface__, got "
                        f"{type(x).__module__}.{type(x).__name__}: {error}") from error


def _adopt_foreign(x, name):
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        kind = int(x.__dlpack_device__()[0])
        if kind in (DLPACK_CPU, DLPACK_CUDA_HOST):
            return np.from_dlpack(x)
        if kind == DLPACK_CUDA:
            return _import_cupy(name).from_dlpack(x)
        raise TypeError(f"it is on a DLPack device of kind {kind}, neither CPU (1) nor CUDA (2)")
    if hasattr(x, "__cuda_array_interface__"):
        return _import_cupy(name).asarray(x)
    raise TypeError("it speaks neither")


def _import_cupy(name):
    try:
        import cupy
    except ImportError as error:
        raise ImportError(f"{name} is on a GPU, which needs CuPy: pip install cupy-cuda13x "
                          f"(or cupy-cuda12x)") from error
    return cupy


def namespace(x):
    """The module, NumPy or CuPy, whose array `x` is."""
    return np if isinstance(x, np.ndarray) else sys.modules["cupy"]


def device(x):
    """The CUDA device number of `x`, or None for host memory."""
    return None if isinstance(x, np.ndarray) else x.data.device_id


def on_device(x):
    """Context in which the device of `x` is CuPy's current one; the caller's is back afterwards."""
    if isinstance(x, np.ndarray) or x.data.device_id == sys.modules["cupy"].cuda.runtime.getDevice():
        return HERE
    return x.device


def empty(xp, shape, dtype):
    """Memory for an answer. All of it comes from here, so that tests can fill it with NaN first.

    ``xp.empty`` does no more, but takes longer in CuPy, and a small call is short.
    """
    return xp.ndarray(shape, dtype)


def byte_bounds(x):
    """First address of `x` and the one past its last, whatever the signs of its strides."""
    low = high = x.ctypes.data if isinstance(x, np.ndarray) else x.data.ptr
    for size, stride in zip(x.shape, x.strides):
        low += min(0, (size - 1) * stride)
        high += max(0, (size - 1) * stride)
    return low, high + x.itemsize


def overlap(x, y):
    """Whether `x` and `y` share an element (for arrays that are too intricate to tell: whether they might)."""
    if 0 in (x.size, y.size) or device(x) != device(y):
        return False
    (x_low, x_high), (y_low, y_high) = byte_bounds(x), byte_bounds(y)
    if x_high <= y_low or y_high <= x_low:
        return False
    try:
        return np.shares_memory(_on_host(x), _on_host(y), max_work=10_000)
    except np.exceptions.TooHardError:
        return True


def _on_host(x):
    """An array of the same addresses and strides, never read: NumPy's overlap test wants its own arrays."""
    if isinstance(x, np.ndarray):
        return x

    class Addresses:
        __array_interface__ = {"version": 3, "data": (x.data.ptr, True), "shape": x.shape, "strides": x.strides,
                               "typestr": f"|V{x.itemsize}"}

    return np.asarray(Addresses())


def repeats_itself(x):
    """Whether two positions of `x` may be the same memory (a stride of 0, say), so that writing makes no sense."""
    axes = sorted((abs(stride), size) for size, stride in zip(x.shape, x.strides) if size > 1)
    extent = x.itemsize
    for stride, size in axes:
        if stride < extent:
            return x.size > 0
        extent = stride * (size - 1) + extent
    return False


def may_write(x):
    """Whether `x` may be written."""
    return x.flags.writeable if isinstance(x, np.ndarray) else True
