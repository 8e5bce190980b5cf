"""Deliberately broken engines must fail the tests that the real ones pass."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from helpers import normal, problem, worst
from numba_flash import engines

BROKEN = {
    "scale": lambda p: replace(p, scale=p.scale * 1.02),
    "mask one too far right": lambda p: replace(p, right=p.right + 1),
    "mask one too near": lambda p: replace(p, right=p.right - 1),
    "window one too far left": lambda p: replace(p, left=p.left + 1),
    "top left for bottom right": lambda p: replace(p, offset=0),
    "softcap forgotten": lambda p: replace(p, softcap=None),
    "alibi forgotten": lambda p: replace(p, alibi=False),
    "bias forgotten": lambda p: replace(p, bias=False),
    "mask forgotten": lambda p: replace(p, mask=False),
    "sinks forgotten": lambda p: replace(p, sinks=False),
}


def options(n_q, n_k):
    rng = np.random.default_rng(1)
    return {"causal": True, "window": (n_k // 2, None), "softcap": 2.0, "alibi_slopes": normal(rng, 2),
            "bias": normal(rng, n_q, n_k), "mask": rng.random((n_q, n_k)) < 0.8, "sinks": normal(rng, 2)}


def break_engine(monkeypatch, engine, mend):
    """Give the engine another problem than was asked for; an option that it forgets has no operand either."""
    module = engines.load(engine.kernel)

    def broken(real, p, x, *rest):
        p = mend(p)
        operands = {"alibi_slopes": p.alibi, "bias": p.bias, "mask": p.mask, "sinks": p.sinks}
        return real(p, x._replace(**{name: None for name, used in operands.items() if not used}), *rest)

    for name in ("forward", "backward"):
        monkeypatch.setattr(module, name, partial(broken, getattr(module, name)))


def error(engine):
    """The largest of an engine's errors over its limit, with all options at once."""
    n_q, n_k = (5, 9) if engine.place == "simulator" else (30, 70)
    inputs, opts = problem(n_q=n_q, n_k=n_k), options(n_q, n_k)
    return worst(engine.both(*inputs, **opts), *inputs, **opts)[0]


def test_what_is_not_broken_passes(engine):
    assert error(engine) <= 1


@pytest.mark.parametrize("name", BROKEN)
def test_mutant_fails(engine, name, monkeypatch):
    break_engine(monkeypatch, engine, BROKEN[name])
    assert error(engine) > 1


def test_a_missing_tail_fails(engine, monkeypatch):
    inputs = problem(n_q=5, n_k=9)
    module = engines.load(engine.kernel)
    real = module.forward

    def without_last_key(p, x, o, lse):
        real(replace(p, n_k=p.n_k - 1), x._replace(k=x.k[:, :, :-1], v=x.v[:, :, :-1]), o, lse)

    monkeypatch.setattr(module, "forward", without_last_key)
    assert worst(engine.both(*inputs), *inputs)[0] > 1


def test_an_unwritten_element_fails(engine, monkeypatch):
    inputs = problem(n_q=5, n_k=9)
    module = engines.load(engine.kernel)
    real = module.forward
    monkeypatch.setattr(module, "forward", lambda p, x, o, lse: real(p, x, o, lse.copy()))
    assert worst(engine.both(*inputs), *inputs)[0] == np.inf
