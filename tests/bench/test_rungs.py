"""The ladder has all engines of the package, and memory-efficient attention is what its name says."""

import numpy as np
import pytest

from bench import rungs
from bench.contest import Inputs, measured
from numba_flash import engines
from reference.attention import memory_efficient_attention
from reference.backward import standard_attention_backward


def test_the_ladder_climbs_to_the_fastest_engine():
    assert list(rungs.ladder()) == ["standard", "memory-efficient", *(name for name in reversed(engines.ON_GPU)
                                                                      if name != "standard")]


def test_a_new_engine_appears_by_itself():
    table = {"newer": "", "hopper": "", "flash2": "", "standard": "", "flash1": ""}
    assert list(rungs.ladder(table)) == ["standard", "memory-efficient", "flash1", "flash2", "hopper", "newer"]


@pytest.mark.parametrize("causal", [False, True])
def test_memory_efficient_attention(causal, monkeypatch):
    monkeypatch.setattr(rungs, "CHUNK", 32)
    inputs = Inputs.of("float32", (1, 4, 70, 8), (1, 2, 70, 8), gpu=False)
    do, q, k, v = inputs.arrays
    o, = rungs.memory_efficient(inputs, False, causal=causal).run()
    np.testing.assert_allclose(o, memory_efficient_attention(q, k, v, causal=causal), rtol=1e-5, atol=1e-6)
    gradients = rungs.memory_efficient(inputs, True, causal=causal).run()
    for x, right in zip(gradients, standard_attention_backward(do, q, k, v, causal=causal)):
        assert x.dtype == q.dtype
        np.testing.assert_allclose(x, right, rtol=1e-4, atol=1e-5)


def test_memory_efficient_attention_refuses_options():
    inputs = Inputs.of("float32", (1, 1, 4, 8), gpu=False)
    row = measured({}, inputs, {"memory-efficient": rungs.memory_efficient}, 1, 1, softcap=1.0)
    assert row.figures["memory-efficient"]["not measured"] == "memory-efficient attention has no softcap here"
