"""Gradients: the oracle against finite differences, the tiled forms against the oracle.

Numbers "NN" in names are those of the public bug reports that a test is made from.
"""

import functools

import ml_dtypes
import numpy as np
import pytest

from reference import (
    backward,
    flash_attention_1_backward,
    flash_attention_2_backward,
    problem,
    standard_attention,
    standard_attention_backward,
)

inf, nan = np.inf, np.nan


def tiled(function, **blocks):
    """A tiled gradient with the signature of the oracle: it gets o and lse from the forward."""
    def gradients(do, q, k, v, *, dlse=None, need=(), **options):
        o, lse = standard_attention(q, k, v, return_lse=True, **options)
        return function(do, q, k, v, o, lse, dlse=dlse, need=need, **blocks, **options)
    return pytest.param(gradients, id="-".join([function.__name__, *map(str, blocks.values())]))


TILED = [
    tiled(flash_attention_1_backward, block_m=3, block_n=5),
    tiled(flash_attention_1_backward, block_m=16, block_n=16),
    tiled(flash_attention_2_backward, block_m=5, block_n=3),
    tiled(flash_attention_2_backward, block_m=16, block_n=16),
]
EVERY = pytest.mark.parametrize(
    "gradients", [pytest.param(standard_attention_backward, id="standard"), *TILED])


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def arrays(n_q, n_k, batch=2, heads=4, kv_heads=2, d=3, d_v=2):
    """Normal do, q, k, v and dlse."""
    shapes = [(heads, n_q, d_v), (heads, n_q, d), (kv_heads, n_k, d), (kv_heads, n_k, d_v),
              (heads, n_q)]
    return [normal(batch, *shape, seed=seed) for seed, shape in enumerate(shapes)]


def all_options(n_q, n_k, heads=4):
    """Every option once."""
    rng = np.random.default_rng(5)
    hidden = rng.random((heads, n_q, n_k)) < 0.2
    return dict(
        scale=0.7, causal=True, window=(6, None), softcap=1.5, alibi_slopes=rng.random(heads),
        bias=np.where(hidden, -inf, rng.standard_normal((heads, n_q, n_k))),
        mask=rng.random((n_q, n_k)) < 0.8, sinks=rng.standard_normal(heads),
    )


OPTIONS = [[], *([name] for name in all_options(1, 1)), list(all_options(1, 1))]
by_options = pytest.mark.parametrize("names", OPTIONS, ids="+".join)


def needed(options):
    return [name for name in ("bias", "sinks") if name in options]


def column(*values):
    """Values as (1, 1, n, 1)."""
    return np.array(values, float).reshape(1, 1, -1, 1)


def finite_differences(do, dlse, inputs, names, step=1e-5):
    """Central differences of sum(do o) + sum(dlse lse) by the arrays that `names` lists."""
    def loss(**changed):
        o, lse = standard_attention(**(inputs | changed), return_lse=True)
        # lse = -inf of an empty row is a constant.
        return (do * o).sum() + (dlse * np.where(lse == -inf, 0, lse)).sum()

    gradients = []
    for name in names:
        x = np.asarray(inputs[name], float)
        gradient = np.zeros_like(x)
        for index in np.ndindex(x.shape):
            up, down = x.copy(), x.copy()
            up[index] += step
            down[index] -= step
            gradient[index] = (loss(**{name: up}) - loss(**{name: down})) / (2 * step)
        gradients.append(gradient)
    return gradients


def assert_same(actual, expected, rtol=1e-10, atol=1e-12):
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=atol, strict=True)


# --- the oracle ---

@by_options
@pytest.mark.parametrize("n_q, n_k", [(3, 4), (4, 2)])
def test_standard_is_the_derivative(n_q, n_k, names):
    do, q, k, v, dlse = arrays(n_q, n_k, batch=1, d=2)
    options = {name: all_options(n_q, n_k)[name] for name in names}
    actual = standard_attention_backward(do, q, k, v, dlse=dlse, need=needed(options), **options)
    expected = finite_differences(do, dlse, dict(q=q, k=k, v=v) | options,
                                  ["q", "k", "v", *needed(options)])
    assert_same(actual, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("shape", [(), (4,), (3, 1), (3, 4), (2, 3, 4), (1, 1, 1, 4), (2, 1, 1, 4),
                                   (1, 2, 3, 1), (2, 2, 3, 4)])
def test_28_dbias_has_the_shape_of_bias(shape):
    do, q, k, v, dlse = arrays(3, 4, heads=2)
    bias = normal(*shape, seed=6) if shape else np.float64(0.3)
    *_, dbias = standard_attention_backward(do, q, k, v, dlse=dlse, bias=bias, need=["bias"])
    expected = finite_differences(do, dlse, dict(q=q, k=k, v=v, bias=bias), ["bias"])
    assert_same([np.asarray(dbias)], expected, rtol=1e-6, atol=1e-8)


# --- the tiled forms against the oracle ---

@pytest.mark.parametrize("gradients", TILED)
@by_options
@pytest.mark.parametrize("n_q, n_k", [(17, 15), (15, 17)])
def test_all_options(gradients, n_q, n_k, names):
    do, q, k, v, dlse = arrays(n_q, n_k)
    options = {name: all_options(n_q, n_k)[name] for name in names}
    options |= dict(dlse=dlse, need=needed(options))
    assert_same(gradients(do, q, k, v, **options),
                standard_attention_backward(do, q, k, v, **options))


@pytest.mark.parametrize("gradients", TILED)
@pytest.mark.parametrize("n_q", [0, 1, 2, 15, 17])
@pytest.mark.parametrize("n_k", [0, 1, 2, 15, 17])
def test_odd_sizes(gradients, n_q, n_k):
    do, q, k, v, dlse = arrays(n_q, n_k, batch=1)
    options = dict(causal=True, dlse=dlse, sinks=normal(4), bias=normal(1, n_k),
                   need=("sinks", "bias"))
    expected = standard_attention_backward(do, q, k, v, **options)
    assert [x.shape for x in expected] == [q.shape, k.shape, v.shape, (1, n_k), (4,)]
    assert_same(gradients(do, q, k, v, **options), expected)


@EVERY
def test_lower_ranks(gradients):
    do, q, k, v, dlse = arrays(5, 6, batch=1, kv_heads=4)
    options = all_options(5, 6) | {"need": ("bias", "sinks")}
    expected = standard_attention_backward(do, q, k, v, dlse=dlse, **options)
    three = gradients(do[0], q[0], k[0], v[0], dlse=dlse[0], **options)
    assert_same(three, [x[0] for x in expected[:3]] + list(expected[3:]))
    options |= {name: options[name][2] for name in ("alibi_slopes", "bias", "sinks")}
    two = gradients(do[0, 2], q[0, 2], k[0, 2], v[0, 2], dlse=dlse[0, 2], **options)
    assert_same(two, [x[0, 2] for x in expected[:3]] + [np.asarray(x[2]) for x in expected[3:]])


@EVERY
def test_inputs_are_left_alone(gradients):
    inputs = arrays(5, 6)
    options = all_options(5, 6)
    before = [np.copy(x) for x in (*inputs, *options.values())]
    gradients(*inputs[:4], dlse=inputs[4], need=("bias", "sinks"), **options)
    for x, y in zip((*inputs, *options.values()), before):
        np.testing.assert_array_equal(x, y)


# --- public bug reports ---

@EVERY
def test_01_fully_masked_row(gradients):
    do, q, k, v, dlse = arrays(2, 3, batch=1, heads=1, kv_heads=1, d=4)
    mask = np.array([[False, False, False], [True, False, True]])
    for options in [dict(mask=mask), dict(bias=np.where(mask, 0, -inf)),
                    dict(mask=mask, causal=True)]:
        dq, dk, dv = gradients(do, q, k, v, dlse=dlse, **options)
        assert (dq[0, 0, 0] == 0).all() and (dk[0, 0, 1] == 0).all() and (dv[0, 0, 1] == 0).all()
        rest = standard_attention_backward(do[:, :, 1:], q[:, :, 1:], k[:, :, ::2], v[:, :, ::2],
                                           dlse=dlse[:, :, 1:])
        assert_same((dq[:, :, 1:], dk[:, :, ::2], dv[:, :, ::2]), rest)


@EVERY
@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_04_hidden_nan_reaches_no_gradient(gradients, value):
    """Key 2 is hidden from all rows, and row 3 sees nothing."""
    do, q, k, v, dlse = arrays(5, 6, heads=2)
    mask = np.ones((5, 6), bool)
    mask[:, 2] = mask[3] = False
    bias = np.where(mask, normal(5, 6), -inf)
    options = dict(dlse=dlse, softcap=2.0, bias=bias, need=["bias"])
    expected = gradients(do, q, k, v, **options)
    for x, index in [(k, 2), (v, 2), (q, 3), (do, 3)]:
        x[:, :, index] = value
    dlse[:, :, 3] = value
    assert_same(gradients(do, q, k, v, **options), expected)


@EVERY
def test_04_visible_nan_reaches_what_it_touches_and_nothing_else(gradients):
    """Only rows 4 and 5 see key 4, whose NaN then is in all that these two rows give."""
    do, q, k, v, dlse = arrays(6, 6, batch=1, heads=1, kv_heads=1)
    k[..., 4, 0] = nan
    dq, dk, dv = gradients(do, q, k, v, dlse=dlse, causal=True, window=(1, 0))
    for x, rows in [(dq, [4, 5]), (dk, [3, 4, 5]), (dv, [3, 4, 5])]:
        assert np.isnan(x[0, 0, rows]).all()
        assert np.isfinite(np.delete(x[0, 0], rows, axis=0)).all()


@EVERY
def test_08_one_key_gives_no_gradient_to_its_score(gradients):
    q, k, v = 3 * normal(3, 1, 1, 1, 16)
    dq, dk, dv = gradients(np.ones((1, 1, 1, 16)), q, k, v)
    np.testing.assert_allclose((dq, dk), 0, atol=1e-12)
    np.testing.assert_allclose(dv, 1, rtol=1e-14)


@EVERY
def test_12_scale_is_that_of_the_given_head_dimension(gradients):
    for d in (1, 3, 64, 129, 512):
        q, k, v = np.zeros((1, d)), np.zeros((2, d)), np.array([[1.0], [0]])
        q[0, -1] = 1
        _, dk, _ = gradients(np.ones((1, 1)), q, k, v)
        np.testing.assert_allclose(dk[:, -1], np.array([0.25, -0.25]) / np.sqrt(d), rtol=1e-14)


@EVERY
def test_14_empty_axes(gradients):
    for batch, n_q, n_k in [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0)]:
        do, q, k, v, dlse = arrays(n_q, n_k, batch=batch)
        for x, dx in zip((q, k, v), gradients(do, q, k, v, dlse=dlse, causal=True), strict=True):
            assert dx.shape == x.shape and (dx == 0).all()


@EVERY
@pytest.mark.parametrize("heads, kv_heads", [(4, 2), (9, 3), (6, 1), (7, 7)])
def test_16_a_kv_head_gets_the_sum_of_its_group(gradients, heads, kv_heads):
    """With one key dv is the sum of do over the group, here of 1, 10, 100 ..."""
    do = (10.0 ** np.arange(heads)).reshape(1, heads, 1, 1)
    v = np.zeros((1, kv_heads, 1, 1))
    _, _, dv = gradients(do, np.zeros((1, heads, 1, 1)), v, v)
    np.testing.assert_array_equal(dv.ravel(), do.reshape(kv_heads, -1).sum(axis=1))


@EVERY
def test_28_dbias_is_summed_over_the_batch(gradients):
    q, k = np.zeros((3, 1, 1, 1)), np.zeros((3, 1, 2, 1))
    v = np.broadcast_to(column(1, 0), (3, 1, 2, 1))
    *_, dbias = gradients(np.ones((3, 1, 1, 1)), q, k, v, bias=np.zeros((1, 1, 1, 2)),
                          need=("bias",))
    assert dbias.shape == (1, 1, 1, 2)
    np.testing.assert_allclose(dbias.ravel(), [0.75, -0.75], rtol=1e-15)


@EVERY
def test_30_dlse_of_an_empty_row_goes_to_its_sink(gradients):
    do, q, k, v, dlse = arrays(5, 3, heads=2, kv_heads=1)
    mask = np.zeros((5, 3), bool)
    options = dict(dlse=dlse, mask=mask, sinks=[0.5, -inf], need=["sinks"])
    *rest, dsinks = gradients(do, q, k, v, **options)
    assert all((x == 0).all() for x in rest)
    np.testing.assert_allclose(dsinks, [dlse[:, 0].sum(), 0], rtol=1e-13)


# --- dtypes and errors ---

@pytest.mark.parametrize("dtype, eps", [(np.float16, 2e-3), (ml_dtypes.bfloat16, 2e-2),
                                        (np.float32, 2e-6), (np.float64, 1e-13)])
def test_dtype_input_rounds_like_a_plain_program(dtype, eps):
    do, q, k, v, dlse = arrays(30, 33, d=16)
    do, q, k, v = (x.astype(dtype) for x in (do, q, k, v))
    options = all_options(30, 33) | dict(dlse=dlse, need=("bias", "sinks"))
    options["sinks"] = options["sinks"].astype(dtype)
    plain = standard_attention_backward(do, q, k, v, dtype="input", **options)
    assert [x.dtype for x in plain] == [dtype] * 3 + [np.float64, dtype]
    exact = standard_attention_backward(do, q, k, v, **options)
    for x, y in zip(plain, exact, strict=True):
        assert y.dtype == np.float64
        assert abs(x.astype(float) - y).max() <= eps * abs(y).max()


@EVERY
@pytest.mark.parametrize("change, message", [
    (dict(do=normal(2, 4, 5, 3)), "do must have shape"),
    (dict(dlse=normal(2, 4, 6)), "dlse must have shape"),
    (dict(need=["bias"]), "need may name"),
    (dict(need=["mask"]), "need may name"),
    (dict(need="sinks", sinks=normal(4)), "need may name"),
])
def test_what_does_not_fit_raises(gradients, change, message):
    do, q, k, v, dlse = arrays(5, 6)
    with pytest.raises(ValueError, match=message):
        gradients(**(dict(do=do, q=q, k=k, v=v, dlse=dlse) | change))


@pytest.mark.parametrize("function", [flash_attention_1_backward, flash_attention_2_backward])
def test_o_and_lse_must_fit(function):
    do, q, k, v, lse = arrays(5, 6)
    with pytest.raises(ValueError, match="o must have shape"):
        function(do, q, k, v, do[:, :2], lse)
    with pytest.raises(ValueError, match="lse must have shape"):
        function(do, q, k, v, do, lse[..., None])
    with pytest.raises(ValueError, match="at least 1 row"):
        function(do, q, k, v, do, lse, block_n=0)


# --- a broken gradient must not pass ---

def tiles_without_tail(n, block, tiles=problem.tiles):
    return [part for part in tiles(n, block) if part.stop - part.start == block]


def distance_off_by_one(self, rows, cols, distance=problem.Problem.distance):
    return distance(self, rows, cols) + 1


def derivative_without_scale(self, q_i, k_j, derivative=problem.Problem.score_derivative):
    return derivative(self, q_i, k_j) / self.scale


def derivative_without_cap(self, q_i, k_j):
    return self.scale


def delta_without_dlse(do, o, dlse):
    return (do * o).sum(axis=-1, keepdims=True)


def no_delta(do, o, dlse):
    return 0 * dlse


MUTANTS = [
    (backward, "tiles", tiles_without_tail),
    (problem.Problem, "distance", distance_off_by_one),
    (problem.Problem, "score_derivative", derivative_without_scale),
    (problem.Problem, "score_derivative", derivative_without_cap),
    (backward, "row_delta", delta_without_dlse),
    (backward, "row_delta", no_delta),
]


@pytest.mark.parametrize("owner, name, broken", MUTANTS, ids=[m[2].__name__ for m in MUTANTS])
@pytest.mark.parametrize("function", [flash_attention_1_backward, flash_attention_2_backward])
def test_mutants_fail(monkeypatch, function, owner, name, broken):
    do, q, k, v, dlse = arrays(17, 15)
    options = dict(causal=True, softcap=1.5)
    o, lse = standard_attention(q, k, v, return_lse=True, **options)
    expected = standard_attention_backward(do, q, k, v, dlse=dlse, **options)
    run = functools.partial(function, do, q, k, v, o, lse, dlse=dlse, block_m=4, block_n=4,
                            **options)
    assert_same(run(), expected)
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises(AssertionError):
        assert_same(run(), expected)
