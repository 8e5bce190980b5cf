"""The kernels of `mma`, their PTX interpreted on a machine without a GPU, against the oracle.

Answers must be right whatever the order of warps and copies: see `interpreter`.
"""

from dataclasses import replace

import interpreted
import interpreter
import ml_dtypes
import numpy as np
import pytest
from helpers import check_answer, check_growth_by_ulps, check_huge_scores, check_steep_slopes, problem
from interpreted import Run

from numba_flash.cuda import compile
from numba_flash.cuda.mma import config, forward
from numba_flash.cuda.mma.config import BackwardTile, DqTile, Tile
from numba_flash.cuda.tensor_cores import steps
from numba_flash.cuda.tensor_cores.host import THREADS, blocks_for_numbers, lanes_of_query, numbers
from numba_flash.cuda.tensor_cores.spec import Spec
from numba_flash.describe import describe

pytestmark = pytest.mark.skipif(compile.why_no_compiler() is not None, reason=str(compile.why_no_compiler()))
BFLOAT16, FLOAT16, FLOAT32, FLOAT64 = map(np.dtype, (ml_dtypes.bfloat16, np.float16, np.float32, np.float64))
GPUS = {"8.0": ((8, 0), 163), "12.0": ((12, 0), 99), "9.0": ((9, 0), 227)}          # KB of shared memory


def both(gpu, do, q, k, v, early=0, seed=0, deterministic=False, backward=True, wants_lse=True, **options):
    """o, lse, dq, dk, dv, or the first two."""
    call, (cc, kilobytes) = describe("attention", q, k, v, **options), GPUS[gpu]
    p, spec = call.problem, Spec.of(call.problem, quarters=cc < (9, 0))
    given = {name: x for name, x in call.operands._asdict().items() if x is not None}
    run, limit = Run(cc, early, seed, do=do, **given), kilobytes * 1024
    heads = p.batch * p.heads

    tile = config.choose(spec, limit)
    lse_shape = p.lse_shape if wants_lse else (p.batch, p.heads, 0)
    o, lse = run.empty("o", p.o_shape, p.dtype), run.empty("lse", lse_shape, p.accumulator)
    run.launch("mma.forward:make_forward", (tile, spec), config.Layout, -(-p.n_q // tile.block_m) * heads * spec.sides,
               ("q", "k", "v", "o", "lse", "sinks", "alibi_slopes"), (p.group, min(2, heads), *numbers(spec, p)))
    if not backward:
        return o, lse

    spec = replace(spec, sinks=False)
    tile = config.choose_backward(spec, limit)
    parts = config.BackwardLayout(tile, spec).dq_parts(by_four=cc >= (9, 0) and p.dtype != np.float64)
    lanes, tiles = lanes_of_query(p.d_v, p.dtype.itemsize), -(-p.n_q // tile.block_m)
    run.empty("query_numbers", (p.batch, p.heads, tiles, 2 * tile.block_m), p.accumulator)
    run.start("tensor_cores.backward_parts:make_query_numbers", (THREADS, lanes, tile.block_m, p.dtype, False), THREADS,
              0, blocks_for_numbers(heads * tiles * tile.block_m, lanes), ("do", "o", "lse", None, "query_numbers"))
    dq, dk, dv = (run.empty(name, shape, p.dtype) for name, shape in (("dq", p.q_shape), ("dk", p.k_shape),
                                                                      ("dv", p.v_shape)))
    sums = run.put("sums", np.zeros((p.batch, p.heads, *parts.shape(p.n_q)), p.accumulator))
    inputs = "q", "k", "v", "do", "query_numbers"
    run.launch("mma.backward:make_backward", (tile, spec, not deterministic, parts.by_four), config.BackwardLayout,
               -(-p.n_k // tile.block_n) * p.batch * p.kv_heads * spec.sides,
               (*inputs, None if deterministic else "sums", "dk", "dv", "alibi_slopes"),
               (p.group, 2, *numbers(spec, p)))
    if deterministic:
        assert not sums.any()
        tile = config.choose_dq(spec, limit)
        run.launch("mma.backward_dq:make_dq", (tile, spec), config.DqLayout,
                   -(-p.n_q // tile.block_m) * heads * spec.sides,
                   (*inputs, "dq", "alibi_slopes"), (p.group, min(2, heads), *numbers(spec, p)))
    else:
        groups = sums.size // sums.shape[3]
        run.start("tensor_cores.backward_parts:make_round", (parts, p.dtype), 128, 0, -(-groups // 4), ("sums", "dq"),
                  (p.scale,))
    return o, lse, dq, dk, dv


def test_lse_may_be_left_out():
    inputs = problem(heads=2, n_q=70, n_k=40, d=16, dtype=BFLOAT16)
    (o, _), (right, _) = (both("9.0", *inputs, backward=False, wants_lse=wants_lse) for wants_lse in (False, True))
    assert o.tobytes() == right.tobytes()


@pytest.mark.parametrize("gpu, sizes, options", [
    ("9.0", {"heads": 2, "kv_heads": 1, "n_q": 130, "n_k": 140, "d": 64}, {"causal": True}),
    ("9.0", {"n_q": 70, "n_k": 40, "d": 64}, {"causal": True, "early": 1, "seed": 1}),
    ("12.0", {"n_q": 65, "n_k": 129, "d": 64, "dtype": FLOAT16}, {"causal": "top_left", "deterministic": True}),
    ("8.0", {"batch": 2, "n_q": 33, "n_k": 90, "d": 40, "d_v": 48}, {"window": (20, 9), "early": 1}),
    ("9.0", {"heads": 2, "n_q": 70, "n_k": 140, "d": 64}, {"softcap": 2.0, "alibi_slopes": np.float32([.3, -.1])}),
    ("9.0", {"heads": 1, "n_q": 100, "n_k": 300, "d": 64}, {"alibi_slopes": np.float32([.3])}),
    ("8.0", {"heads": 1, "n_q": 70, "n_k": 200, "d": 64},
     {"alibi_slopes": np.float32([.3]), "causal": True, "deterministic": True}),
    ("9.0", {"n_q": 100, "n_k": 70, "d": 64}, {"causal": True, "sinks": np.float32([.3, -np.inf]), "seed": 2}),
    ("8.0", {"n_q": 1, "n_k": 1, "d": 8}, {"seed": 3}),
    ("9.0", {"heads": 1, "n_q": 70, "n_k": 130, "d": 128}, {"seed": 4}),
    ("12.0", {"heads": 1, "n_q": 70, "n_k": 130, "d": 128}, {"causal": True, "deterministic": True}),
    ("9.0", {"heads": 1, "n_q": 70, "n_k": 70, "d": 128, "d_v": 64}, {"softcap": 2.0, "deterministic": True}),
    ("9.0", {"heads": 1, "n_q": 70, "n_k": 70, "d": 256, "dtype": FLOAT16}, {"early": 1}),
    ("8.0", {"heads": 1, "n_q": 70, "n_k": 70, "d": 192}, {"causal": True}),
    ("12.0", {"heads": 1, "n_q": 40, "n_k": 70, "d": 192, "d_v": 256}, {"deterministic": True})], ids=str)
def test_right_answers(gpu, sizes, options):
    inputs = problem(**{"dtype": BFLOAT16, **sizes})
    answer = both(gpu, *inputs, **options)
    check_answer(answer, *inputs, **{name: x for name, x in options.items()
                                     if name not in ("early", "seed", "deterministic")})


def test_large_scores():
    """Rows whose exponentials would overflow without the maximum, and tiles that bring new ones."""
    do, q, k, v = problem(heads=1, n_q=65, n_k=200, d=64, dtype=BFLOAT16)
    q = (q.astype(np.float32) * 30).astype(BFLOAT16)
    check_answer(both("9.0", do, q, k, v), do, q, k, v)


def o_and_lse(q, k, v, **options):
    """One engine's, as the checks of all engines take it."""
    return both("9.0", q, q, k, v, backward=False, **options)


@pytest.mark.parametrize("dtype, size", [(FLOAT16, 2.0**26), (BFLOAT16, 2.0**100), (FLOAT32, 2.0**30),
                                         (FLOAT64, 2.0**900)], ids=str)
def test_huge_scores(dtype, size):
    check_huge_scores(o_and_lse, dtype, size, 70, 150)


def test_huge_scores_that_nobody_asks_for(monkeypatch):
    """The test of the test."""
    monkeypatch.setattr(steps, "HUGE", steps.HUGE * 2**100)
    monkeypatch.setattr(forward, "make_online_softmax", steps.make_online_softmax.__wrapped__)
    monkeypatch.setattr(forward, "make_forward", forward.make_forward.__wrapped__)
    monkeypatch.setattr(interpreted, "kernel", interpreted.kernel.__wrapped__)
    with pytest.raises(AssertionError):
        check_huge_scores(o_and_lse, FLOAT32, 2.0**40, 70, 150)


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32, FLOAT64], ids=str)
@pytest.mark.parametrize("slope", [1e5, 1e9, -1e9])
def test_steep_slopes(dtype, slope):
    check_steep_slopes(o_and_lse, dtype, slope, 70, 150)


@pytest.mark.parametrize("dtype", [FLOAT16, FLOAT32, FLOAT64], ids=str)
def test_a_steep_slope_after_a_softcap(dtype):
    check_steep_slopes(o_and_lse, dtype, 1e9, 70, 150, softcap=2.0)


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32, FLOAT64], ids=str)
def test_scores_that_grow_by_ulps(dtype):
    check_growth_by_ulps(o_and_lse, dtype, 70, 700)


@pytest.mark.parametrize("table, shape", [
    ("TILES", Tile(2, 1, 16)), ("BACKWARD_TILES", BackwardTile(2, 2, 1)), ("DQ_TILES", DqTile(2, 1, 32, 2))], ids=str)
def test_other_shapes(monkeypatch, table, shape):
    monkeypatch.setattr(config, table, ((256, shape),))
    inputs = problem(heads=1, n_q=50, n_k=70, d=64, dtype=BFLOAT16)
    check_answer(both("9.0", *inputs, causal=True, deterministic=table == "DQ_TILES"), *inputs, causal=True)


def test_a_missing_barrier_is_seen(monkeypatch):
    """The test of the test: without its barriers the forward pass reads what isn't there yet."""
    inputs = problem(heads=1, n_q=65, n_k=200, d=64, dtype=BFLOAT16)
    monkeypatch.setattr(interpreter.Block, "arrive", lambda *args: None)
    with pytest.raises(AssertionError):
        check_answer(both("9.0", *inputs), *inputs)
