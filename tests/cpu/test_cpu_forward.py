"""What is particular to the forward kernel: tile edges, strides, hidden NaN, exactness."""

import ml_dtypes
import numpy as np
import pytest
from helpers import Engine, normal, problem

import numba_flash as nf
from numba_flash.cpu import BLOCK_M, BLOCK_N

CPU = Engine("cpu", "numpy")
DTYPES = (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)


@pytest.mark.parametrize("n_q", (1, 31, 32, 33, BLOCK_M - 1, BLOCK_M, BLOCK_M + 1))
@pytest.mark.parametrize("n_k", (1, 7, 8, 9, BLOCK_N - 1, BLOCK_N, BLOCK_N + 1, 2 * BLOCK_N + 9))
def test_a_key_too_many_or_too_few_shows(n_q, n_k):
    """Every logit is -320: a padded key, with logit 0, would take all the weight."""
    q, k = np.ones((1, 1, n_q, 16), np.float32), np.full((1, 1, n_k, 16), -20, np.float32)
    v = np.ones((1, 1, n_k, 3), np.float32)
    for causal in (False, True):
        o, lse = CPU.attention(q, k, v, scale=1, causal=causal)
        seen = np.clip(np.arange(n_q) + 1 + n_k - n_q, 0, n_k) if causal else np.full(n_q, n_k)
        np.testing.assert_array_equal(o[0, 0, :, 0], seen > 0)
        with np.errstate(divide="ignore"):
            np.testing.assert_allclose(lse[0, 0], np.log(seen) - 320, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_k", (1, 9, BLOCK_N + 1, 3 * BLOCK_N))
def test_the_only_key_is_copied(dtype, n_k):
    _, q, k, v = problem(n_q=40, n_k=n_k, d=24, d_v=19, dtype=dtype)
    seen = np.random.default_rng(0).integers(0, n_k, 40)
    o, _ = CPU.attention(q, k, v, mask=seen[:, None] == np.arange(n_k))
    np.testing.assert_array_equal(o, v[:, :, seen])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", (False, True))
def test_all_tiles(dtype, causal):
    do, q, k, v = problem(n_q=BLOCK_M + 37, n_k=2 * BLOCK_N + 5, kv_heads=1, d=33, d_v=17, dtype=dtype)
    CPU.check(do, q, k, v, causal=causal)


@pytest.mark.parametrize("window", ((0, 0), (3, 5), (BLOCK_N, 0), (40, None), (None, 70)))
def test_windows_across_tiles(window):
    CPU.check(*problem(n_q=BLOCK_M + 60, n_k=BLOCK_M + 90), window=window)


@pytest.mark.parametrize("name, change", {
    "reversed": lambda x: x[:, :, ::-1], "every second": lambda x: np.repeat(x, 2, -1)[..., ::2],
    "heads last": lambda x: x.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3), "Fortran": np.asfortranarray,
    "one head for all": lambda x: np.broadcast_to(x[:, :1], x.shape),
    "packed and unaligned": lambda x: _unaligned(x)}.items())
@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_change_no_bit(name, change, dtype):
    arrays = [change(x) for x in problem(n_q=33, n_k=45, d=20, d_v=12, dtype=dtype)]
    for x in arrays:
        x.flags.writeable = False
    do, q, k, v = arrays
    packed = [np.ascontiguousarray(x) for x in arrays]
    for got, right in zip(CPU.both(do, q, k, v), CPU.both(*packed), strict=True):
        np.testing.assert_array_equal(got, right)


def _unaligned(x):
    """x inside records of an odd size."""
    records = np.zeros(x.shape[:3], np.dtype({"names": ["x"], "formats": [(x.dtype, x.shape[3:])], "offsets": [1],
                                              "itemsize": x.shape[3] * x.itemsize + 3}))
    records["x"] = x
    return records["x"]


def test_out_may_have_any_strides():
    _, q, k, v = problem(n_q=40, d=24)
    right, _ = CPU.attention(q, k, v)
    out = np.full((1, 40, 2, 48), np.nan, np.float32).transpose(0, 2, 1, 3)[:, ::-1, :, ::-2]
    nf.attention(q, k, v, out=out, kernel="cpu")
    np.testing.assert_array_equal(out, right)


@pytest.mark.parametrize("bad", (np.nan, np.inf))
def test_hidden_values_have_no_effect(bad):
    """Also where other queries of the same tile see them, and then those do feel them."""
    _, q, k, v = problem(n_q=100, n_k=150)
    right, lse_right = CPU.attention(q, k, v, causal=True)
    k[0, 0, 90], v[0, 0, 90] = bad, bad
    o, lse = CPU.attention(q, k, v, causal=True)
    first = 90 - 50
    np.testing.assert_allclose(o[0, 0, :first], right[0, 0, :first], atol=2e-6)
    np.testing.assert_array_equal(lse[0, 0, :first], lse_right[0, 0, :first])
    assert not np.isfinite(o[0, 0, first:]).any()
    np.testing.assert_array_equal(o[0, 1], right[0, 1])


def test_scores_may_be_huge():
    _, q, k, v = problem(n_q=20, n_k=300)
    o, lse = CPU.attention(q * np.float32(1e18), k * np.float32(1e15), v)
    assert np.isfinite(o).all() and np.isfinite(lse).all()


@pytest.mark.parametrize("d", (1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 127, 129, 203, 257))
def test_head_sizes(d):
    CPU.check(*problem(n_q=9, n_k=12, d=d, d_v=260 - d))


def test_results_do_not_depend_on_the_neighbours():
    """Rows of the same queries and keys come out with the same bits, wherever they stand in a batch."""
    _, q, k, v = problem(heads=1, n_q=70, n_k=200)
    o, lse = CPU.attention(np.repeat(q, 5, 1), np.repeat(k, 5, 1), np.repeat(v, 5, 1))
    for h in range(1, 5):
        np.testing.assert_array_equal(o[:, h], o[:, 0])
        np.testing.assert_array_equal(lse[:, h], lse[:, 0])


def test_float32_scores_keep_their_precision():
    """Long rows: the sum over many tiles must not lose digits."""
    rng = np.random.default_rng(0)
    do, q, k, v = (normal(rng, 1, 1, n, 16) for n in (33, 33, 6000, 6000))
    CPU.check(do, q, k, v)
