"""Leaving out the keys that nobody sees changes nothing."""

import numpy as np
import pytest
from helpers import normal, problem

from numba_flash import cpu
from numba_flash.describe import describe
from numba_flash.problem import without_unseen_keys


@pytest.mark.parametrize("n_q, n_k", [(5, 9), (9, 5), (1, 7), (7, 1)])
@pytest.mark.parametrize("options", [
    {}, {"causal": True}, {"causal": "top_left"}, {"window": (1, 1)}, {"window": (0, 0)}, {"window": (None, 0)},
    {"causal": "top_left", "window": (2, None)}, {"window": (1, 0), "causal": "top_left"}], ids=str)
def test_the_answer_is_the_same(n_q, n_k, options):
    _, q, k, v = problem(n_q=n_q, n_k=n_k)
    rng = np.random.default_rng(0)
    call = describe("attention", q, k, v, bias=normal(rng, n_q, n_k), mask=rng.random((n_q, n_k)) < 0.8,
                    alibi_slopes=normal(rng, 2), sinks=normal(rng, 2), **options)
    answers = []
    for described, operands in ((call.problem, call.operands), without_unseen_keys(call.problem, call.operands)):
        o, lse = np.full(described.o_shape, np.nan, np.float32), np.full(described.lse_shape, np.nan, np.float32)
        cpu.forward(described, operands, o, lse)
        answers.append((o, lse))
    for x, y in zip(*answers):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)


def test_keys_that_nobody_sees_are_left_out():
    _, q, k, v = problem(n_q=3, n_k=9)
    trimmed, operands = without_unseen_keys(*(lambda c: (c.problem, c.operands))(
        describe("attention", q, k, v, causal="top_left", window=(1, None))))
    assert trimmed.n_k == 3 and operands.k.shape[2] == operands.v.shape[2] == 3
    trimmed, operands = without_unseen_keys(*(lambda c: (c.problem, c.operands))(
        describe("attention", q, k, v, window=(1, 0))))
    assert trimmed.n_k == 4 and np.shares_memory(operands.k, k[:, :, 5:])
