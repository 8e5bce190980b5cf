"""`mma` and `hopper` on a GPU: what their loops, their masks and their copies could get wrong."""

from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
from helpers import (Engine, check_answer, check_growth_by_ulps, check_huge_scores, check_steep_slopes, growing, normal,
                     problem)
from reference.tolerance import judge

import numba_flash as nf
from numba_flash import arrays, engines

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
TILE = 128          # rows of a query tile, mostly; and of a K/V tile

pytestmark = pytest.mark.gpu


MMA, HOPPER = (Engine(name, "cupy") for name in ("mma", "hopper"))


@pytest.fixture(params=[MMA, HOPPER], ids=lambda engine: engine.kernel)
def engine(request):
    """Each of the two that can run here."""
    reason = engines.load(request.param.kernel).why_not_here()
    if reason:
        pytest.skip(reason)
    return request.param


def check(engine, do, q, k, v, **options):
    """Compare o and lse with the oracle."""
    answer = engine.attention(q, k, v, **options)
    judgement = judge((*answer, *(np.zeros_like(x) for x in (q, k, v))), do, q, k, v, **options)
    for name in "o", "lse":
        error, limit = judgement[name]
        assert error <= limit, f"{name} is off by {error:.3g}, allowed {limit:.3g}"


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BFLOAT16], ids=str)
@pytest.mark.parametrize("n_q, n_k", [(1, 1), (1, 300), (TILE, 2 * TILE), (TILE + 1, 2 * TILE + 3), (65, 127),
                                      (3 * TILE - 1, 63), (200, 641), (192, 900), (193, 500), (5, 1100)])
def test_lengths(engine, dtype, n_q, n_k):
    do, q, k, v = problem(n_q=n_q, n_k=n_k, d=64, dtype=dtype)
    k[:, :, -3:] *= dtype.type(10)      # the last tile brings new maxima: alpha matters
    check(engine, do, q, k, v)


@pytest.mark.parametrize("d, d_v", [(8, 8), (16, 64), (64, 8), (72, 136), (80, 80), (96, 96), (128, 128), (192, 128),
                                    (128, 256), (192, 192), (200, 248), (256, 256)])
@pytest.mark.parametrize("causal", [False, True])
def test_head_dims(engine, d, d_v, causal):
    check(engine, *problem(n_q=150, n_k=290, d=d, d_v=d_v, dtype=BFLOAT16), causal=causal)


@pytest.mark.parametrize("options", [
    {"causal": True}, {"causal": "top_left"}, {"window": (TILE, 2)}, {"window": (0, 0)}, {"window": (None, 70)},
    {"causal": "top_left", "window": (TILE + 1, None)}, {"scale": -0.3}, {"scale": 0.0}, {"scale": 3.0},
    {"softcap": 2.0}, {"alibi_slopes": np.float32([.5, .1])}, {"alibi_slopes": np.float32([-.02, 0]), "causal": True},
    {"sinks": np.float32([.3, -np.inf])},
    {"causal": True, "softcap": 5.0, "alibi_slopes": np.float32([[.5, .1]]), "sinks": np.float32([3, -1])}], ids=str)
@pytest.mark.parametrize("n_q, n_k", [(2 * TILE + 3, TILE + 2), (200, 450)])
def test_options(engine, options, n_q, n_k):
    """With more queries than keys some rows see nothing; every query tile begins and ends at another K/V tile."""
    check(engine, *problem(n_q=n_q, n_k=n_k, d=64, dtype=BFLOAT16), **options)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (8191, 30)}, {"softcap": 2.0}, {"softcap": 20.0},
                                     {"alibi_slopes": np.float32([.01, -.02]), "causal": True}], ids=str)
def test_many_keys(engine, options):
    """`hopper` has another tile shape for them."""
    check(engine, *problem(n_q=200, n_k=8300, d=128, d_v=96, dtype=BFLOAT16), **options)


@pytest.mark.parametrize("d", [64, 128, 192])
def test_scores_that_grow(engine, d):
    do, q, k, v = problem(n_q=200, n_k=450, d=d, dtype=BFLOAT16)
    check(engine, do, q, growing(k), v)


@pytest.mark.parametrize("options", [
    {"softcap": 30.0}, {"softcap": 8.0, "scale": -.1}, {"softcap": 250.0, "scale": 1.0},
    {"softcap": 20.0, "causal": True, "window": (300, None)}, {"alibi_slopes": np.float32([.4, -.01])},
    {"alibi_slopes": np.float32([.003, 0]), "causal": True}], ids=str)
@pytest.mark.parametrize("d", [64, 128, 192, 256])
def test_scores_that_grow_with_options(engine, d, options):
    """`hopper` has a shorter way for tiles in which m stays."""
    do, q, k, v = problem(n_q=200, n_k=900, d=d, dtype=BFLOAT16)
    for keys in k, growing(k):
        check(engine, do, q, keys, v, **options)


def test_heads_that_share_keys(engine):
    check(engine, *problem(batch=3, heads=6, kv_heads=2, n_q=140, n_k=150, d=128, dtype=BFLOAT16), causal=True)
    check(engine, *problem(batch=2, heads=5, kv_heads=1, n_q=1, n_k=333, d=128, dtype=BFLOAT16))


@pytest.mark.parametrize("d, options", [
    (64, {"causal": True}), (64, {}), (64, {"window": (40, 40), "softcap": 3.0}), (128, {"causal": True}),
    (128, {"window": (90, 7)}), (256, {"causal": "top_left"})], ids=str)
def test_more_tiles_than_blocks(engine, d, options):
    """Blocks take one query tile after another, of many heads, in an order that depends on the mask."""
    check(engine, *problem(batch=2, heads=40, kv_heads=8, n_q=250, n_k=200, d=d, dtype=BFLOAT16), **options)


def test_softcap_of_huge_scores(engine):
    do, q, k, v = problem(n_q=150, n_k=300, d=128, dtype=BFLOAT16)
    check(engine, do, (q.astype(np.float32) * 1e4).astype(BFLOAT16), k, v, softcap=5.0)


def test_huge_scores(engine):
    do, q, k, v = problem(n_q=150, n_k=300, d=128, dtype=BFLOAT16)
    check(engine, do, (q.astype(np.float32) * 100).astype(BFLOAT16), k, v, causal=True)
    longer = [(np.float32, 2.0**30), (np.float32, 2.0**110), (np.float64, 2.0**900)] if engine is MMA else []
    for dtype, size in [(BFLOAT16, 2.0**30), (BFLOAT16, 2.0**110), (np.float16, 2.0**26), *longer]:
        check_huge_scores(engine.attention, dtype, size, 150, 900)


@pytest.mark.parametrize("slope", [1e5, 1e9, 1e30, -1e9])
def test_steep_slopes(engine, slope):
    check_steep_slopes(engine.attention, BFLOAT16, slope, 150, 900)
    check_steep_slopes(engine.attention, BFLOAT16, slope, 150, 900, softcap=2.0)


def test_scores_that_grow_by_ulps(engine):
    check_growth_by_ulps(engine.attention, BFLOAT16, 150, 900)


def test_calls_like_one_before(engine):
    """They skip `describe`: what lies in the same places is read anew, and what only looks alike is another call."""
    _, q, k, v = (engine.put(x) for x in problem(batch=2, heads=2, n_q=140, d=64, dtype=BFLOAT16))

    def bits(**options):
        answer = nf.attention(q, k, v, kernel=engine.kernel, **options)
        return [x.get().tobytes() for x in (answer if isinstance(answer, tuple) else [answer])]

    right = bits(return_lse=True)
    masked = bits(causal=True)
    for _ in range(3):
        assert bits(return_lse=True) == right and bits() == right[:1] and bits(causal=True) == masked
    assert bits(scale=.5) != bits() != bits(window=(9, 0))
    v *= BFLOAT16.type(2)
    assert bits(return_lse=True)[1] == right[1] and bits() != right[:1]
    for wrong in {"causal": 1}, {"window": (9.0, 0)}, {"scale": True}, {"return_lse": 1}:
        with pytest.raises((TypeError, ValueError)):
            bits(**wrong)
    plain, q = bits(), q.transpose(1, 0, 2, 3)              # other strides in the same place
    assert bits() != plain
    swapped, q = bits(), q.copy()
    assert bits() == swapped


def test_strides(engine):
    """Views that TMA takes as they are, and views that are copied first, give the same bits as contiguous arrays."""
    rng = np.random.default_rng(0)
    x = normal(rng, 2, 150, 3, 4, 64, dtype=BFLOAT16)                     # (b, n, 3, h, d): packed
    packed = [x[:, :, index].transpose(0, 2, 1, 3) for index in range(3)]
    odd = normal(rng, 2, 4, 150, 67, dtype=BFLOAT16)[..., 1:65]
    views = [packed, [odd, packed[1], packed[2]], [packed[0], packed[1][:, :, ::-1], packed[2]],
             [packed[0], packed[1][..., ::-1], np.broadcast_to(packed[2][:, :1], packed[2].shape)],
             [x.transpose(0, 2, 3, 1, 4)[:, index, :, ::2] for index in range(3)]]
    for q, k, v in views:
        got = engine.attention(q, k, v, causal=True)
        right = engine.attention(*map(np.ascontiguousarray, (q, k, v)), causal=True)
        for a, b in zip(got, right):
            np.testing.assert_array_equal(a, b)


def test_arrays_that_begin_anywhere(engine):
    """Contiguous ones, at addresses that no copy of 16 bytes may start from."""
    import cupy

    def moved(x):
        place = cupy.empty(x.size + 1, x.dtype)[1:].reshape(x.shape)
        place[...] = x
        return place

    do, q, k, v = (engine.put(x) for x in problem(n_q=140, d=64, dtype=np.float16))
    o, lse = nf.attention(q, k, v, kernel=engine.kernel, return_lse=True)
    out = moved(cupy.zeros_like(o))
    nf.attention(*map(moved, (q, k, v)), kernel=engine.kernel, out=out)
    assert bool((out == o).all())
    right = nf.attention_backward(do, q, k, v, o, lse, kernel=engine.kernel, deterministic=True)
    got = nf.attention_backward(*map(moved, (do, q, k, v, o)), lse, kernel=engine.kernel, deterministic=True)
    assert all(bool((x == y).all()) for x, y in zip(got, right))


def test_a_new_thread_launches(engine, monkeypatch):
    """One that finds all it needs remembered, so that nothing but a launch makes it known to CUDA."""
    monkeypatch.setattr(arrays, "empty", lambda xp, shape, dtype: xp.ndarray(shape, dtype))     # not filled first
    q, k, v = (engine.put(x) for x in problem(n_q=140, d=64, dtype=np.float16)[1:])
    right = [nf.attention(q, k, v, kernel=engine.kernel) for _ in range(2)][0].get().tobytes()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(nf.attention, q, k, v, kernel=engine.kernel).result().get().tobytes() == right


@pytest.mark.parametrize("columns, first", [(64, 0), (70, 0), (72, 8), (65, 1)])
def test_out(engine, columns, first):
    import cupy

    _, q, k, v = (engine.put(x) for x in problem(batch=2, n_q=140, d=64, dtype=np.float16))
    memory = cupy.zeros((2, 140, 2, columns), np.float16)
    out = memory.transpose(0, 2, 1, 3)[..., first:first + 64]
    nf.attention(q, k, v, out=out, kernel=engine.kernel)
    assert bool((out == nf.attention(q, k, v, kernel=engine.kernel)).all())
    assert not memory[..., :first].any() and not memory[..., first + 64:].any()


def test_what_nobody_sees_has_no_effect(engine):
    """NaN in memory past the last key, and in tiles of keys that the band hides from all queries of a tile."""
    _, q, k, v = problem(n_q=130, n_k=600, d=64, dtype=BFLOAT16)
    answers = []
    for hidden in 0, np.nan:
        k[:, :, 580:], v[:, :, 580:] = hidden, hidden
        k[:, :, 256:400], v[:, :, 256:400] = hidden, hidden
        answers.append((*engine.attention(q, k[:, :, :580], v[:, :, :580], causal="top_left"),
                        *engine.attention(q, k[:, :, 400:580], v[:, :, 400:580])))
    for a, b in zip(*answers):
        np.testing.assert_array_equal(a, b)


def test_a_visible_nan_comes_out(engine):
    _, q, k, v = problem(n_q=130, n_k=200, d=64, dtype=BFLOAT16)
    k[:, :, 150] = np.nan
    o, lse = engine.attention(q, k, v)
    assert np.isnan(o.astype(np.float32)).all() and np.isnan(lse).all()


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_every_run_gives_the_same_bits(engine, d, causal):
    """A place in shared memory that is written before all have read it shows once in some hundred runs."""
    q, k, v = (engine.put(x) for x in problem(batch=4, heads=16, n_q=500, d=d, dtype=BFLOAT16)[1:])
    runs = [nf.attention(q, k, v, causal=causal, kernel=engine.kernel).view("u2") for _ in range(300)]
    assert not any(bool((x != runs[0]).any()) for x in runs[1:])


def test_graph_capture_and_replay(engine):
    """Tensor maps are part of the captured launch: a replay reads what the inputs hold then."""
    import cupy

    _, q, k, v = (engine.put(x) for x in problem(n_q=300, d=64, dtype=np.float16))
    nf.attention(q, k, v, kernel=engine.kernel)                      # compiled before the capture
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        captured = nf.attention(q, k, v, kernel=engine.kernel)
        graph = stream.end_capture()
    for x, new in zip((q, k, v), problem(seed=1, n_q=300, d=64, dtype=np.float16)[1:]):
        x[...] = engine.put(new)
    cupy.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    assert bool((captured == nf.attention(q, k, v, kernel=engine.kernel)).all())


@pytest.mark.parametrize("change, options, words", [
    ({"dtype": np.float64}, {}, "float64"), ({"d": 20}, {}, "20"), ({"d": 264}, {}, "264"),
    ({}, {"softcap": 500}, "256")])
def test_what_it_cannot_do(engine, change, options, words):
    if "dtype" in change and engine.kernel not in engines.ONLY_16_BIT:
        pytest.skip("it can")
    _, q, k, v = (engine.put(x) for x in problem(**{"d": 64, "dtype": np.float16, **change}))
    with pytest.raises(ValueError, match=words):
        nf.attention(q, k, v, kernel=engine.kernel, **options)


@pytest.mark.parametrize("options", [{"causal": "top_left"}, {"window": (3, 2)},
                                     {"causal": "top_left", "softcap": 2.0},
                                     {"window": (3, 2), "softcap": 2.0, "scale": 0.0}], ids=str)
def test_keys_that_no_query_sees_never_leak(engine, options):
    do, q, k, v = problem(n_q=20, n_k=150, d=64, dtype=BFLOAT16)
    clean = engine.attention(q, k, v, **options)
    hidden = slice(20, None) if "causal" in options else slice(0, 127)
    k[:, :, hidden], v[:, :, hidden] = np.nan, np.nan
    for got, right in zip(engine.attention(q, k, v, **options), clean):
        np.testing.assert_array_equal(got, right)


# ---- gradients -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BFLOAT16], ids=str)
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("n_q, n_k", [(1, 1), (1, 300), (300, 1), (TILE, TILE), (TILE + 1, 2 * TILE + 3), (333, 65)])
def test_gradients_for_all_lengths(engine, dtype, d, n_q, n_k):
    do, q, k, v = problem(n_q=n_q, n_k=n_k, d=d, dtype=dtype)
    engine.check(do, q, k, v, dlse=do[..., 0].astype(np.float32))


@pytest.mark.parametrize("d, d_v", [(8, 8), (16, 64), (40, 48), (64, 8), (64, 128), (72, 16), (96, 96), (128, 64),
                                    (136, 72), (192, 128), (64, 256), (200, 248), (256, 256)])
def test_gradients_for_all_head_dims(engine, d, d_v):
    engine.check(*problem(n_q=150, n_k=290, d=d, d_v=d_v, dtype=BFLOAT16), causal=True)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("options", [
    {"causal": True}, {"causal": "top_left"}, {"window": (TILE, 2)}, {"window": (0, 0)}, {"window": (None, 70)},
    {"scale": -0.3}, {"scale": 0.0}, {"alibi_slopes": np.float32([.5, -.1]), "causal": True},
    {"sinks": np.float32([.3, -np.inf]), "need": ("sinks",)}], ids=str)
@pytest.mark.parametrize("n_q, n_k", [(2 * TILE + 3, TILE + 2), (200, 450)])
def test_gradients_with_options(engine, d, options, n_q, n_k):
    """Some rows see nothing, and every tile of keys begins and ends at another query."""
    engine.check(*problem(n_q=n_q, n_k=n_k, d=d, dtype=BFLOAT16), **options)


def test_gradients_of_heads_that_share_keys(engine):
    engine.check(*problem(batch=3, heads=6, kv_heads=2, n_q=140, n_k=150, d=128, dtype=BFLOAT16), causal=True)
    engine.check(*problem(batch=2, heads=5, kv_heads=1, n_q=130, n_k=333, d=64, dtype=BFLOAT16))


def test_gradients_of_what_nobody_sees(engine):
    """Keys that no query sees get zero, whatever they hold; queries that see no key change nothing."""
    do, q, k, v = problem(n_q=200, n_k=300, d=64, dtype=BFLOAT16)
    k[:, :, 200:], v[:, :, 200:] = np.nan, np.nan
    o, lse, dq, dk, dv = engine.both(do, q, k, v, causal="top_left")
    right = engine.both(do, q, k[:, :, :200], v[:, :, :200], causal="top_left")
    for got, x in zip((o, lse, dq, dk[:, :, :200], dv[:, :, :200]), right):
        np.testing.assert_allclose(got.astype(np.float32), x.astype(np.float32), rtol=1e-2, atol=1e-5)
    assert not dk[:, :, 200:].any() and not dv[:, :, 200:].any()
    _, _, dq, dk, dv = engine.both(do[:, :, :50], q[:, :, :50], k[:, :, :1], v[:, :, :1], causal=True)
    assert not dq[:, :, :-1].any()


def test_gradients_of_any_strides(engine):
    do, q, k, v = problem(n_q=150, n_k=150, d=64, dtype=BFLOAT16)
    odd = (np.broadcast_to(do[:, :, :, :1], do.shape), q[..., ::-1],
           k.transpose(0, 1, 3, 2).copy().transpose(0, 1, 3, 2), v[:, :, ::-1])
    engine.check(*odd)


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("options", [
    {"softcap": 2.0}, {"softcap": 5.0, "causal": True, "alibi_slopes": np.float32([.5, -.1])}], ids=str)
def test_gradients_under_a_softcap(engine, d, options):
    engine.check(*problem(n_q=150, n_k=290, d=d, dtype=BFLOAT16), **options)


@pytest.mark.parametrize("n_q, n_k, d, options", [
    (333, 290, 64, {"causal": True}), (333, 290, 128, {"window": (70, 9)}), (333, 290, 256, {}),
    (333, 290, 64, {"softcap": 3.0}), (333, 290, 128, {"alibi_slopes": np.float32([.5, -.1])}),
    (205, 553, 64, {"window": (207, 176), "causal": "top_left"}), (30, 400, 256, {"window": (1, 0)}),
    (394, 528, 128, {"window": (20, 0)}), (900, 900, 64, {"causal": True})], ids=str)
def test_deterministic_gradients(engine, n_q, n_k, d, options):
    """The blocks of a head add to dQ in turn, and each must know whose turn it is, under whatever mask."""
    do, q, k, v = problem(batch=2, n_q=n_q, n_k=n_k, d=d, dtype=BFLOAT16)
    o, lse = engine.attention(q, k, v, **options)
    first, *others = (engine.attention_backward(do, q, k, v, o, lse, deterministic=True, **options) for _ in range(4))
    check_answer((o, lse, *first), do, q, k, v, **options)
    for other in others:
        for a, b in zip(first, other):
            np.testing.assert_array_equal(a, b)


def test_deterministic_gradients_beside_a_busy_stream(engine):
    """100 runs, while another stream keeps the multiprocessors busy."""
    import cupy

    do, q, k, v = (engine.put(x) for x in problem(batch=2, heads=4, n_q=1000, d=64, dtype=BFLOAT16))
    o, lse = nf.attention(q, k, v, causal=True, return_lse=True, kernel=engine.kernel)
    cupy.cuda.Device().synchronize()
    other, x = cupy.cuda.Stream(non_blocking=True), cupy.ones((2048, 2048), np.float32)
    runs = []
    for _ in range(100):
        with other:
            x = x @ x / 2048
        runs.append(nf.attention_backward(do, q, k, v, o, lse, causal=True, deterministic=True, kernel=engine.kernel))
    assert all(bool((a.view("u2") == b.view("u2")).all()) for run in runs for a, b in zip(run, runs[0]))
