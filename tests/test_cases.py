"""Faults that users of other attention kernels reported in public, as the smallest inputs that show them.

Each test names the report that it comes from. The right values were worked out by hand.
"""

import math

import ml_dtypes
import numpy as np
import pytest
from helpers import check_answer, check_growth_by_ulps, check_huge_scores, check_steep_slopes, normal, problem

import numba_flash as nf

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)


def col(*values, dtype=np.float32):
    """Values as an array of shape (1, 1, n, 1)."""
    return np.array(values, dtype).reshape(1, 1, -1, 1)


def flat(x):
    return np.asarray(x, np.float64).ravel().tolist()


# ---- masks, NaN, range -----------------------------------------------------------------------------------------------

@dtypes
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("by", ["mask", "bias"])
def test_fully_masked_row(engine, dtype, causal, by):
    """pytorch#103749, #103963, mlx PR#2608, cubecl PR#1070: NaN instead of zeros."""
    do, q, k, v = problem(heads=1, n_q=2, n_k=3, d=4, dtype=dtype)
    mask = np.array([[False, False, False], [True, False, True]])
    options = {"mask": mask} if by == "mask" else {"bias": np.where(mask, 0, -np.inf).astype(np.float32)}
    o, lse, dq, dk, dv = answer = engine.both(do, q, k, v, causal=causal, **options)
    assert not o[0, 0, 0].any() and lse[0, 0, 0] == -np.inf and not dq[0, 0, 0].any()
    assert not dk[0, 0, 1].any() and not dv[0, 0, 1].any()
    check_answer(answer, do, q, k, v, causal=causal, **options)


def test_nan_behind_the_mask(engine):
    """pytorch#101967, numba#2919: 0 * NaN = NaN reached the output. `standard` is exempt where other rows see it."""
    q = np.arange(8, dtype=np.float32).reshape(1, 1, 2, 4)
    k, v = q.copy(), q.copy()
    k[0, 0, 1, 0], v[0, 0, 1] = np.nan, np.inf
    o, lse = engine.attention(q, k, v, mask=np.array([[True, False], [True, False]]))
    assert flat(o) == [0, 1, 2, 3] * 2 and np.isfinite(lse).all()


def test_visible_nan_comes_out(engine):
    """pytorch#101967 the other way round."""
    q = np.arange(8, dtype=np.float32).reshape(1, 1, 2, 4)
    k = q.copy()
    k[0, 0, 1, 0] = np.nan
    o, lse = engine.attention(q, k, q, causal=True)
    assert np.isfinite(o[0, 0, 0]).all() and np.isnan(o[0, 0, 1]).all() and np.isnan(lse[0, 0, 1])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_hidden_from_some_rows_of_a_tile(engine, bad):
    """The same kind, where the tile has rows that see the key and rows that do not."""
    if engine.kernel == "standard":
        pytest.skip("multiplies hidden values by zero, as its docstring says")
    n = 5 if engine.place == "simulator" else 70
    do, q, k, v = problem(n_q=n, d=4)
    clean, _ = engine.attention(q, k, v, causal=True)
    k[:, :, n - 2], v[:, :, n - 2] = bad, bad
    o, lse = engine.attention(q, k, v, causal=True)
    np.testing.assert_allclose(o[:, :, :n - 2], clean[:, :, :n - 2], rtol=1e-5, atol=1e-6)
    assert np.isfinite(lse[:, :, :n - 2]).all() and not np.isfinite(o[:, :, n - 2:]).any()


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("hide", ["mask", "bias", "window"])
def test_padding_never_leaks(engine, hide, softcap):
    """A key that no row sees: NaN in it may reach neither o nor any gradient."""
    do, q, k, v = problem(heads=2, kv_heads=1, n_q=5, n_k=9, d=4)
    options = {"mask": {"mask": np.arange(9) < 6},
               "bias": {"bias": np.where(np.arange(9) < 6, 0.5, -np.inf).astype(np.float32)},
               "window": {"window": (None, 0), "causal": "top_left"}}[hide]
    options["softcap"] = softcap
    hidden = slice(6, 9)
    clean = engine.both(do, q, k, v, **options)
    k[:, :, hidden], v[:, :, hidden] = np.nan, np.inf
    for got, right in zip(engine.both(do, q, k, v, **options), clean):
        np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-6)
    assert not clean[3][:, :, hidden].any() and not clean[4][:, :, hidden].any()


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_empty_rows_never_leak(engine, softcap):
    """A query that sees nothing may hold NaN (padding), and the gradient of its lse of -inf too: nobody feels it."""
    do, q, k, v = problem(n_q=9, n_k=5, d=4)
    dlse = normal(np.random.default_rng(0), 1, 2, 9)
    options = {"causal": True, "softcap": softcap}
    clean = engine.both(do, q, k, v, dlse, **options)
    q[:, :, :4], do[:, :, :4], dlse[:, :, :4] = np.nan, np.nan, np.nan
    for got, right in zip(engine.both(do, q, k, v, dlse, **options), clean):
        np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-6)


def test_a_sink_of_minus_infinity_is_no_sink(engine):
    """exp(sink - lse) must be 0 whatever lse is: -inf in an empty row, or so low that exp(-lse) overflows."""
    do, q, k, v = problem(n_q=4, n_k=3, d=4)
    q, k = np.full_like(q, -10), np.full_like(k, 10)
    sinks = np.full(2, -np.inf, np.float32)
    options, dlse = {"causal": True, "scale": 1.0}, np.ones((1, 2, 4), np.float32)
    answer = engine.both(do, q, k, v, dlse, need="sinks", sinks=sinks, **options)
    assert not answer[-1].any()
    check_answer(answer[:-1], do, q, k, v, dlse, **options)


def test_a_large_softcap_changes_nothing(engine):
    """``cap (1 - 2 / (1 + exp(2 s / cap)))`` is tanh in few steps, but off by units of cap's last place."""
    do, q, k, v = problem(n_q=5, n_k=7, d=8)
    check_answer(engine.both(do, q, k, v, softcap=1e5), do, q, k, v)


def test_mask_values_of_another_dtype(engine):
    """transformers and others add finfo.min where they mean to hide; in float64 it is more than float32 can hold."""
    do, q, k, v = problem(n_q=3, n_k=5, d=4)
    bias = np.where(np.arange(5) < 2, 0, np.finfo(np.float64).min)
    o, lse = engine.attention(q, k, v, bias=bias)
    right, right_lse = engine.attention(q, k[:, :, :2], v[:, :, :2])
    np.testing.assert_allclose(o, right, rtol=1e-5, atol=1e-6)
    o, lse = engine.attention(q, k, v, bias=np.full(5, np.finfo(np.float64).min))
    np.testing.assert_allclose(o, np.broadcast_to(v.mean(2, keepdims=True), o.shape), rtol=1e-5, atol=1e-6)


def test_mask_polarity(engine):
    """x-transformers#160, TransformerEngine#614: True hid, or the mask was added to the scores."""
    assert flat(engine.attention(col(0), col(0, 0), col(1, 3), mask=np.array([True, False]))[0]) == [1]


def test_very_large_logits(engine):
    """pytorch#121558: inf - inf after scores were rounded to half before the scale."""
    x = np.full((1, 1, 1, 64), 133120, ml_dtypes.bfloat16)
    assert flat(engine.attention(x, x, x)[0]) == [133120] * 64
    q, v = np.full((1, 1, 1, 64), 256, np.float16), np.full((1, 1, 1, 64), 128, np.float16)
    assert flat(engine.attention(q, q, v)[0]) == [128] * 64
    k = np.concatenate([q - 1, q], 2)
    assert flat(engine.attention(q, k, np.concatenate([v, v / 2], 2))[0]) == [64] * 64


@pytest.mark.parametrize("dtype, size", [(np.float16, 2**26), (ml_dtypes.bfloat16, 2**110), (np.float32, 2**30),
                                         (np.float32, 2**110), (np.float64, 2**60), (np.float64, 2**900)], ids=str)
def test_huge_scores(engine, dtype, size):
    """They have no fraction left, and are multiplied by a factor before m is subtracted."""
    check_huge_scores(engine.attention, np.dtype(dtype), float(size))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("slope", [1e5, 1e9, 1e30, -1e9])
def test_steep_slopes(engine, dtype, slope):
    check_steep_slopes(engine.attention, np.dtype(dtype), slope)
    check_steep_slopes(engine.attention, np.dtype(dtype), slope, softcap=2.0)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32, np.float64])
def test_scores_that_grow_by_ulps(engine, dtype):
    check_growth_by_ulps(engine.attention, np.dtype(dtype))


@pytest.mark.parametrize("level", [-30, -9.5, 9.5, 30])
def test_gradients_when_lse_is_far_from_zero(engine, level):
    """pytorch#196678, cudnn-frontend#1072: padding scored 0 and exp(0 - lse) overflowed once lse < -88."""
    do, q, k, v = problem(heads=2 if engine.place == "simulator" else 20, n_q=1, n_k=5, d=16)
    q[...], k[...] = abs(level), np.sign(level) * np.round(1 + 0.01 * k, 2)
    engine.check(do, q, k, v)


# ---- shapes and tiles ------------------------------------------------------------------------------------------------

def test_one_query_one_key_backward(engine):
    """flash-attention#334: padded rows were not masked in the backward."""
    q, k, v = (3 * normal(np.random.default_rng(0), 3, 1, 1, 1, 16)).astype(np.float16)
    o, lse, dq, dk, dv = engine.both(np.ones_like(q), q, k, v)
    assert np.array_equal(o, v) and (dv == 1).all() and max(abs(dq).max(), abs(dk).max()) <= 1e-2


@pytest.mark.parametrize("n", [2, 5, 17, 128])
def test_sharp_softmax_backward(engine, n):
    """flash-attention's own overflow test."""
    if engine.place == "simulator" and n > 5:
        pytest.skip("too slow in the simulator")
    do, q, k, v = problem(batch=2, heads=5, n_q=n, d=16, dtype=np.float16)
    engine.check(np.ones_like(do), (5 * q).astype(np.float16), (3 * k).astype(np.float16), v)


@pytest.mark.parametrize("causal, n_q, values, right", [
    ("bottom_right", 2, (0, 1, 2, 3, 4), [1.5, 2]), (True, 2, (0, 1, 2, 3, 4), [1.5, 2]),
    ("bottom_right", 5, (1, 2), [0, 0, 0, 1, 1.5]), ("top_left", 2, (0, 1, 2, 3, 4), [0, 0.5]),
    ("top_left", 5, (1, 2), [1, 1.5, 1.5, 1.5, 1.5])])
def test_causal_alignment(engine, causal, n_q, values, right):
    """onnxruntime#29020, mlx#2835, pytorch#103082: alignment differed between backends and directions."""
    o, _ = engine.attention(col(*[0] * n_q), col(*[1] * len(values)), col(*values), causal=causal)
    assert flat(o) == right


@pytest.mark.parametrize("hide", [{}, {"mask": True}, {"bias": True}], ids=["plain", "mask", "bias"])
def test_key_length_not_a_multiple_of_the_tile(engine, hide):
    """tt-metal#54833, jax#27224: zero padding took part with a score of 0, above the true -320."""
    for n_k in engine.sizes + ((15, 16, 17) if engine.place == "simulator" else (31, 32, 33, 255, 256, 257)):
        options = {name: np.ones((n_k,), bool) if name == "mask" else np.zeros((n_k,), np.float32) for name in hide}
        for n_q in (1, engine.sizes[-2]):
            o, lse = engine.attention(np.ones((1, 1, n_q, 16), np.float32), np.full((1, 1, n_k, 16), -20, np.float32),
                                      np.ones((1, 1, n_k, 1), np.float32), scale=1, **options)
            assert np.allclose(o, 1, rtol=1e-6, atol=0) and np.allclose(lse, math.log(n_k) - 320)


@pytest.mark.parametrize("d", [1, 2, 3, 5, 8, 31, 32, 33, 40, 59, 64, 80, 96, 111, 128, 129, 160, 192, 203, 256, 257,
                               320, 512])
def test_head_dim_ladder(engine, d):
    """tilelang-ascend PR#1670, triton#621: scale from the padded d, or only the first columns used."""
    if engine.place == "simulator" and d not in (1, 3, 8, 33):
        pytest.skip("too slow in the simulator")
    q, k, v = (np.zeros((1, 1, n, d), np.float32) for n in (1, 2, 2))
    q[..., -1], k[:, :, 1, -1], v[:, :, 1, -1] = math.sqrt(d), 1, 1
    try:
        o, lse, dq, dk, dv = engine.both(np.ones_like(q), q, k, v)
    except ValueError as error:
        assert engine.place == "cupy" and d > 256 and "head" in str(error)
        return
    assert not o[..., :-1].any() and abs(o[0, 0, 0, -1] - 0.73105858) < 1e-6
    check_answer((o, lse, dq, dk, dv), np.ones_like(q), q, k, v)


@pytest.mark.parametrize("batch, n_q, n_k", [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0)])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (1, 1)}, {"mask": True}, {"bias": True},
                                     {"sinks": True}], ids=lambda options: " ".join(options) or "plain")
def test_zero_sizes(engine, batch, n_q, n_k, options):
    """pytorch#141218, #174939, flash-attention#1159, numba#4140: divisions by zero, null pointers, refusals."""
    do, q, k, v = problem(batch=batch, n_q=n_q, n_k=n_k, d=4, d_v=3)
    options = dict(options)
    if "mask" in options:
        options["mask"] = np.ones((batch, 1, n_q, n_k), bool)
    if "bias" in options:
        options["bias"] = np.ones((n_q, n_k), np.float32)
    if "sinks" in options:
        options["sinks"] = np.ones(2, np.float32)
    need = tuple(name for name in ("bias", "sinks") if name in options)
    dlse = np.ones((batch, 2, n_q), np.float32)
    o, lse, dq, dk, dv, *rest = engine.both(do, q, k, v, dlse=dlse, need=need, **options)
    assert o.shape == do.shape and not o.any() and lse.shape == do.shape[:3]
    assert (lse == (1 if "sinks" in options else -np.inf)).all()
    assert dq.shape == q.shape and dk.shape == k.shape and dv.shape == v.shape
    assert not dq.any() and not dk.any() and not dv.any()
    if "sinks" in options:
        assert flat(rest[-1]) == [batch * n_q if n_k == 0 else 0] * 2
        options["sinks"] = np.full(2, -np.inf, np.float32)
        assert not engine.both(do, q, k, v, dlse=dlse, need=need, **options)[-1].any()


# ---- heads and sizes -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("heads, kv_heads", [(4, 2), (9, 3), (6, 1), (48, 2), (40, 2), (80, 4), (7, 7)])
def test_grouped_head_mapping(engine, heads, kv_heads):
    """onnx PR#7274, axlearn PR#842: kv heads tiled (0,1,0,1) instead of repeated (0,0,1,1)."""
    if engine.place == "simulator" and heads > 9:
        pytest.skip("too slow in the simulator")
    v = np.arange(1, kv_heads + 1, dtype=np.float32).reshape(1, -1, 1, 1)
    o, _ = engine.attention(np.ones((1, heads, 1, 1), np.float32), np.ones_like(v), v)
    assert flat(o) == [1 + h // (heads // kv_heads) for h in range(heads)]


# ---- memory layout ---------------------------------------------------------------------------------------------------

def test_do_of_any_layout(engine):
    """flash-attention#355, xformers PR#282: a broadcast or transposed dO gave silently wrong gradients."""
    n = 5 if engine.place == "simulator" else 97
    _, q, k, v = problem(batch=2, n_q=n, d=8)
    o, lse = engine.attention(q, k, v)
    base = normal(np.random.default_rng(9), 2, n, 2, 16)
    for do in (np.broadcast_to(np.float32(1), o.shape), base[..., :8].transpose(0, 2, 1, 3),
               base[..., ::2].transpose(0, 2, 1, 3), base[:, ::-1, :, 3:11].transpose(0, 2, 1, 3)):
        strided = engine.attention_backward(do, q, k, v, o, lse)
        plain = engine.attention_backward(np.ascontiguousarray(do), q, k, v, o, lse)
        for got, right in zip(strided, plain):
            np.testing.assert_array_equal(got, right)


LAYOUTS = {
    "broadcast heads": lambda x: np.broadcast_to(x[:, :1], x.shape),
    "sliced": lambda x: np.concatenate([x, x], -1)[..., 3:3 + x.shape[-1]],
    "reversed rows": lambda x: x[:, :, ::-1],
    "reversed columns": lambda x: x[..., ::-1],
    "every other column": lambda x: np.repeat(x, 2, -1)[..., ::2],
    "fortran": np.asfortranarray,
    "heads last": lambda x: np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3),
    "columns first": lambda x: np.ascontiguousarray(x.transpose(3, 0, 1, 2)).transpose(1, 2, 3, 0),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=["float32", "float16"])
def test_strided_inputs(engine, name, dtype):
    """pytorch#191937, #146377, numba#3705, cupy#3095: strides of 0, 2 or -1 gave garbage."""
    if engine.place == "simulator" and list(LAYOUTS).index(name) % 2 == (dtype == np.float32):
        pytest.skip("too slow in the simulator: there the dtypes take turns")
    n_q, n_k = (5, 7) if engine.place == "simulator" else (20, 33)
    do, q, k, v = (LAYOUTS[name](x) for x in problem(batch=2, n_q=n_q, n_k=n_k, d=6, dtype=dtype))
    bias = LAYOUTS[name](normal(np.random.default_rng(8), 2, 2, n_q, n_k))
    mask = LAYOUTS[name](np.random.default_rng(8).random((2, 2, n_q, n_k)) < 0.7)
    before = [x.copy() for x in (do, q, k, v, bias, mask)]
    answer = engine.both(do, q, k, v, bias=bias, mask=mask, need="bias", causal=True)
    check_answer(answer, do, q, k, v, bias=bias, mask=mask, need=("bias",), causal=True)
    for x, old in zip((do, q, k, v, bias, mask), before):
        np.testing.assert_array_equal(x, old)


def test_memory_between_strides_is_never_read(engine):
    """vllm PR#47305, cuDNN's guard bands: NaN beside the arrays and in the gaps of a stride."""
    n_q, n_k = (5, 7) if engine.place == "simulator" else (20, 33)
    inputs = problem(n_q=n_q, n_k=n_k, d=6)
    guarded = []
    for x in inputs:
        batch, heads, n, d = x.shape
        room = np.full((batch + 1, heads + 1, 2 * n + 9, d + 5), np.nan, np.float32)
        view = room[:batch, 1:, 4:4 + 2 * n:2, 2:2 + d]
        view[...] = x
        guarded.append(view)
    for got, right in zip(engine.both(*guarded, causal=True), engine.both(*inputs, causal=True)):
        np.testing.assert_array_equal(got, right)


# ---- options ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("window, causal, n_k, values, right", [
    ((1, 0), False, 4, (0, 1, 2, 3), [0, .5, 1.5, 2.5]), ((3, 0), False, 4, (0, 1, 2, 3), [0, .5, 1, 1.5]),
    ((4, 0), False, 4, (0, 1, 2, 3), [0, .5, 1, 1.5]), ((-1, 0), False, 4, (0, 1, 2, 3), [0, .5, 1, 1.5]),
    (None, True, 4, (0, 1, 2, 3), [0, .5, 1, 1.5]), ((0, 0), False, 4, (0, 1, 2, 3), [0, 1, 2, 3]),
    ((0, 1), False, 4, (0, 1, 2, 3), [.5, 1.5, 2.5, 3]), ((-1, 2**31 - 1), False, 2, (0, 1), [.5] * 4),
    ((0, 0), False, 2, (5, 9), [0, 0, 5, 9])])
def test_window_edges(engine, window, causal, n_k, values, right):
    """flash-attention#1133, #895, #2199, transformers#39408: off by one, or a huge bound clipped too early."""
    o, _ = engine.attention(col(0, 0, 0, 0), col(*[1] * n_k), col(*values), window=window, causal=causal)
    assert flat(o) == right


def test_window_edges_across_tiles(engine):
    """The same at a length of several tiles; the widest window is causal attention to the bit."""
    n = 9 if engine.place == "simulator" else 200
    do, q, k, v = problem(heads=1, n_q=n, d=4)
    wide, causal = engine.both(do, q, k, v, window=(n - 1, 0)), engine.both(do, q, k, v, causal=True)
    assert all(np.array_equal(a, b) for a, b in zip(wide, causal))
    for window in ((0, 0), (1, 0), (n // 3, 0), (0, 1), (n // 2, n // 4), (n - 2, 0)):
        engine.check(do, q, k, v, window=window)


def test_softcap_before_bias_and_mask(engine):
    """onnx PR#7867, onnxruntime PR#28379: capping a hidden score of -inf made it visible."""
    o, _ = engine.attention(col(1), col(0, 0), col(1, 1000), scale=1, softcap=2, bias=np.float32([0, -np.inf]))
    assert flat(o) == [1]
    o, _ = engine.attention(col(1), col(0, 0), col(1, 1000), scale=1, softcap=2, bias=np.float32([0, 5]))
    assert abs(flat(o)[0] - 993.3137) < 1e-3


def test_alibi_distance_and_decode(engine):
    """flash-attention#907, #1585: decode and full forward disagreed."""
    slopes = np.float32([math.log(2)])
    for values, right in (((7, 0, 0), 1), ((0, 0, 7), 4)):
        o, _ = engine.attention(col(0), col(0, 0, 0), col(*values), alibi_slopes=slopes)
        assert abs(flat(o)[0] - right) < 1e-5
    for heads in (6, 12, 40)[:1 if engine.place == "simulator" else 3]:
        _, q, k, v = problem(heads=heads, n_q=5, d=4)
        slopes = np.linspace(0.1, 1, heads, dtype=np.float32)
        full, _ = engine.attention(q, k, v, alibi_slopes=slopes, causal=True)
        for i in range(5):
            step, _ = engine.attention(q[:, :, i:i + 1], k[:, :, :i + 1], v[:, :, :i + 1], alibi_slopes=slopes)
            np.testing.assert_allclose(step[:, :, 0], full[:, :, i], rtol=1e-5, atol=1e-6)


def test_bias_gradient_by_hand(engine):
    """jax#28974, #27184: dbias missing, zero, or that of batch 0 only."""
    q, k = np.zeros((3, 1, 1, 1), np.float32), np.zeros((3, 1, 2, 1), np.float32)
    v = np.tile(col(1, 0), (3, 1, 1, 1))
    dbias = engine.both(np.ones_like(q), q, k, v, bias=np.zeros((1, 1, 1, 2), np.float32), need="bias")[-1]
    assert dbias.shape == (1, 1, 1, 2) and np.allclose(dbias, [0.75, -0.75], rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_float32_bias_with_half_inputs(engine, dtype):
    """jax#32242: NaN."""
    do, q, k, v = problem(n_q=5, d=8, dtype=dtype)
    engine.check(do, q, k, v, bias=normal(np.random.default_rng(1), 5, 5), need=("bias",))


# ---- lse -------------------------------------------------------------------------------------------------------------

def test_lse_of_empty_rows(engine):
    """flashinfer#4452, #4484, flash-attention PR#978: +inf, 0 or -5e4 gave an empty part weight in a merge."""
    o, lse = engine.attention(col(1, 1, 1), col(2), col(5), scale=1, causal=True)
    assert flat(lse) == [-np.inf, -np.inf, 2] and flat(o) == [0, 0, 5]
    empty = np.zeros_like(o), np.full_like(lse, -np.inf)
    merged_o, merged_lse = nf.merge_states([empty, (o, lse)])
    assert np.array_equal(merged_o, o) and np.array_equal(merged_lse, lse)
    merged_o, merged_lse = nf.merge_states([empty, empty])
    assert not merged_o.any() and (merged_lse == -np.inf).all()


@dtypes
def test_lse_is_a_natural_logarithm_of_scaled_scores(engine, dtype):
    """sglang#40903, FlashMLA PR#106: base 2 merged as natural."""
    _, lse = engine.attention(np.zeros((1, 1, 1, 4), dtype), *np.zeros((2, 1, 1, 4, 4), dtype))
    assert lse.dtype == (np.float64 if dtype == np.float64 else np.float32) and abs(flat(lse)[0] - math.log(4)) < 1e-6
    _, q, k, v = problem(n_q=3, n_k=9, dtype=dtype)
    o, lse = engine.attention(q, k, v)
    parts = [engine.attention(q, k[:, :, s], v[:, :, s]) for s in (slice(0, 4), slice(4, 9))]
    merged_o, merged_lse = nf.merge_states(parts)
    eps = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-6, "float64": 1e-14}[np.dtype(dtype).name]
    np.testing.assert_allclose(merged_lse, lse, rtol=1e-6)
    np.testing.assert_allclose(np.float64(merged_o), np.float64(o), rtol=eps, atol=eps)


def test_cache_tail(engine):
    """vllm PR#47305: slots past the length were read and weighted 0, so NaN there poisoned o."""
    _, q, k, v = problem(n_q=2, n_k=8, d=8)
    for length in (0, 1, 3, 4, 5, 8):
        cache_k, cache_v = k.copy(), v.copy()
        cache_k[:, :, length:], cache_v[:, :, length:] = np.nan, np.nan
        o, lse = engine.attention(q, cache_k[:, :, :length], cache_v[:, :, :length])
        masked_o, masked_lse = engine.attention(q, cache_k, cache_v, mask=np.arange(8) < length)
        np.testing.assert_allclose(o, masked_o, rtol=1e-6)
        np.testing.assert_allclose(lse, masked_lse, rtol=1e-6)
        assert np.isfinite(o).all() and (length or not o.any())
