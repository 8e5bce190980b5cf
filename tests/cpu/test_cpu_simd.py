"""exp and tanh of register blocks, and the tile multiply."""

import math

import numpy as np
import pytest
from numba import njit

from numba_flash.cpu.simd import ROWS, VECTOR_BYTES, exp, load_row, store, width
from numba_flash.cpu.tiles import allocate, multiply, multiply_add, pitch, round_up

DTYPES = ("float32", "float64")


def tile(x):
    """A tile that holds x."""
    row = pitch(x.shape[1], x.itemsize)
    memory = allocate(x.shape[0] * row, x.dtype)
    memory[:] = 0
    padded = memory.reshape(-1, row)[:, :round_up(x.shape[1], 2 * VECTOR_BYTES // x.itemsize)]
    padded[:, :x.shape[1]] = x
    return padded


@njit
def exp_and_tanh(x, e, t):
    for c in range(0, x.shape[1], width(x)):
        store(exp(load_row(x, 0, c)), e, 0, c)
        store(math.tanh(load_row(x, 0, c)), t, 0, c)


def both(x):
    x = tile(x[None])
    e, t = tile(np.zeros(x.shape, x.dtype)), tile(np.zeros(x.shape, x.dtype))
    exp_and_tanh(x, e, t)
    return e[0], t[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("largest", (1e-3, 0.5, 20, 87))
def test_exp_and_tanh_are_right_to_the_last_bits(dtype, largest):
    x = np.random.default_rng(0).uniform(-largest, largest, 4096).astype(dtype)
    e, t = both(x)
    exact = x.astype(np.longdouble)
    eps = np.finfo(dtype).eps
    assert np.max(np.abs(e / np.exp(exact) - 1)) < 1.01 * eps
    assert np.max(np.abs(t / np.tanh(exact) - 1)) < 5 * eps


@pytest.mark.parametrize("dtype", DTYPES)
def test_exp_and_tanh_at_the_ends(dtype):
    largest = np.finfo(dtype).max
    x = np.array([0, -np.inf, np.inf, np.nan, -largest, largest, -800, 800] * 8, dtype)
    e, t = both(x)
    np.testing.assert_array_equal(e[:8], [1, 0, np.inf, np.nan, 0, np.inf, 0, np.inf])
    np.testing.assert_array_equal(t[:8], [0, -1, 1, np.nan, -1, 1, -1, 1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth", (1, 2, 7, 64))
def test_multiply(dtype, depth):
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((2 * ROWS, depth)).astype(dtype), rng.standard_normal((depth, 128)).astype(dtype)
    c = tile(np.full((2 * ROWS, 128), np.nan, dtype))
    eps = np.finfo(dtype).eps
    multiply(c, tile(a)[:, :depth], tile(b))
    np.testing.assert_allclose(c, a @ b, atol=20 * eps * depth)
    multiply_add(c, tile(np.ascontiguousarray(a.T)).T, tile(b), 0.5)
    np.testing.assert_allclose(c, 1.5 * (a @ b), atol=40 * eps * depth)
