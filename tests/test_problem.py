"""What a Problem must stay, whoever keeps it; and leaving out the keys that nobody sees changes nothing."""

import pickle
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from helpers import Engine, check_answer, normal, problem

import numba_flash as nf
from numba_flash import cpu
from numba_flash.cuda.tensor_cores.spec import Spec
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


def test_a_problem_of_another_process_is_the_same():
    """Hashes of words differ from process to process, so a kept hash must not come along."""
    code = """import pickle, sys, numpy as np
from numba_flash.describe import describe
x = describe("attention", *[np.ones((1, 1, 3, 4))] * 3, softcap=2.0).problem
hash(x)
sys.stdout.buffer.write(pickle.dumps(x))"""
    x = pickle.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    assert hash(x) == hash(replace(x)) and {x: 1}[replace(x)]


def test_a_shape_that_the_caller_changes_is_his_own():
    do, q, k, v = problem(batch=2, n_q=6)
    o, pullback = nf.attention_vjp(q, k, v)
    right = pullback(do)
    q.shape = 1, 4, 6, 8
    for got, expected in zip(pullback(do), right):
        np.testing.assert_array_equal(got, expected)


def test_dtype_metadata_stays_with_its_owner():
    x = np.ones((1, 1, 3, 4), np.dtype(np.float32, metadata={"owner": "somebody"}))
    nf.attention(x, x, x)
    assert nf.attention(*[np.ones((1, 1, 3, 4), np.float32)] * 3).dtype.metadata is None


def test_a_factor_that_float32_cannot_hold_is_no_factor():
    for scale, hook in (1e-38, True), (0.125, False), (3e38, True), (-1.0, True):
        x = np.ones((1, 1, 3, 64), np.float16)
        assert Spec.of(describe("attention", x, x, x, scale=scale).problem).hook == hook


def test_a_gradient_that_is_a_sum_of_many_may_be_off_by_their_roundings():
    """dbias of a bias that is one number is 0, whatever rounding of o makes of it."""
    do, q, k, v = problem(batch=2, heads=4, n_q=60, d=8, dtype="float16")
    do = (do * np.float16(30)).astype(np.float16)
    bias = np.zeros((), np.float32)
    check_answer(Engine("cpu", "numpy").both(do, q, k, v, need=("bias",), bias=bias), do, q, k, v, need=("bias",),
                 bias=bias)
