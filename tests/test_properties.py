"""Random shapes, strides, dtypes and options (hypothesis), every engine against the oracle."""

import ml_dtypes
import numpy as np
import pytest
from helpers import check_answer, normal
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

STEPS = st.sampled_from([1, 1, 1, 2, -1])


def strided(rng, shape, steps, order, dtype):
    """Random numbers of some shape, with its axes stored in some order and some of them skipped or reversed."""
    stored = normal(rng, *(shape[axis] * abs(steps[axis]) for axis in order), dtype=dtype)
    back = np.argsort(order)
    return stored.transpose(back)[tuple(slice(None, None, step) for step in steps)]


@st.composite
def calls(draw, small):
    """One call: do, q, k, v, dlse, need, options."""
    longest, largest = (9, 6) if small else (90, 40)
    batch, group, kv_heads = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    n_q, n_k = draw(st.integers(1, longest)), draw(st.integers(1, longest))
    d, d_v = draw(st.integers(1, largest)), draw(st.integers(1, largest))
    heads = group * kv_heads
    dtype = draw(st.sampled_from([np.float32, np.float32, np.float64, np.float16, ml_dtypes.bfloat16]))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    do, q, k, v = (
        strided(rng, shape, draw(st.tuples(STEPS, STEPS, STEPS, STEPS)), draw(st.permutations(range(4))), dtype)
        for shape in ((batch, heads, n_q, d_v), (batch, heads, n_q, d), (batch, kv_heads, n_k, d),
                      (batch, kv_heads, n_k, d_v)))

    def broadcast(*shape):
        return tuple(1 if draw(st.booleans()) else size for size in shape)[draw(st.integers(0, 4)):]

    side = st.one_of(st.none(), st.integers(-1, longest))
    options = {"causal": draw(st.sampled_from([False, True, "top_left"])), "window": draw(st.tuples(side, side))}
    if draw(st.booleans()):
        options["scale"] = draw(st.sampled_from([0.1, 1.0, -0.5]))
    if draw(st.integers(0, 3)) == 0:
        options["softcap"] = draw(st.sampled_from([0.5, 5.0]))
    if draw(st.integers(0, 3)) == 0:
        options["alibi_slopes"] = normal(rng, *draw(st.sampled_from([(heads,), (batch, heads)])))
    if draw(st.integers(0, 3)) == 0:
        bias = np.asarray(normal(rng, *broadcast(batch, heads, n_q, n_k)))
        options["bias"] = np.where(rng.random(bias.shape) < 0.1, -np.inf, bias).astype(np.float32)
    if draw(st.integers(0, 3)) == 0:
        options["mask"] = np.asarray(rng.random(broadcast(batch, heads, n_q, n_k)) < 0.7)
    if draw(st.integers(0, 3)) == 0:
        options["sinks"] = normal(rng, heads)
    dlse = normal(rng, batch, heads, n_q) if draw(st.booleans()) else None
    need = tuple(name for name in ("bias", "sinks") if name in options)
    return do, q, k, v, dlse, need, options


def check(engine, data):
    do, q, k, v, dlse, need, options = data.draw(calls(engine.place == "simulator"))
    before = [x.copy() for x in (do, q, k, v)]
    check_answer(engine.both(do, q, k, v, dlse, need, **options), do, q, k, v, dlse, need, **options)
    for x, old in zip((do, q, k, v), before):
        np.testing.assert_array_equal(x, old)


@pytest.mark.parametrize("part", range(4))
def test_random_calls(engine, part):
    """In parts, since on a GPU nearly every call compiles kernels of its own, and parts can run side by side."""
    examples = {"numpy": 40, "simulator": 4, "cupy": 8}[engine.place]
    run = seed(part)(given(st.data())(lambda data: check(engine, data)))
    settings(max_examples=examples, derandomize=False, database=None, suppress_health_check=list(HealthCheck))(run)()
