"""The kernels of `hopper`, their PTX interpreted on a machine without a GPU, against the oracle.

Answers must be right whenever copies and products happen, and whichever warp goes on: see `interpreter_hopper`.
"""

from importlib import import_module
from pathlib import Path

import interpreted
import ml_dtypes
import numpy as np
import pytest
from helpers import check_answer, check_growth_by_ulps, check_huge_scores, check_steep_slopes, growing, problem
from interpreted import Run
from interpreter_hopper import HopperBlock, TensorMap

from numba_flash import attention, attention_backward
from numba_flash.cuda import compile
from numba_flash.cuda.hopper import config
from numba_flash.cuda.tensor_cores.host import THREADS, blocks_for_numbers, lanes_of_query, numbers
from numba_flash.cuda.tensor_cores.spec import Spec
from numba_flash.describe import describe

pytestmark = pytest.mark.skipif(compile.why_no_compiler() is not None, reason=str(compile.why_no_compiler()))
BFLOAT16, FLOAT16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)


class HopperRun(Run):
    """`Run` on a GPU with a few multiprocessors."""

    block_type = HopperBlock

    def map(self, name, x, rows, swizzled=True):
        """A tensor map of what `put` has returned."""
        self.places[name] = TensorMap(x, rows, swizzled),


class Call:
    """One call of the public functions: `hopper.engine` less the driver."""

    def __init__(self, do, q, k, v, early=.5, seed=0, processors=2, deterministic=False, shares=1, keys=0, **options):
        call = describe("attention", q, k, v, **options)
        self.problem, self.processors, self.shares = call.problem, processors, shares
        self.deterministic, self.keys = deterministic, keys         # the tile shape is that for so many keys
        self.run = HopperRun(config.TARGET, early, seed)
        self.there = {name: self.run.put(name, x) for name, x in (*call.operands._asdict().items(), ("do", do))
                      if x is not None}

    def maps(self, **rows):
        for name, its_rows in rows.items():
            self.run.map(f"{name}_map", self.there[name], its_rows)
        return [f"{name}_map" for name in rows]

    def forward(self, wants_lse=True):
        """o, lse."""
        p, run = self.problem, self.run
        spec = Spec.of(p)
        tile = config.choose(spec, self.keys)
        heads, tiles_m = p.batch * p.heads, -(-p.n_q // tile.block_m)
        lse_shape = p.lse_shape if wants_lse else (p.batch, p.heads, 0)
        o, lse = run.empty("o", p.o_shape, p.dtype), run.empty("lse", lse_shape, p.accumulator)
        run.launch("hopper.forward:make_forward", (tile, spec), config.Layout, min(tiles_m * heads, self.processors),
                   (*self.maps(q=config.ROWS, k=tile.block_n, v=tile.block_n), "o", "lse", "sinks", "alibi_slopes"),
                   (p.n_k, p.group, tiles_m * heads, tiles_m, min(2, heads), *numbers(spec, p)))
        return o, lse

    def backward(self):
        """dq, dk, dv; after `forward`."""
        p, run = self.problem, self.run
        spec = Spec.of_backward(p)
        tile = config.choose_backward(spec)
        layout = config.BackwardLayout(tile, spec)
        heads, tiles_m = p.batch * p.heads, -(-p.n_q // tile.block_m)
        lanes = lanes_of_query(p.d_v, p.dtype.itemsize)
        its_numbers = run.empty("query_numbers", (p.batch, p.heads, tiles_m, 2 * tile.block_m), p.accumulator)
        run.map("numbers_map", its_numbers.reshape(p.batch, p.heads, -1, config.NUMBERS), layout.number_rows,
                swizzled=False)
        run.start("tensor_cores.backward_parts:make_query_numbers", (THREADS, lanes, tile.block_m, p.dtype, False),
                  THREADS, 0, blocks_for_numbers(heads * tiles_m * tile.block_m, lanes),
                  ("do", "o", "lse", None, "query_numbers"))
        dq, dk, dv = (run.empty(name, shape, p.dtype) for name, shape in (("dq", p.q_shape), ("dk", p.k_shape),
                                                                          ("dv", p.v_shape)))
        targets = {"dq": (dq, layout.dq_parts, p.scale)}
        if self.shares > 1:
            targets |= {"dk": (dk, layout.key_parts[0], p.scale), "dv": (dv, layout.key_parts[1], 1)}
        for name, (x, parts, _) in targets.items():
            sums = run.put(f"{name}_sums", np.zeros((*x.shape[:2], *parts.shape(x.shape[2])), np.float32))
            if name == "dq" and self.deterministic:
                run.put("turns", np.zeros((*sums.shape[:3], 1), np.int32))
        run.launch(f"hopper.{'backward_wide' if tile.wide else 'backward'}:make_backward",
                   (tile, spec, self.deterministic), config.BackwardLayout,
                   -(-p.n_k // tile.block_n) * p.batch * p.kv_heads * self.shares,
                   (*self.maps(q=tile.block_m, k=tile.block_n, v=tile.block_n, do=tile.block_m), "numbers_map",
                    "dq_sums", "turns", "dk", "dv", *(f"{x if x in targets else 'dq'}_sums" for x in ("dk", "dv")),
                    "alibi_slopes"), (p.n_q, p.n_k, p.group, self.shares, 2, *numbers(spec, p)),
                   together=self.processors if self.deterministic else 1)
        for name, (x, parts, scale) in targets.items():
            run.start("tensor_cores.backward_parts:make_round", (parts, p.dtype), 128, 0,
                      np.prod(x.shape[:2]) * parts.shape(x.shape[2])[0], (f"{name}_sums", name), (scale,))
        return dq, dk, dv


def both(*inputs, **options):
    """o, lse, dq, dk, dv."""
    call = Call(*inputs, **options)
    return *call.forward(), *call.backward()


CASES = [
    ({"heads": 2, "n_q": 200, "n_k": 140, "d": 64}, {"causal": True, "early": 0, "processors": 1}),
    ({"heads": 2, "kv_heads": 1, "n_q": 70, "n_k": 140, "d": 16}, {"causal": "top_left", "early": 1}),
    ({"batch": 2, "heads": 1, "n_q": 200, "n_k": 129, "d": 64, "dtype": FLOAT16}, {"window": (100, 9)}),
    ({"heads": 1, "n_q": 130, "n_k": 140, "d": 64},
     {"softcap": 2.0, "alibi_slopes": np.float32([.3]), "causal": True}),
    ({"heads": 1, "n_q": 1, "n_k": 1, "d": 8}, {}),
    ({"heads": 4, "kv_heads": 2, "n_q": 140, "n_k": 150, "d": 64},
     {"causal": True, "deterministic": True, "shares": 2}),
    ({"heads": 1, "n_q": 140, "n_k": 300, "d": 128}, {"early": 0, "processors": 1}),
    ({"heads": 1, "n_q": 200, "n_k": 400, "d": 128}, {"window": (250, 20), "keys": config.MANY}),
    ({"heads": 2, "n_q": 140, "n_k": 200, "d": 96, "d_v": 64}, {"causal": True, "sinks": np.float32([.3, -np.inf])}),
    ({"heads": 2, "n_q": 70, "n_k": 300, "d": 128}, {"window": (70, 0), "deterministic": True, "processors": 3}),
    ({"heads": 2, "n_q": 70, "n_k": 90, "d": 64, "d_v": 128, "dtype": FLOAT16},
     {"alibi_slopes": np.float32([.3, -.1])}),
    ({"heads": 1, "n_q": 130, "n_k": 150, "d": 192}, {"causal": True, "early": 0}),
    ({"heads": 2, "n_q": 100, "n_k": 130, "d": 128, "d_v": 256}, {"causal": True, "deterministic": True}),
    ({"heads": 3, "kv_heads": 1, "n_q": 70, "n_k": 100, "d": 256, "dtype": FLOAT16}, {"early": 1, "shares": 3}),
    ({"heads": 1, "n_q": 100, "n_k": 130, "d": 256, "d_v": 72}, {"softcap": 2.0, "window": (60, 20)}),
    ({"heads": 1, "n_q": 65, "n_k": 130, "d": 144}, {"alibi_slopes": np.float32([-.2]), "softcap": 2.0}),
    ({"heads": 2, "n_q": 140, "n_k": 530, "d": 64}, {"softcap": 30.0, "window": (400, 20)}),
    ({"heads": 2, "kv_heads": 1, "n_q": 70, "n_k": 500, "d": 128},
     {"alibi_slopes": np.float32([.3, .003]), "causal": "top_left"}),
    ({"heads": 2, "n_q": 70, "n_k": 530, "d": 64, "dtype": FLOAT16},
     {"alibi_slopes": np.float32([.03, -.01]), "window": (250, 300)}),
    ({"heads": 1, "n_q": 70, "n_k": 350, "d": 192}, {"alibi_slopes": np.float32([-.01]), "sinks": np.float32([2])}),
    ({"heads": 1, "n_q": 70, "n_k": 390, "d": 128, "dtype": FLOAT16}, {"softcap": 20.0, "scale": -.1}),
]


@pytest.mark.parametrize("sizes, options", CASES, ids=str)
def test_right_answers(sizes, options):
    inputs = problem(**{"dtype": BFLOAT16, **sizes})
    check_answer(both(*inputs, **options), *inputs, **{name: x for name, x in options.items() if name not in (
        "early", "seed", "processors", "deterministic", "shares", "keys")})


def test_lse_may_be_left_out():
    inputs = problem(heads=2, n_q=70, n_k=40, d=16, dtype=BFLOAT16)
    (o, _), (right, _) = Call(*inputs).forward(wants_lse=False), Call(*inputs).forward()
    assert o.tobytes() == right.tobytes()


def test_the_order_of_sums_repeats():
    """Blocks that add to dQ in turn give the same bits whatever the lot says, and the right ones."""
    inputs = problem(heads=1, n_q=130, n_k=300, d=64, dtype=BFLOAT16)
    answers = [both(*inputs, deterministic=True, processors=3, seed=seed) for seed in range(2)]
    check_answer(answers[0], *inputs)
    assert answers[0][2].tobytes() == answers[1][2].tobytes()


@pytest.mark.parametrize("d", [64, 256])
def test_scores_that_grow(d):
    do, q, k, v = problem(heads=1, n_q=100, n_k=300, d=d, dtype=BFLOAT16)
    k = growing(k)
    check_answer(both(do, q, k, v), do, q, k, v)


@pytest.mark.parametrize("scale, softcap", [(.1, 30.0), (-.1, 8.0), (1e-6, 1e-4), (1e-30, 2.0)])
def test_scores_that_grow_under_a_softcap(scale, softcap):
    """Small ones go another way than large ones."""
    do, q, k, v = problem(heads=1, n_q=100, n_k=450, d=128, dtype=BFLOAT16)
    k, options = growing(k), {"scale": scale, "softcap": softcap}
    check_answer(both(do, q, k, v, **options), do, q, k, v, **options)


def o_and_lse(q, k, v, **options):
    """One engine's, as the checks of all engines take it."""
    return Call(q, q, k, v, **options).forward()


@pytest.mark.parametrize("dtype, size", [(FLOAT16, 2.0**26), (BFLOAT16, 2.0**100)], ids=str)
def test_huge_scores(dtype, size):
    check_huge_scores(o_and_lse, dtype, size, 70, 300)


@pytest.mark.parametrize("slope", [1e5, 1e9, 1e30, -1e9])
def test_steep_slopes(slope):
    check_steep_slopes(o_and_lse, BFLOAT16, slope, 140, 300)


def test_a_steep_slope_after_a_softcap():
    check_steep_slopes(o_and_lse, FLOAT16, 1e9, 140, 300, softcap=2.0)


def test_scores_that_grow_by_ulps():
    check_growth_by_ulps(o_and_lse, BFLOAT16, 70, 900)


@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_hidden_keys_may_hold_nan(scale):
    """Keys, under a softcap, where scores share a reciprocal."""
    do, q, k, v = problem(heads=1, n_q=20, n_k=150, d=16, dtype=BFLOAT16)
    k[:, :, 20:] = np.nan
    options = {"causal": "top_left", "softcap": 2.0, "scale": scale}
    o, lse = Call(do, q, k, v, **options).forward()
    right, right_lse = attention(*(x.astype(np.float64) for x in (q, k[:, :, :20], v[:, :, :20])), return_lse=True,
                                 **options)
    np.testing.assert_allclose(o.astype(np.float64), right, rtol=.02, atol=.02)
    np.testing.assert_allclose(lse, right_lse, rtol=1e-4, atol=1e-4)


NEAR = "if may_be_near and all_see and are_near(s, ceiling, scale, cap):"
FAULTS = {
    "under a softcap, large scores are taken for small": ("forward", [(NEAR, "if all_see:")],
                                                          {"softcap": 30.0}),
    "under a softcap, keys past the last are seen": ("forward", [(NEAR, NEAR.replace("and all_see ", ""))],
                                                     {"softcap": 30.0, "scale": .005}),
    "ALiBi's slope has the wrong sign after the queries": ("alibi", [("parts if side > 0 else parts ^ uint32(SIGNS)",
                                                                      "parts")], {"alibi_slopes": np.float32([.01])}),
    "ALiBi's slope is rounded": ("alibi", [("middle if lane == 0", "float32(0) if lane == 0")],
                                 {"alibi_slopes": np.float32([.997])}),
    "ALiBi's columns aren't seen by products": ("alibi", [("            fence_async()\n", "")],
                                                {"alibi_slopes": np.float32([.01])}),
    "K's place is given back before S has read it": ("forward", [(
        """                    s = wait_all_but_one(s)
                    if leader:
                        mbarrier_arrive(shared + k_empty + 8 * next_stage)
""", """                    if leader:
                        mbarrier_arrive(shared + k_empty + 8 * next_stage)
                    s = wait_all_but_one(s)
""")]),
    "and Q's, when its loads have been started": ("forward", [
        ("            return load_q(", """            mbarrier_arrive(shared + (q_empty + 8 * place))
            return load_q("""), ("""        if q_in_registers:
            mbarrier_arrive(shared + q_empty + 8 * place)
""", "        pass\n")]),
    "O isn't multiplied by alpha": ("forward", [("o = scaled(o, alpha)", "pass")]),
    "rows that grow aren't seen": ("forward", [("not may_lag or any_above(m_own, ceiling)", "not may_lag")],
                                   {"scale": 1.0}),
    "nobody waits for V": ("forward", [("wait_for(shared + v_full + 8 * next_stage, next_phase)", "pass")]),
    "dS isn't seen by products": ("backward", [("fence_async()   ", "pass   ")]),
    "dS overwrites what the other consumer reads": ("backward", [("tile.ds_slots)", "2)")]),
    "wide heads: P is written over before it has been read": ("backward_wide", [
        ("wait_for(shared + ds_full, add_phase)           # of", "pass        # of")]),
    "Q's and dO's places are given back too early": ("backward", [
        ("                    dk, dv = wait_all_but_one(dk), wait_all_but_one(dv)\n", ""),
        ("barrier_arrive(TURN + 1", "dk, dv = wait_all_but_one(dk), wait_all_but_one(dv)\n"
         "                    barrier_arrive(TURN + 1")]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(monkeypatch, fault):
    """The test of the test: a kernel with a fault that a GPU might show once in a while, or never."""
    name, changes, *more = FAULTS[fault]
    options = more[0] if more else {}
    kernels = import_module(f"numba_flash.cuda.hopper.{name}")
    source = Path(kernels.__file__).read_text()
    for old, new in changes:
        assert source.count(old) == 1
        source = source.replace(old, new)
    changed = dict(vars(kernels))
    exec(source, changed)
    if name == "alibi":             # a part of that kernel
        name, kernels = "forward", import_module("numba_flash.cuda.hopper.forward")
        monkeypatch.setattr(kernels, "make_slant", changed["make_slant"])
        changed["make_forward"] = kernels.make_forward.__wrapped__
    make = "make_forward" if name == "forward" else "make_backward"
    monkeypatch.setattr(kernels, make, changed[make])
    monkeypatch.setattr(interpreted, "kernel", interpreted.kernel.__wrapped__)
    if name == "forward":           # consumers that take turns meet so often that faults hide
        monkeypatch.setattr(config, "TILES", ((128, 0, config.Tile(128, q_in_registers=True)),))
    sizes = {"forward": {"heads": 1, "n_q": 130, "n_k": 450, "d": 128} if options else
             {"heads": 3, "n_q": 130, "n_k": 300, "d": 128},
             "backward": {"heads": 1, "n_q": 500, "n_k": 100, "d": 64},
             "backward_wide": {"heads": 1, "n_q": 300, "n_k": 64, "d": 192}}[name]
    do, q, k, v = problem(**sizes, dtype=BFLOAT16)
    inputs = do, q, growing(k), v
    call = Call(*inputs, early=.5 if name == "backward_wide" else 0, processors=1, **options)
    with pytest.raises(AssertionError):
        o, lse = call.forward()
        gradients = attention_backward(*inputs, o, lse, **options) if name == "forward" else call.backward()
        check_answer((o, lse, *gradients), *inputs, **options)
