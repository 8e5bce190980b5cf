"""`mma` in float32 and float64: as exact as these, whatever the inputs; interpreted without a GPU, and on one."""

import interpreter
import numpy as np
import pytest
from helpers import Engine, check_answer, problem
from interpreted import Run
from reference.tolerance import judge
from test_mma_interpreted import both

from numba_flash import engines
from numba_flash.cuda import compile
from numba_flash.cuda.compile import cuda
from numba_flash.cuda.ptx.arithmetic import exp2, log2
from numba_flash.cuda.signatures import real_array
from numba_flash.problem import FLOAT32, FLOAT64

interpreted = pytest.mark.skipif(compile.why_no_compiler() is not None, reason=str(compile.why_no_compiler()))
ON_GPU = Engine("mma", "cupy")
BOTH = pytest.mark.parametrize("dtype", [FLOAT32, FLOAT64], ids=str)


@pytest.fixture
def mma():
    """The engine, if it can run here."""
    reason = engines.load("mma").why_not_here()
    if reason:
        pytest.skip(reason)
    return ON_GPU


def skip_what_does_not_fit(q, k, v):
    """Wide heads in float64, where a block has 99 KB of shared memory."""
    from numba_flash.cuda.mma.engine import why_no_tile
    from numba_flash.describe import describe

    reason = why_no_tile(describe("attention", q, k, v).problem, backward=True)
    if reason:
        pytest.skip(reason)


def scaled_rows(x, seed, largest):
    """Rows whose sizes differ by 1e4."""
    sizes = largest * 10.0**np.random.default_rng(seed).integers(-4, 1, x.shape[:-1])
    return (x * sizes[..., None]).astype(x.dtype)


def large_logits(q, k, v):
    return 30 * q, k, v


def badly_scaled(q, k, v):
    return scaled_rows(q, 1, 1), scaled_rows(k, 2, 10), scaled_rows(v, 3, 1e4)


def of_one_sign(q, k, v):
    """All terms of all sums are positive: what a tensor core cuts off adds up."""
    return abs(q), abs(k), abs(v)


INPUTS = [large_logits, badly_scaled, of_one_sign]


# ---- interpreted -----------------------------------------------------------------------------------------------------

@interpreted
@pytest.mark.parametrize("gpu, sizes, options", [
    ("9.0", {"heads": 2, "kv_heads": 1, "n_q": 40, "n_k": 70, "d": 64}, {"causal": True}),
    ("12.0", {"n_q": 33, "n_k": 65, "d": 64, "heads": 1}, {"window": (20, 9), "early": True, "deterministic": True}),
    ("8.0", {"n_q": 33, "n_k": 40, "d": 36, "d_v": 20, "heads": 1}, {"alibi_slopes": np.float32([.3]), "softcap": 2.0}),
    ("8.0", {"n_q": 1, "n_k": 1, "d": 4}, {"seed": 3}),
    ("9.0", {"heads": 1, "n_q": 40, "n_k": 66, "d": 128}, {"sinks": np.float32([.3]), "deterministic": True}),
    ("12.0", {"heads": 1, "n_q": 33, "n_k": 40, "d": 192}, {"early": True}),
    ("9.0", {"heads": 1, "n_q": 20, "n_k": 36, "d": 256, "d_v": 160}, {"deterministic": True})], ids=str)
def test_right_answers_in_float32(gpu, sizes, options):
    check_interpreted(gpu, problem(**sizes), options)


@interpreted
@pytest.mark.parametrize("gpu, sizes, options", [
    ("9.0", {"heads": 2, "kv_heads": 1, "n_q": 40, "n_k": 70, "d": 64}, {"causal": True}),
    ("9.0", {"n_q": 33, "n_k": 65, "d": 64, "heads": 1}, {"window": (20, 9), "early": True, "deterministic": True}),
    ("8.0", {"n_q": 33, "n_k": 40, "d": 36, "d_v": 20, "heads": 1}, {"alibi_slopes": np.float64([.3]), "softcap": 2.0}),
    ("8.0", {"n_q": 1, "n_k": 1, "d": 2}, {"seed": 3}),
    ("9.0", {"heads": 1, "n_q": 40, "n_k": 66, "d": 128}, {"sinks": np.float64([.3])}),
    ("12.0", {"heads": 1, "n_q": 33, "n_k": 40, "d": 128, "d_v": 66}, {"early": True, "deterministic": True}),
    ("9.0", {"heads": 1, "n_q": 20, "n_k": 36, "d": 256, "d_v": 134}, {"causal": True}),
    ("8.0", {"heads": 1, "n_q": 20, "n_k": 36, "d": 256}, {"deterministic": True})], ids=str)
def test_right_answers_in_float64(gpu, sizes, options):
    check_interpreted(gpu, problem(dtype=np.float64, **sizes), options)


def check_interpreted(gpu, inputs, options):
    answer = both(gpu, *inputs, **options)
    check_answer(answer, *inputs, **{name: x for name, x in options.items()
                                     if name not in ("early", "seed", "deterministic")})


@interpreted
@BOTH
@pytest.mark.parametrize("change", INPUTS)
def test_exact_for_other_inputs(change, dtype):
    do, *inputs = problem(heads=1, n_q=33, n_k=70, d=64, dtype=dtype)
    inputs = change(*inputs)
    check_answer(both("9.0", do, *inputs), do, *inputs)


@interpreted
def test_one_product_has_the_accuracy_of_tf32():
    inputs = problem(heads=1, n_q=40, n_k=70, d=64)
    judgement = judge(both("9.0", *inputs, precision="tf32"), *inputs)
    for name, (error, limit) in judgement.items():
        assert limit / 10 < error < 1e-3, name
    assert judgement["o"][0] > judgement["o"][1]


@interpreted
def test_nan_and_infinity():
    """A row that sees a NaN or an infinity is NaN, others are as ever; with one product, infinity may stay what it is.
    """
    for dtype, precision in (FLOAT32, None), (FLOAT32, "tf32"), (FLOAT64, None):
        do, q, k, v = problem(heads=1, n_q=40, n_k=40, d=16, dtype=dtype)
        right, _ = both("9.0", do, q, k, v, backward=False, causal=True, precision=precision)
        for strange in np.nan, np.inf:
            broken = k.copy()
            broken[:, :, 20, 3] = strange
            o, _ = both("9.0", do, q, broken, v, backward=False, causal=True, precision=precision)
            np.testing.assert_array_equal(o[:, :, :20], right[:, :, :20])
            assert np.isnan(o[:, :, 20:]).all() or (precision or dtype == FLOAT64) and strange == np.inf


@interpreted
def test_float64_arithmetic():
    """2^x to two units in the last place, and the logarithm of what a row's sum may be."""
    powers = np.concatenate([np.linspace(-1100, 1100, 1999), np.linspace(-1, 1, 1999),
                             [np.nan, -np.inf, np.inf, 0, -0.0, 1e9, 1e300, -1e300]])
    sums = np.concatenate([1 + np.arange(1000) / 1e3, 10.0**np.arange(-30, 31), 2.0**np.arange(31), [np.nan]])
    run = Run((8, 0), 0, 0, powers=np.resize(powers, 4096), sums=np.resize(sums, 4096))
    got = [run.put(name, np.zeros(4096)) for name in ("exp2", "log2")]

    def kernel(x, y, x_exp2, y_log2):
        i = cuda.blockIdx.x * 32 + cuda.threadIdx.x
        x_exp2[i], y_log2[i] = exp2(x[i]), log2(y[i])

    program = interpreter.Kernel(compile.compile_kernel(kernel, (real_array(FLOAT64, 1),) * 4, 32, (8, 0)))
    places = [x for name in ("powers", "sums", "exp2", "log2") for x in run.places[name]]
    interpreter.launch(program, places, run.memory, threads=32, shared_bytes=0, grid=128)
    powers, sums = np.resize(powers, 4096).astype(np.longdouble), np.resize(sums, 4096).astype(np.longdouble)
    normal = (powers >= -1022) & (powers < 1023.5)
    right = np.exp2(powers[normal])
    assert (abs(got[0][normal] - right) <= 2 * np.spacing(right.astype(float))).all()
    others = powers[~normal]
    np.testing.assert_array_equal(got[0][~normal], np.where(others < 0, 0, others * np.inf))
    np.testing.assert_allclose(got[1], np.log2(sums).astype(float), rtol=3e-16, atol=1e-15)


# ---- on a GPU --------------------------------------------------------------------------------------------------------

@pytest.mark.gpu
@BOTH
@pytest.mark.parametrize("n_q, n_k", [(1, 1), (1, 300), (300, 1), (128, 256), (129, 259), (65, 127), (383, 63)])
def test_lengths(mma, n_q, n_k, dtype):
    do, q, k, v = problem(n_q=n_q, n_k=n_k, d=64, dtype=dtype)
    mma.check(do, q, k, v, dlse=do[..., 0])


@pytest.mark.gpu
@BOTH
@pytest.mark.parametrize("d, d_v", [(4, 4), (8, 64), (20, 36), (64, 8), (72, 136), (96, 96), (128, 128), (128, 256),
                                    (160, 192), (200, 248), (256, 256)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_head_dims(mma, d, d_v, deterministic, dtype):
    do, q, k, v = problem(n_q=150, n_k=290, d=d, d_v=d_v, dtype=dtype)
    skip_what_does_not_fit(q, k, v)
    o, lse = mma.attention(q, k, v, causal=True)
    gradients = mma.attention_backward(do, q, k, v, o, lse, causal=True, deterministic=deterministic)
    check_answer((o, lse, *gradients), do, q, k, v, causal=True)


@pytest.mark.gpu
@BOTH
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("options", [
    {"causal": True}, {"causal": "top_left"}, {"window": (128, 2)}, {"window": (0, 0)}, {"scale": -0.3}, {"scale": 0.0},
    {"softcap": 2.0}, {"softcap": 5.0, "causal": True, "alibi_slopes": np.float32([.5, -.1])},
    {"alibi_slopes": np.float32([.5, -.1]), "causal": True},
    {"sinks": np.float32([.3, -np.inf]), "need": ("sinks",)}], ids=str)
def test_options(mma, d, options, dtype):
    mma.check(*problem(n_q=259, n_k=130, d=d, dtype=dtype), **options)
    mma.check(*problem(n_q=200, n_k=450, d=d, dtype=dtype), **options)


@pytest.mark.gpu
@BOTH
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("change", INPUTS)
def test_exact_for_other_inputs_on_a_gpu(mma, change, d, dtype):
    do, *inputs = problem(n_q=300, n_k=700, d=d, dtype=dtype)
    skip_what_does_not_fit(*inputs)
    mma.check(do, *change(*inputs))


@pytest.mark.gpu
@BOTH
def test_long_sums(mma, dtype):
    """Of thousands of keys, all of one sign: a tensor core that summed them itself would be off by 1e-4."""
    do, *inputs = problem(heads=1, n_q=100, n_k=9000, d=64, dtype=dtype)
    mma.check(do, *of_one_sign(*inputs))


@pytest.mark.gpu
@BOTH
def test_heads_and_strides(mma, dtype):
    mma.check(*problem(batch=3, heads=6, kv_heads=2, n_q=140, n_k=150, d=128, dtype=dtype), causal=True)
    do, q, k, v = problem(n_q=150, n_k=150, d=64, dtype=dtype)
    mma.check(np.broadcast_to(do[:, :, :, :1], do.shape), q[..., ::-1],
              k.transpose(0, 1, 3, 2).copy().transpose(0, 1, 3, 2), v[:, :, ::-1])


@pytest.mark.gpu
@BOTH
@pytest.mark.parametrize("d", [64, 128])
def test_deterministic_gradients(mma, d, dtype):
    do, q, k, v = problem(batch=2, n_q=333, n_k=290, d=d, dtype=dtype)
    o, lse = mma.attention(q, k, v)
    first, *others = (mma.attention_backward(do, q, k, v, o, lse, deterministic=True) for _ in range(4))
    for other in others:
        for a, b in zip(first, other):
            np.testing.assert_array_equal(a, b)


@pytest.mark.gpu
def test_tf32(mma):
    inputs = problem(n_q=300, n_k=700, d=128)
    for name, (error, _) in judge(mma.both(*inputs, precision="tf32"), *inputs).items():
        assert error < 2e-3, name
