"""What the machine does at most, measured in the same run as what is held against it."""

import numpy as np

from . import peers
from .measure import awake_seconds, batch_seconds, in_turn

SIZE = {"gpu": 8192, "cpu": 2048}               # of the matrices
COPIED = 2**30                                  # bytes


def product(dtype, gpu=True):
    """A call that multiplies two square matrices of normal numbers, and its count of operations.

    NumPy's or CuPy's product, but for bfloat16 PyTorch's: CuPy has none. Without PyTorch float16 stands in for it,
    which is as fast on all tensor cores.
    """
    if gpu:
        import cupy as xp
    else:
        xp = np
    size = SIZE["gpu" if gpu else "cpu"]
    a, b = xp.random.default_rng(0).standard_normal((2, size, size), dtype=np.float32)
    if dtype == "bfloat16" and not peers.why_not():
        a, b = (peers.as_tensor(x).bfloat16() for x in (a, b))
    elif dtype != "float32":
        other = np.float64 if dtype == "float64" else np.float16
        a, b = a.astype(other), b.astype(other)
    return lambda: a @ b, 2 * size**3


def products(dtypes, gpu=True, rounds=3):
    """TFLOP/s (on a CPU GFLOP/s) of a `product` in each dtype."""
    calls = {dtype: product(dtype, gpu) for dtype in dict.fromkeys(dtypes)}
    seconds = in_turn({dtype: call for dtype, (call, _) in calls.items()}, batch_seconds if gpu else awake_seconds,
                      rounds)
    return {dtype: calls[dtype][1] / taken * (1e-12 if gpu else 1e-9) for dtype, taken in seconds.items()}


def copying(rounds=3):
    """GB/s that a GPU's memory moves when an array is copied, reads and writes counted."""
    import cupy as cp

    a = cp.zeros(COPIED // 4, np.float32)
    b = cp.empty_like(a)
    seconds = in_turn({"copy": lambda: cp.copyto(b, a)}, batch_seconds, rounds)["copy"]
    return 2 * COPIED / seconds * 1e-9
