"""The three softmaxes against scipy, and the rules for -inf and NaN."""

import ml_dtypes
import numpy as np
import pytest
from scipy import special

from reference import naive_softmax, online_softmax, safe_softmax

SOFTMAXES = [naive_softmax, safe_softmax, online_softmax]
inf, nan = np.inf, np.nan


@pytest.mark.parametrize("softmax", SOFTMAXES)
@pytest.mark.parametrize("shape", [(1,), (2,), (17,), (3, 5), (2, 3, 15), (0, 4)])
def test_is_softmax(softmax, shape):
    x = 3 * np.random.default_rng(0).standard_normal(shape)
    np.testing.assert_allclose(softmax(x), special.softmax(x, axis=-1), rtol=1e-14)


@pytest.mark.parametrize("softmax", SOFTMAXES)
@pytest.mark.parametrize("x, p", [
    ([0.0, -inf, 0.0], [0.5, 0, 0.5]),
    ([-inf, 5.0], [0, 1]),
    ([-inf, -inf], [0, 0]),
    ([-inf, nan], [0, nan]),
    ([nan, -inf, 1.0], [nan, 0, nan]),
    ([], []),
])
def test_hidden_entries_and_nan(softmax, x, p):
    np.testing.assert_array_equal(softmax(x), p)


@pytest.mark.parametrize("softmax", [safe_softmax, online_softmax])
def test_large_entries_do_not_overflow(softmax):
    np.testing.assert_array_equal(softmax([1e300, 1e300, -1e300]), [0.5, 0.5, 0])
    assert np.isnan(naive_softmax([1e300, 1e300])).all()


@pytest.mark.parametrize("softmax", SOFTMAXES)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.int8])
def test_computes_in_float64_and_leaves_its_input_alone(softmax, dtype):
    x = np.array([1, 2, 3], dtype)
    p = softmax(x)
    assert p.dtype == np.float64
    np.testing.assert_allclose(p, special.softmax([1.0, 2, 3]), rtol=1e-15)
    np.testing.assert_array_equal(x, np.array([1, 2, 3], dtype))


def test_every_step_of_the_recurrence_holds_its_prefix():
    x = np.random.default_rng(0).standard_normal((4, 17))
    x[1, :3] = -inf
    x[2] = -inf
    p, m, l = online_softmax(x, return_steps=True)
    assert p.shape == m.shape == l.shape == x.shape
    for i in range(17):
        prefix = x[:, :i + 1]
        np.testing.assert_array_equal(m[:, i], prefix.max(axis=-1))
        with np.errstate(divide="ignore"):
            lse = m[:, i] + np.log(l[:, i])
        np.testing.assert_allclose(lse, special.logsumexp(prefix, axis=-1), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("softmax", SOFTMAXES)
def test_errors(softmax):
    with pytest.raises(TypeError, match="x must hold real numbers"):
        softmax([1j])
    with pytest.raises(ValueError, match="at least one axis"):
        softmax(1.0)
