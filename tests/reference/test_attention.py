"""Attention: the oracle against one row at a time, all other algorithms against the oracle.

Numbers "NN" in names are those of the public bug reports that a test is made from.
"""

import functools

import ml_dtypes
import numpy as np
import pytest
from scipy.special import logsumexp

import reference
from reference import attention, problem, standard_attention

inf, nan = np.inf, np.nan


def with_blocks(function, **blocks):
    return pytest.param(functools.partial(function, **blocks),
                        id="-".join([function.__name__, *map(str, blocks.values())]))


ALGORITHMS = [
    with_blocks(reference.two_pass_attention),
    with_blocks(reference.one_pass_attention),
    with_blocks(reference.tiled_attention, block_n=4),
    with_blocks(reference.memory_efficient_attention, block_m=5, block_n=3),
    with_blocks(reference.flash_attention_1, block_m=3, block_n=5),
    with_blocks(reference.flash_attention_1, block_m=16, block_n=16),
    with_blocks(reference.flash_attention_2, block_m=5, block_n=3),
    with_blocks(reference.flash_attention_2, block_m=16, block_n=16),
]
EVERY = pytest.mark.parametrize("attend", [with_blocks(standard_attention), *ALGORITHMS])


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def arrays(n_q, n_k, batch=2, heads=4, kv_heads=2, d=3, d_v=2):
    """Normal q, k and v."""
    return (normal(batch, heads, n_q, d), normal(batch, kv_heads, n_k, d, seed=1),
            normal(batch, kv_heads, n_k, d_v, seed=2))


def all_options(n_q, n_k, batch=2, heads=4):
    """Every option once."""
    rng = np.random.default_rng(3)
    hidden = rng.random((heads, n_q, n_k)) < 0.2
    return dict(
        scale=0.7, causal=True, window=(6, None), softcap=1.5,
        alibi_slopes=rng.random((batch, heads)),
        bias=np.where(hidden, -inf, rng.standard_normal((heads, n_q, n_k))),
        mask=rng.random((batch, 1, n_q, n_k)) < 0.8,
        sinks=rng.standard_normal(heads),
    )


OPTIONS = [[], *([name] for name in all_options(1, 1)), list(all_options(1, 1))]
by_options = pytest.mark.parametrize("names", OPTIONS, ids="+".join)


def column(*values):
    """Values as (1, 1, n, 1)."""
    return np.array(values, float).reshape(1, 1, -1, 1)


def row_by_row(q, k, v, *, scale=None, causal=False, window=(None, None), softcap=None,
               alibi_slopes=0, bias=0, mask=True, sinks=None):
    """Attention by its definition, one query and one key at a time, with scipy's logsumexp."""
    (batch, heads, n_q, d), (kv_heads, n_k) = q.shape, k.shape[1:3]
    scale = d ** -0.5 if scale is None else scale
    left, right = window
    slopes = np.broadcast_to(alibi_slopes, (batch, heads))
    bias, mask = (np.broadcast_to(x, (batch, heads, n_q, n_k)) for x in (bias, mask))
    o, lse = np.zeros((batch, heads, n_q, v.shape[-1])), np.full((batch, heads, n_q), -inf)
    for b, h, i in np.ndindex(batch, heads, n_q):
        group_head = h // (heads // kv_heads)
        position = i if causal == "top_left" else i + n_k - n_q
        seen, scores = [], []
        for j in range(n_k):
            if causal and j > position or not mask[b, h, i, j] or bias[b, h, i, j] == -inf:
                continue
            if left not in (None, -1) and j < position - left:
                continue
            if right not in (None, -1) and j > position + right:
                continue
            s = scale * (q[b, h, i] @ k[b, group_head, j])
            s = s if softcap is None else softcap * np.tanh(s / softcap)
            scores.append(s - slopes[b, h] * abs(position - j) + bias[b, h, i, j])
            seen.append(v[b, group_head, j])
        logits = scores + ([] if sinks is None else [sinks[h]])
        if logits:
            lse[b, h, i] = logsumexp(logits)
        for s, row in zip(scores, seen):
            o[b, h, i] += np.exp(s - lse[b, h, i]) * row
    return o, lse


def assert_same(actual, expected):
    """o and lse equal to within rounding, of the same shapes and dtypes."""
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-12, strict=True)


def agrees(attend, q, k, v, **options):
    """Hold an algorithm against the oracle."""
    assert_same(attend(q, k, v, return_lse=True, **options),
                standard_attention(q, k, v, return_lse=True, **options))


# --- the oracle ---

@by_options
@pytest.mark.parametrize("n_q, n_k", [(5, 5), (7, 4), (3, 8)])
def test_standard_is_the_definition(n_q, n_k, names):
    q, k, v = arrays(n_q, n_k)
    options = {name: all_options(n_q, n_k)[name] for name in names}
    assert_same(standard_attention(q, k, v, return_lse=True, **options),
                row_by_row(q, k, v, **options))


@pytest.mark.parametrize("causal", ["bottom_right", "top_left"])
@pytest.mark.parametrize("window", [None, (1, 0), (0, 2), (None, 1), (2, -1)])
@pytest.mark.parametrize("n_q, n_k", [(4, 4), (6, 3), (3, 6)])
def test_standard_band_is_the_definition(n_q, n_k, window, causal):
    q, k, v = arrays(n_q, n_k)
    assert_same(standard_attention(q, k, v, causal=causal, window=window, return_lse=True),
                row_by_row(q, k, v, causal=causal, window=window or (None, None)))


# --- every algorithm against the oracle ---

@pytest.mark.parametrize("attend", ALGORITHMS)
@by_options
@pytest.mark.parametrize("n_q, n_k", [(17, 15), (15, 17)])
def test_all_options(attend, n_q, n_k, names):
    options = {name: all_options(n_q, n_k)[name] for name in names}
    agrees(attend, *arrays(n_q, n_k), **options)


@pytest.mark.parametrize("attend", ALGORITHMS)
@pytest.mark.parametrize("n_q", [0, 1, 2, 15, 17])
@pytest.mark.parametrize("n_k", [0, 1, 2, 15, 17])
def test_odd_sizes(attend, n_q, n_k):
    agrees(attend, *arrays(n_q, n_k, batch=1), causal=True)


@pytest.mark.parametrize("attend", ALGORITHMS)
@pytest.mark.parametrize("sinks", [None, [1.0, -inf]])
def test_rows_that_see_nothing_between_rows_that_do(attend, sinks):
    q, k, v = arrays(9, 9, heads=2)
    mask = normal(2, 2, 9, 9) > 0
    mask[:, :, ::3] = False
    agrees(attend, q, k, v, mask=mask, sinks=sinks)


@EVERY
def test_classic_shapes(attend):
    for n_q, n_k, d in [(200, 200, 1), (1, 40, 8), (20, 20, 2)]:
        q, k, v = normal(n_q, d), normal(n_k, d, seed=1), normal(n_k, d, seed=2)
        s = q @ k.T / np.sqrt(d)
        o, lse = attend(q, k, v, return_lse=True)
        np.testing.assert_allclose(lse, logsumexp(s, axis=-1), rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(o, np.exp(s - lse[:, None]) @ v, rtol=1e-11, atol=1e-13)


@EVERY
def test_lower_ranks_drop_the_same_axes_of_the_options(attend):
    q, k, v = arrays(5, 6, batch=1, kv_heads=4)
    options = all_options(5, 6, batch=1) | {"alibi_slopes": normal(4) ** 2}
    expected = standard_attention(q, k, v, return_lse=True, **options)
    options["mask"] = options["mask"][0]
    assert_same(attend(q[0], k[0], v[0], return_lse=True, **options), [x[0] for x in expected])
    options |= {name: options[name][2] for name in ("alibi_slopes", "bias", "sinks")}
    options["mask"] = options["mask"][0]
    assert_same(attend(q[0, 2], k[0, 2], v[0, 2], return_lse=True, **options),
                [x[0, 2] for x in expected])


@EVERY
def test_returns_new_arrays_and_leaves_inputs_alone(attend):
    inputs = [*arrays(4, 5), *all_options(4, 5).values()]
    before = [np.copy(x) for x in inputs]
    o, lse = attend(*inputs[:3], return_lse=True, **all_options(4, 5))
    assert o.flags.c_contiguous and o.flags.owndata and o.flags.writeable
    for x, y in zip(inputs, before):
        np.testing.assert_array_equal(x, y)
    np.testing.assert_array_equal(attend(*inputs[:3], **all_options(4, 5)), o)


# --- public bug reports ---

@EVERY
def test_01_fully_masked_row(attend):
    q, k, v = arrays(2, 3, batch=1, heads=1, kv_heads=1, d=4)
    mask = np.array([[False, False, False], [True, False, True]])
    for options in [dict(mask=mask), dict(bias=np.where(mask, 0, -inf)),
                    dict(mask=mask, causal=True), dict(mask=mask, bias=np.zeros((2, 3)))]:
        o, lse = attend(q, k, v, return_lse=True, **options)
        assert (o[..., 0, :] == 0).all() and lse[..., 0] == -inf
        assert_same([o[..., 1:, :], lse[..., 1:]], row_by_row(q[:, :, 1:], k[:, :, ::2],
                                                              v[:, :, ::2]))


@EVERY
@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_04_hidden_nan_has_no_effect_and_a_visible_one_comes_out(attend, value):
    q = np.arange(8.0).reshape(1, 1, 2, 4)
    k, v = q.copy(), q.copy()
    k[..., 1, 0], v[..., 1, :] = value, value
    mask = np.array([[True, False], [True, False]])
    for options in [dict(mask=mask), dict(bias=np.where(mask, 0, -inf))]:
        o = attend(q, k, v, **options)
        np.testing.assert_array_equal(o, [[[[0, 1, 2, 3], [0, 1, 2, 3]]]])

    v[..., 1, :], k[..., 1, 0] = value, nan
    o, lse = attend(q, k, v, causal=True, return_lse=True)
    np.testing.assert_array_equal(o[0, 0, 0], [0, 1, 2, 3])
    assert np.isnan(o[0, 0, 1]).all() and np.isfinite(lse[0, 0, 0]) and np.isnan(lse[0, 0, 1])


@EVERY
def test_04_a_nan_in_one_value_reaches_only_its_column(attend):
    q, k, v = arrays(6, 6)
    v[0, 0, 4, 1] = nan
    o = attend(q, k, v, causal=True)
    expected = np.zeros(o.shape, bool)
    expected[0, :2, 4:, 1] = True  # two query heads read kv head 0
    np.testing.assert_array_equal(np.isnan(o), expected)


@EVERY
def test_05_true_means_attend_and_other_dtypes_raise(attend):
    q, k, v = column(0), column(0, 0), column(1, 3)
    assert attend(q, k, v, mask=np.array([True, False])) == 1
    for mask in ([1, 0], np.array([1, 0], np.uint8), [1.0, 0.0]):
        with pytest.raises(TypeError, match="mask must be bool"):
            attend(q, k, v, mask=mask)


@EVERY
@pytest.mark.parametrize("dtype", [np.float64, "input"])
def test_07_very_large_logits(attend, dtype):
    x = np.full((1, 1, 1, 64), 133120, ml_dtypes.bfloat16)
    assert (attend(x, x, x, dtype=dtype) == 133120).all()
    q = np.full((1, 1, 1, 64), 256, np.float16)
    assert (attend(q, q, q / np.float16(2), dtype=dtype) == 128).all()
    k = np.repeat(np.array([256, 255], np.float16), 64).reshape(1, 1, 2, 64)
    assert (attend(q, k, k, dtype=dtype) == 256).all()


@EVERY
def test_09_causal_alignment(attend):
    q, values = column(0, 0), column(0, 1, 2, 3, 4)
    for causal in (True, "bottom_right"):
        assert attend(q, 0 * values, values, causal=causal).ravel() == pytest.approx([1.5, 2])
    assert attend(q, 0 * values, values, causal="top_left").ravel() == pytest.approx([0, 0.5])
    q, values = column(0, 0, 0, 0, 0), column(1, 2)
    for causal, o in [(True, [0, 0, 0, 1, 1.5]), ("top_left", [1, 1.5, 1.5, 1.5, 1.5])]:
        assert attend(q, 0 * values, values, causal=causal).ravel() == pytest.approx(o)


@EVERY
@pytest.mark.parametrize("d", [1, 2, 3, 59, 64, 129, 257, 512])
def test_12_scale_is_that_of_the_given_head_dimension(attend, d):
    q, k = np.zeros((1, d)), np.zeros((2, d))
    q[0, -1], k[1, -1] = np.sqrt(d), 1
    o = attend(q, k, k)
    assert (o[0, :-1] == 0).all() and o[0, -1] == pytest.approx(0.7310585786300049, abs=1e-15)


@EVERY
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (1, 1)}])
def test_14_empty_axes(attend, options):
    for batch, n_q, n_k in [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0)]:
        q, k, v = arrays(n_q, n_k, batch=batch)
        mask = np.ones((batch, 1, n_q, n_k), bool)
        o, lse = attend(q, k, v, return_lse=True, mask=mask, **options)
        assert o.shape == (batch, 4, n_q, 2) and lse.shape == (batch, 4, n_q)
        assert n_k or ((o == 0).all() and (lse == -inf).all())


@EVERY
@pytest.mark.parametrize("heads, kv_heads", [(4, 2), (9, 3), (6, 1), (48, 2), (7, 7)])
def test_16_query_heads_share_kv_heads_in_groups(attend, heads, kv_heads):
    v = np.arange(kv_heads).reshape(1, kv_heads, 1, 1)
    o = attend(np.ones((1, heads, 1, 1)), v * 0, v)
    np.testing.assert_array_equal(o.ravel(), np.arange(heads) // (heads // kv_heads))


@EVERY
def test_24_window_edges(attend):
    q, values = column(0, 0, 0, 0), column(0, 1, 2, 3)
    causal = [0, 0.5, 1, 1.5]
    for window, o in [((1, 0), [0, 0.5, 1.5, 2.5]), ((3, 0), causal), ((4, 0), causal),
                      ((-1, 0), causal), ((None, 0), causal), ((0, 0), [0, 1, 2, 3]),
                      ((0, 1), [0.5, 1.5, 2.5, 3])]:
        assert attend(q, 0 * values, values, window=window).ravel() == pytest.approx(o)
    values = column(0, 1)
    o = attend(q, 0 * values, values, window=(-1, 2 ** 31 - 1))
    assert o.ravel() == pytest.approx([0.5] * 4)
    o = attend(q, 0 * values, column(5, 9), window=(0, 0))
    np.testing.assert_array_equal(o.ravel(), [0, 0, 5, 9])


@EVERY
def test_24_a_window_as_wide_as_the_rows_is_causal_bit_for_bit(attend):
    q, k, v = arrays(40, 40, batch=1)
    np.testing.assert_array_equal(attend(q, k, v, window=(39, 0)), attend(q, k, v, causal=True))


@EVERY
def test_25_softcap_comes_before_bias_and_mask(attend):
    q, k, v = column(1), column(0, 0), column(1, 1000)
    assert attend(q, k, v, scale=1, softcap=2, bias=[0, -inf]) == 1
    assert attend(q, k, v, scale=1, softcap=2, bias=[0, 5.0]).item() == pytest.approx(993.3137)


@EVERY
def test_27_alibi_distance_is_aligned(attend):
    q, k, slopes = column(0), column(0, 0, 0), [np.log(2)]
    assert attend(q, k, column(7, 0, 0), alibi_slopes=slopes).item() == pytest.approx(1)
    assert attend(q, k, column(0, 0, 7), alibi_slopes=slopes).item() == pytest.approx(4)


@EVERY
@pytest.mark.parametrize("heads", [6, 12, 40])
def test_27_decoding_gives_the_row_of_the_full_forward(attend, heads):
    q, k, v = arrays(7, 7, batch=1, heads=heads)
    slopes = 2.0 ** -np.arange(1, heads + 1)
    full = attend(q, k, v, causal=True, alibi_slopes=slopes)
    for i in range(7):
        o = attend(q[:, :, i:i + 1], k[:, :, :i + 1], v[:, :, :i + 1], alibi_slopes=slopes)
        np.testing.assert_allclose(o[:, :, 0], full[:, :, i], rtol=1e-12, atol=1e-14)


@EVERY
@pytest.mark.parametrize("shape", [(5,), (4, 5), (2, 4, 5), (1, 1, 1, 5), (3, 1, 1, 5),
                                   (1, 2, 4, 1), (3, 2, 4, 5), ()])
def test_28_bias_broadcasts(attend, shape):
    q, k, v = (x.astype(np.float16) for x in arrays(4, 5, batch=3, heads=2))
    bias = normal(*shape, seed=4).astype(np.float32) if shape else np.float32(1)
    full = np.broadcast_to(bias, (3, 2, 4, 5)).astype(float)
    assert_same(attend(q, k, v, bias=bias, return_lse=True),
                row_by_row(*(x.astype(float) for x in (q, k, v)), bias=full))


@EVERY
def test_30_lse_of_empty_rows(attend):
    o, lse = attend(column(1, 1, 1), column(2), column(5), scale=1, causal=True, return_lse=True)
    np.testing.assert_array_equal(lse.ravel(), [-inf, -inf, 2])
    np.testing.assert_array_equal(o.ravel(), [0, 0, 5])
    o, lse = attend(column(1, 1, 1), column(2), column(5), scale=1, causal=True, sinks=[2.0],
                    return_lse=True)
    np.testing.assert_allclose(lse.ravel(), [2, 2, 2 + np.log(2)], rtol=1e-15)
    np.testing.assert_array_equal(o.ravel(), [0, 0, 2.5])


@EVERY
def test_31_lse_is_a_natural_log_that_merges(attend):
    assert attend(column(0), 0 * column(1, 2, 3, 4), column(1, 2, 3, 4),
                  return_lse=True)[1].item() == pytest.approx(np.log(4), abs=1e-15)
    q, k, v = arrays(2, 9)
    (o1, l1), (o2, l2), (o, l) = (attend(q, k[:, :, part], v[:, :, part], return_lse=True)
                                  for part in (slice(4), slice(4, 9), slice(9)))
    np.testing.assert_allclose(np.logaddexp(l1, l2), l, rtol=1e-12)
    merged = np.exp(l1 - l)[..., None] * o1 + np.exp(l2 - l)[..., None] * o2
    np.testing.assert_allclose(merged, o, rtol=1e-11, atol=1e-13)


# --- dtypes ---

@EVERY
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, ">f4", np.int32])
def test_any_dtype_is_computed_in_float64(attend, dtype):
    q, k, v = ((4 * x).astype(dtype) for x in arrays(5, 6))
    exact = row_by_row(*(x.astype(float) for x in (q, k, v)))
    assert_same(attend(q, k, v, return_lse=True), exact)


@EVERY
@pytest.mark.parametrize("dtype, eps", [(np.float16, 1e-3), (ml_dtypes.bfloat16, 8e-3),
                                        (np.float32, 2e-6), (np.float64, 1e-14)])
def test_dtype_input_rounds_like_a_plain_program(attend, dtype, eps):
    q, k, v = (x.astype(dtype) for x in arrays(30, 33, d=16))
    options = all_options(30, 33)
    o, lse = attend(q, k, v, dtype="input", return_lse=True, **options)
    assert o.dtype == dtype
    assert lse.dtype == (np.float64 if dtype == np.float64 else np.float32)
    exact, exact_lse = standard_attention(q, k, v, return_lse=True, **options)
    error = abs(o.astype(float) - exact).max()
    assert 0 < error + (dtype == np.float64) and error <= eps * abs(exact).max()
    np.testing.assert_allclose(lse, exact_lse, rtol=2e-6, atol=2e-6)


def test_dtype_input_rounds_the_probabilities():
    """With p = 0.3 and 0.7, v = 7 and -3 cancel, and what is left is the error of p in 16 bit."""
    q, k, v = (np.array(x, np.float16) for x in ([[0]], [[0], [0]], [[7], [-3]]))
    bias = np.log([0.3, 0.7])
    assert standard_attention(q, k, v, bias=bias).item() == pytest.approx(0, abs=1e-15)
    rounded = 7 * float(np.float16(0.3)) - 3 * float(np.float16(0.7))
    o = standard_attention(q, k, v, bias=bias, dtype="input").item()
    assert o == pytest.approx(rounded, rel=1e-3) and abs(rounded) > 1e-4


# --- errors ---

@EVERY
@pytest.mark.parametrize("change, message", [
    (dict(k=normal(2, 2, 6)), "q, k and v must all have 2, 3 or 4 axes"),
    (dict(q=normal(3), k=normal(3), v=normal(3)), "q, k and v must all have 2, 3 or 4 axes"),
    (dict(q=normal(2, 4, 5, 2)), "same head dimension"),
    (dict(v=normal(2, 2, 7, 2)), "k and v may differ in their last axis only"),
    (dict(v=normal(2, 1, 6, 2)), "k and v may differ in their last axis only"),
    (dict(q=normal(3, 4, 5, 3)), "same batch size"),
    (dict(q=normal(2, 3, 5, 3)), "multiple"),
    (dict(q=normal(2, 0, 5, 3)), "at least 1"),
    (dict(k=normal(2, 0, 6, 3), v=normal(2, 0, 6, 2)), "at least 1"),
    (dict(q=normal(2, 4, 5, 0), k=normal(2, 2, 6, 0)), "at least 1"),
    (dict(v=normal(2, 2, 6, 0)), "at least 1"),
    (dict(scale=nan), "scale must be finite"),
    (dict(softcap=0), "softcap must be None or a finite number > 0"),
    (dict(softcap=-1.0), "softcap must be None or a finite number > 0"),
    (dict(causal="left"), "causal must be False, True"),
    (dict(window=(-2, 0)), "window must be"),
    (dict(alibi_slopes=normal(2)), "alibi_slopes must have shape"),
    (dict(sinks=normal(2, 4)), "sinks must have shape"),
    (dict(bias=normal(5, 7)), "bias must broadcast to"),
    (dict(bias=normal(1, 1, 1, 1, 6)), "bias must broadcast to"),
    (dict(mask=np.ones((5, 7), bool)), "mask must broadcast to"),
])
def test_what_does_not_fit_raises_value_error(attend, change, message):
    q, k, v = arrays(5, 6)
    with pytest.raises(ValueError, match=message):
        attend(**(dict(q=q, k=k, v=v) | change))


@EVERY
@pytest.mark.parametrize("change, message", [
    (dict(q=np.ones((1, 1), complex)), "q must hold real numbers"),
    (dict(v=np.full((1, 1), None)), "v must hold real numbers"),
    (dict(bias=1j), "bias must hold real numbers"),
    (dict(q=np.ones((1, 1), np.float32), dtype="input"), "one float dtype"),
    (dict(dropout=0.1), "unexpected keyword"),
])
def test_what_is_not_a_number_raises_type_error(attend, change, message):
    one = np.ones((1, 1))
    with pytest.raises(TypeError, match=message):
        attend(**(dict(q=one, k=one, v=one) | change))


@pytest.mark.parametrize("blocks", [dict(block_m=0), dict(block_n=0)])
def test_empty_blocks_raise(blocks):
    for attend in (reference.flash_attention_1, reference.flash_attention_2,
                   reference.memory_efficient_attention):
        with pytest.raises(ValueError, match="a tile needs at least 1 row"):
            attend(*arrays(2, 2), **blocks)


# --- a broken algorithm must not pass ---

def step_without_alpha(m, l, s, step=attention.online_softmax_step):
    m, alpha, p, l = step(m, l, s)
    return m, np.ones_like(alpha), p, l


def tiles_without_tail(n, block, tiles=problem.tiles):
    return [part for part in tiles(n, block) if part.stop - part.start == block]


def distance_off_by_one(self, rows, cols, distance=problem.Problem.distance):
    return distance(self, rows, cols) + 1


def score_without_scale(self, q_i, k_j, rows=slice(None), cols=slice(None)):
    return q_i @ k_j.mT / self.d


MUTANTS = [
    (attention, "online_softmax_step", step_without_alpha),
    (attention, "tiles", tiles_without_tail),
    (problem.Problem, "distance", distance_off_by_one),
    (problem.Problem, "score", score_without_scale),
]


@pytest.mark.parametrize("owner, name, broken", MUTANTS, ids=[m[2].__name__ for m in MUTANTS])
@pytest.mark.parametrize("attend", [reference.flash_attention_1, reference.flash_attention_2])
def test_mutants_fail(monkeypatch, attend, owner, name, broken):
    q, k, v = arrays(17, 15)
    expected = row_by_row(q, k, v, causal=True)
    run = functools.partial(attend, q, k, v, causal=True, block_m=4, block_n=4, return_lse=True)
    assert_same(run(), expected)
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises(AssertionError):
        assert_same(run(), expected)
