"""Every option, dtype and size on every engine, forward and backward, against the oracle."""

import ml_dtypes
import numpy as np
import pytest
from helpers import check_answer, normal, problem

import numba_flash as nf

OPTIONS = {
    "plain": {},
    "scale": {"scale": -0.3},
    "zero scale": {"scale": 0},
    "causal": {"causal": True},
    "top left": {"causal": "top_left"},
    "window": {"window": (2, 1)},
    "left window": {"window": (1, None)},
    "right window": {"window": (-1, 0)},
    "narrow": {"window": (0, 0)},
    "causal window": {"causal": True, "window": (3, 5)},
    "top left window": {"causal": "top_left", "window": (3, -1)},
    "softcap": {"softcap": 0.7},
    "alibi": {"alibi_slopes": "heads"},
    "alibi per batch": {"alibi_slopes": "batch", "causal": "top_left"},
    "bias": {"bias": "full"},
    "mask": {"mask": "full"},
    "sinks": {"sinks": True},
    "all": {"causal": True, "window": (4, 4), "softcap": 1.3, "alibi_slopes": "heads", "bias": "full", "mask": "full",
            "sinks": True, "scale": 0.4},
}


def fill_in(options, batch, heads, n_q, n_k, dtype=np.float32):
    """Replace the words of `OPTIONS` by arrays."""
    rng, options = np.random.default_rng(1), dict(options)
    if "alibi_slopes" in options:
        options["alibi_slopes"] = normal(rng, *((batch, heads) if options["alibi_slopes"] == "batch" else (heads,)))
    if "bias" in options:
        options["bias"] = normal(rng, batch, heads, n_q, n_k, dtype=dtype)
    if "mask" in options:
        options["mask"] = rng.random((batch, heads, n_q, n_k)) < 0.6
    if "sinks" in options:
        options["sinks"] = normal(rng, heads)
    return options


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("lengths", [(5, 9), (9, 5)], ids=["more keys", "more queries"])
def test_option(engine, name, lengths):
    n_q, n_k = lengths if engine.place == "simulator" else [13 * n for n in lengths]
    batch = 1 if engine.place == "simulator" and n_q > n_k else 2
    options = fill_in(OPTIONS[name], batch, 2, n_q, n_k)
    need = tuple(key for key in ("bias", "sinks") if key in options)
    do, q, k, v = problem(batch=batch, kv_heads=1, n_q=n_q, n_k=n_k, d=6, d_v=3)
    engine.check(do, q, k, v, dlse=normal(np.random.default_rng(2), batch, 2, n_q), need=need, **options)


def test_precision_changes_nothing_here(engine):
    """All calls take it; only `mma` makes a difference, of float32."""
    do, q, k, v = problem(n_q=5, n_k=9, d=6)
    o, pullback = nf.attention_vjp(*map(engine.put, (q, k, v)), kernel=engine.kernel, precision="tf32")
    right = engine.both(do, q, k, v)
    for a, b in zip(right, engine.both(do, q, k, v, precision="tf32"), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(engine.get(o), right[0])
    np.testing.assert_allclose(engine.get(pullback(engine.put(do))[0]), right[2], rtol=1e-5)


@pytest.mark.parametrize("name", ["plain", "causal", "all"])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64], ids=["float16", "bfloat16", "float64"])
def test_dtype(engine, dtype, name):
    n_q, n_k = (5, 9) if engine.place == "simulator" else (70, 130)
    options = fill_in(OPTIONS[name], 1, 2, n_q, n_k, dtype)
    need = tuple(key for key in ("bias", "sinks") if key in options)
    do, q, k, v = problem(n_q=n_q, n_k=n_k, d=16, dtype=dtype)
    o, lse, *grads = answer = engine.both(do, q, k, v, need=need, **options)
    assert o.dtype == dtype and lse.dtype == (np.float64 if dtype == np.float64 else np.float32)
    assert all(grad.dtype == dtype for grad in grads[:3])
    check_answer(answer, do, q, k, v, need=need, **options)


def test_lengths(engine):
    for i, n_q in enumerate(engine.sizes):
        for n_k in (n_q, engine.sizes[-1 - i]):
            engine.check(*problem(seed=i, n_q=n_q, n_k=n_k, d=8), causal=bool(i % 2))


@pytest.mark.parametrize("d, d_v", [(1, 1), (2, 5), (3, 2), (17, 16), (33, 40), (64, 64), (96, 32), (128, 128),
                                    (192, 128), (256, 256)])
def test_head_dims(engine, d, d_v):
    if engine.place == "simulator" and d > 33:
        pytest.skip("too slow in the simulator")
    engine.check(*problem(n_q=9, n_k=9 if engine.place == "simulator" else 70, d=d, d_v=d_v))


@pytest.mark.parametrize("heads, kv_heads", [(4, 2), (9, 3), (6, 1), (7, 7), (40, 2)])
def test_grouped_heads(engine, heads, kv_heads):
    if engine.place == "simulator" and heads > 4:
        pytest.skip("too slow in the simulator")
    engine.check(*problem(batch=2, heads=heads, kv_heads=kv_heads, n_q=5, n_k=6, d=4), causal=True)


@pytest.mark.parametrize("shape", [(), (9,), (5, 9), (5, 1), (1, 9), (2, 5, 9), (2, 1, 9), (2, 5, 1), (1, 1, 1, 9),
                                   (3, 1, 1, 9), (1, 2, 5, 1), (3, 1, 5, 1), (3, 2, 5, 9)])
def test_bias_broadcasts_and_so_does_its_gradient(engine, shape):
    if engine.place == "simulator" and shape not in ((), (5, 1), (3, 1, 1, 9), (1, 2, 5, 1)):
        pytest.skip("too slow in the simulator, and others test the same")
    do, q, k, v = problem(batch=3, n_q=5, n_k=9, d=4)
    bias = normal(np.random.default_rng(3), *shape)
    answer = engine.both(do, q, k, v, need="bias", bias=bias, causal=True)
    assert answer[-1].shape == shape
    check_answer(answer, do, q, k, v, need=("bias",), bias=bias, causal=True)


@pytest.mark.parametrize("shape", [(9,), (5, 9), (5, 1), (2, 1, 9), (3, 1, 1, 9), (1, 2, 5, 1)])
def test_mask_broadcasts(engine, shape):
    if engine.place == "simulator" and shape not in ((5, 1), (3, 1, 1, 9)):
        pytest.skip("too slow in the simulator, and others test the same")
    mask = np.random.default_rng(4).random(shape) < 0.6
    engine.check(*problem(batch=3, n_q=5, n_k=9, d=4), mask=mask)


@pytest.mark.parametrize("dtype", [np.float16, np.float64, ml_dtypes.bfloat16], ids=["float16", "float64", "bfloat16"])
def test_option_arrays_of_other_dtypes(engine, dtype):
    rng = np.random.default_rng(5)
    options = {"bias": normal(rng, 5, 9, dtype=dtype), "sinks": normal(rng, 2, dtype=dtype),
               "alibi_slopes": normal(rng, 2, dtype=dtype)}
    do, q, k, v = problem(n_q=5, n_k=9)
    answer = engine.both(do, q, k, v, need=("sinks", "bias"), **options)
    assert all(x.dtype == dtype for x in answer[-2:])
    check_answer(answer, do, q, k, v, need=("sinks", "bias"), **options)


@pytest.mark.parametrize("rank", [2, 3])
def test_fewer_axes_drop_from_every_argument(engine, rank):
    lead = (0,) * (4 - rank)
    do, q, k, v = problem(n_q=5, n_k=7)
    options = fill_in({"alibi_slopes": "heads", "bias": "full", "mask": "full", "sinks": True}, 1, 2, 5, 7)
    whole = engine.both(do, q, k, v, need=("bias", "sinks"), **options)
    less = {"bias": options["bias"][lead], "mask": options["mask"][lead]}
    for name in ("alibi_slopes", "sinks"):
        less[name] = options[name] if rank == 3 else np.asarray(options[name][0])
    part = engine.both(do[lead], q[lead], k[lead], v[lead], need=("bias", "sinks"), **less)
    for got, right in zip(part[:6], whole[:6]):
        np.testing.assert_allclose(got, right[lead], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(part[6], whole[6] if rank == 3 else whole[6][0], rtol=1e-4, atol=1e-5)


def test_gradient_of_lse_alone(engine):
    do, q, k, v = problem(n_q=5, n_k=7)
    engine.check(np.zeros_like(do), q, k, v, dlse=normal(np.random.default_rng(6), 1, 2, 5))


def test_forward_is_repeatable(engine):
    do, q, k, v = problem(n_q=9 if engine.place == "simulator" else 300, d=16)
    first, second = (engine.attention(q, k, v, causal=True) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first, second))


def test_deterministic_gradients_are_repeatable(engine):
    sizes = {"heads": 2, "kv_heads": 1, "n_q": 9} if engine.place == "simulator" else {
        "heads": 4, "kv_heads": 2, "n_q": 300}
    do, q, k, v = problem(**sizes, d=16)
    bias = normal(np.random.default_rng(7), q.shape[2])
    o, lse = engine.attention(q, k, v, bias=bias)
    runs = [engine.attention_backward(do, q, k, v, o, lse, bias=bias, need="bias", deterministic=True)
            for _ in range(2 if engine.place == "simulator" else 5)]
    assert all(np.array_equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run))
