"""What is particular to the backward kernels: tile edges, shared heads, what must not leak, repeatability."""

import ml_dtypes
import numpy as np
import pytest
from helpers import Engine, normal, problem

from numba_flash import cpu
from numba_flash.cpu import BACKWARD_M, BACKWARD_N

CPU = Engine("cpu", "numpy")


@pytest.mark.parametrize("n_q", (1, 2, 33, BACKWARD_M - 1, BACKWARD_M + 1))
@pytest.mark.parametrize("n_k", (1, 7, BACKWARD_N, BACKWARD_N + 1, 2 * BACKWARD_N + 9))
@pytest.mark.parametrize("causal", (False, True))
def test_tile_edges(n_q, n_k, causal):
    CPU.check(*problem(n_q=n_q, n_k=n_k, d=5, d_v=3, heads=4, kv_heads=2), causal=causal)


@pytest.mark.parametrize("dtype", (np.float16, ml_dtypes.bfloat16, np.float32, np.float64))
def test_everything_at_once(dtype):
    rng = np.random.default_rng(0)
    heads, n_q, n_k = 4, BACKWARD_M + 20, 2 * BACKWARD_N + 30
    CPU.check(*problem(batch=2, heads=heads, kv_heads=2, n_q=n_q, n_k=n_k, d=20, d_v=33, dtype=dtype),
              dlse=normal(rng, 2, heads, n_q), need=("bias", "sinks"), causal=True, window=(150, 3), softcap=3.0,
              alibi_slopes=abs(normal(rng, heads)) / 50, bias=normal(rng, 1, heads, 1, n_k),
              mask=rng.random((2, 1, n_q, n_k)) < 0.8, sinks=normal(rng, heads))


@pytest.mark.parametrize("threads", (1, 2, 3, 7, 40))
def test_a_head_shared_out_among_threads(threads, monkeypatch):
    """More threads than heads: its query tiles go to several, whose dK and dV are added."""
    monkeypatch.setattr(cpu, "thread_count", lambda: threads)
    arguments = problem(heads=3, kv_heads=1, n_q=4 * BACKWARD_M + 3, n_k=90)
    CPU.check(*arguments, causal=True)
    for first, second in zip(CPU.both(*arguments), CPU.both(*arguments), strict=True):
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("shape", ((1, 1, 1, 1), (2, 1, 1, 1100), (1, 3, 140, 1), (2, 3, 140, 1100), (1, 1, 140, 1100)))
def test_bias_gradient_of_every_broadcast(shape):
    rng = np.random.default_rng(0)
    CPU.check(*problem(batch=2, heads=3, n_q=140, n_k=1100), need=("bias",), bias=normal(rng, *shape), causal=True)


@pytest.mark.parametrize("bad", (np.nan, np.inf))
def test_a_key_that_nobody_sees_does_not_leak(bad):
    do, q, k, v = problem(n_q=40, n_k=90)
    mask = np.ones((40, 90), bool)
    mask[:, 50:60] = False
    right = CPU.both(do, q, k, v, mask=mask)
    k[:, :, 50:60], v[:, :, 50:60] = bad, bad
    for got, expected in zip(CPU.both(do, q, k, v, mask=mask), right, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize("sinks", (None, np.float32([0.3, -0.2])))
def test_a_query_that_sees_nothing_does_not_leak(sinks):
    do, q, k, v = problem(n_q=40, n_k=90)
    mask = np.ones((40, 90), bool)
    mask[7] = False
    options = {"mask": mask} | ({"sinks": sinks, "need": ("sinks",)} if sinks is not None else {})
    right = CPU.both(do, q, k, v, **options)
    q[:, :, 7], do[:, :, 7] = np.nan, np.nan
    got = CPU.both(do, q, k, v, **options)
    for x, expected in zip(got, right, strict=True):
        np.testing.assert_allclose(x, expected, atol=1e-6)
    assert not got[2][:, :, 7].any()


def test_lse_far_from_zero():
    """Scores near -100: exp(0 - lse) of a hidden or padded pair would overflow."""
    do, q, k, v = problem(n_q=37, n_k=70)
    bias = np.full((37, 70), -100, np.float32)
    CPU.check(do, q, k, v, bias=bias, causal=True)
    assert all(np.isfinite(x).all() for x in CPU.both(do, q, k, v, bias=bias))
