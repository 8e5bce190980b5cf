"""merge_states beyond what `test_cases.py` asks of it."""

import ml_dtypes
import numpy as np
import pytest
from helpers import problem

import numba_flash as nf


def state(shape=(1, 2, 3, 4), dtype=np.float32, lse_dtype=np.float32):
    return np.ones(shape, dtype), np.zeros(shape[:-1], lse_dtype)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64], ids=lambda d: d.__name__)
def test_many_parts_in_any_order(dtype):
    _, q, k, v = problem(n_q=4, n_k=12, dtype=dtype)
    parts = [nf.attention(q, k[:, :, i::3], v[:, :, i::3], return_lse=True) for i in range(3)]
    o, lse = nf.merge_states(parts)
    right, right_lse = nf.attention(q, k, v, return_lse=True)
    assert o.dtype == dtype and lse.dtype == right_lse.dtype
    tolerance = {2: 2e-2, 4: 2e-6, 8: 1e-14}[o.itemsize]
    np.testing.assert_allclose(np.float64(o), np.float64(right), rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(lse, right_lse, rtol=1e-6)
    back = nf.merge_states(parts[::-1])
    np.testing.assert_allclose(np.float64(back[0]), np.float64(o), rtol=tolerance, atol=tolerance)


def test_one_state_is_itself_and_new():
    o, lse = nf.attention(*problem(n_q=4)[1:], return_lse=True)
    merged_o, merged_lse = nf.merge_states([(o, lse)])
    np.testing.assert_array_equal(merged_o, o)
    np.testing.assert_array_equal(merged_lse, lse)
    assert not np.shares_memory(o, merged_o) and not np.shares_memory(lse, merged_lse)


def test_an_empty_part_may_hold_nan():
    (o, lse), empty = state(), (np.full((1, 2, 3, 4), np.nan, np.float32), np.full((1, 2, 3), -np.inf, np.float32))
    merged, _ = nf.merge_states([empty, (o, lse)])
    np.testing.assert_array_equal(merged, o)


def test_a_visible_nan_comes_out_however_little_it_weighs():
    (o, lse), (bad, _) = state(), state()
    bad[0, 0, 0] = np.nan
    merged, _ = nf.merge_states([(o, lse + 500), (bad, lse - 500)])
    assert np.isnan(merged[0, 0, 0]).all() and np.isfinite(merged[0, 0, 1:]).all()


def test_far_apart_lse():
    (a, lse), (b, _) = state(), state()
    merged, merged_lse = nf.merge_states([(a, lse + 500), (2 * b, lse - 500)])
    assert (merged == 1).all() and (merged_lse == 500).all()


@pytest.mark.parametrize("states, error, words", [
    ([], ValueError, "at least one"), ([np.ones(3)], TypeError, r"states\[0\]"), ([3], TypeError, r"states\[0\]"),
    ([state(), state((1, 2, 3, 5))], ValueError, r"shapes.*states\[1\]"),
    ([(np.ones((1, 2, 3, 4), np.float32), np.zeros((1, 2, 4), np.float32))], ValueError, r"lse \(\.\.\., n\)"),
    (state(), TypeError, r"states must be \[\(o1, lse1\), \(o2, lse2\)\], got an array for states\[0\]"),
    (None, TypeError, "sequence"), ([(np.float32(1), np.float32(0))], TypeError, "array"),
    ([(np.ones(3, np.float32), np.zeros((), np.float32))], ValueError, r"lse \(\.\.\., n\)"),
    ([state(), state(dtype=np.float16)], TypeError, "dtypes"), ([state(dtype=int)], TypeError, "floating"),
    ([state(lse_dtype=np.float64)], TypeError, "lse in float32"), ([([1.0], [0.0])], TypeError, "list")])
def test_bad_states(states, error, words):
    with pytest.raises(error, match=words):
        nf.merge_states(states)
