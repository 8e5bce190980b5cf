"""Operation counts and timing in turn."""

import pytest

from bench import measure
from bench.measure import flops, in_turn
from numba_flash.scores import visible


@pytest.mark.parametrize("n_q, n_k", [(1, 1), (4, 4), (3, 7), (7, 3)])
@pytest.mark.parametrize("causal", [False, True])
def test_flops_count_visible_pairs(n_q, n_k, causal):
    open_side = n_q + n_k
    pairs = sum(visible(i, j, n_k - n_q, open_side, 0 if causal else open_side)
                for i in range(n_q) for j in range(n_k))
    if causal:
        pairs -= min(n_q, n_k) / 2                           # by convention half of the diagonal
    assert flops(2, 3, n_q, n_k, 8, 5, causal=causal) == 2 * 3 * pairs * 2 * (8 + 5)
    assert flops(2, 3, n_q, n_k, 8, 5, causal=causal, backward=True) == 2 * 3 * pairs * 2 * (3 * 8 + 2 * 5)


@pytest.mark.parametrize("n_q, n_k", [(1, 1), (5, 5), (3, 7), (7, 3)])
@pytest.mark.parametrize("left", [0, 1, 2, 4, 100])
def test_flops_count_the_keys_of_a_window(n_q, n_k, left):
    pairs = sum(visible(i, j, n_k - n_q, left, 0) for i in range(n_q) for j in range(n_k)) - min(n_q, n_k) / 2
    assert flops(2, 3, n_q, n_k, 8, causal=True, left=left) == 2 * 3 * pairs * 4 * 8


def test_flops_by_convention():
    assert flops(1, 8, 1024, 1024, 64) == 4 * 8 * 1024**2 * 64
    assert flops(1, 8, 1024, 1024, 64, causal=True) == flops(1, 8, 1024, 1024, 64) / 2
    assert flops(1, 8, 1024, 1024, 64, backward=True) == 2.5 * flops(1, 8, 1024, 1024, 64)


def test_in_turn_rotates_and_takes_medians():
    order, clock = [], {"a": iter([3, 1, 2]), "b": iter([9, 9, 8])}

    def seconds_of(call):
        call()
        return next(clock[order[-1]])

    medians = in_turn({name: lambda name=name: order.append(name) for name in "ab"}, seconds_of, 3)
    assert medians == {"a": 2, "b": 9} and order == list("ab" + "ab" + "ba" + "ab")


def test_nobody_in_turn():
    assert in_turn({}, float, 3) == {}


def test_in_turn_warms_up_as_it_is_told():
    warmed = []
    assert in_turn({"a": 3}, float, 1, warmed.append) == {"a": 3} and warmed == [3]


@pytest.mark.parametrize("seconds, done", [(0.04, [1, "ahead", 3]), (1e-3, [1, "ahead", 10]), (1e-6, [1, "ahead", 50]),
                                           (0.2, [1])])
def test_batches_are_long_enough(seconds, done, monkeypatch):
    calls = []
    monkeypatch.setattr(measure, "event_seconds", lambda call, repeats=1: calls.append(repeats) or seconds)
    assert measure.batch_seconds(lambda: calls.append("ahead")) == seconds and calls == done
