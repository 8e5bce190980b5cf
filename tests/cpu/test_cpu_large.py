"""Offsets past 2^31 elements, and a batch * heads past 2^16; memory that nobody touches costs nothing."""

import numpy as np
from helpers import Engine, problem

CPU = Engine("cpu", "numpy")


def test_keys_and_values_more_than_2_to_the_31_elements_apart():
    """pytorch#190857, flash-attention PR#1500, numba#9229: a 32-bit offset wraps, and another batch is read."""
    n, d, step = 33, 16, 2**31 + 64
    memory = np.empty(step + 4096, np.float16)
    strides = (2 * step, 2 * n * d, 2 * d, 2)
    k, v = (np.lib.stride_tricks.as_strided(memory[start:], (2, 1, n, d), strides) for start in (0, 1024))
    do, q, new_k, new_v = problem(batch=2, heads=1, n_q=n, d=d, dtype=np.float16)
    k[...], v[...] = new_k, new_v
    for x, y in zip(CPU.both(do, q, k, v), CPU.both(do, q, new_k, new_v)):
        np.testing.assert_array_equal(x, y)


def test_many_heads():
    do, q, k, v = problem(batch=700, heads=100, n_q=2, d=4)
    whole, part = CPU.both(do, q, k, v), CPU.both(*(x[-1:] for x in (do, q, k, v)))
    for x, y in zip(whole, part):
        np.testing.assert_array_equal(x[-1:], y)
        assert np.isfinite(x).all()
