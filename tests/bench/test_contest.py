"""Nothing is timed before it is right; who fails has no figures, and the others go on."""

import numpy as np
import pytest

from bench import contest
from bench.contest import Call, Inputs, Row, engine, exact, measured, prepare, take_turns
from reference.attention import standard_attention
from reference.backward import standard_attention_backward

OPTIONS = [{}, {"causal": True}, {"causal": True, "window": (20, 0)}, {"softcap": 2.0},
           {"alibi_slopes": np.arange(4, dtype=np.float32)},
           {"alibi_slopes": np.arange(4, dtype=np.float32), "causal": True}]


@pytest.fixture
def inputs(monkeypatch):
    """Grouped heads, and sequences that don't end with a chunk of the exact answer."""
    monkeypatch.setattr(contest, "CHECKED_ROWS", 64)
    return Inputs.of("float32", (2, 4, 150, 8), (2, 2, 150, 8), gpu=False)


def right(inputs, backward, **options):
    """A rival: the reference."""
    do, q, k, v = inputs.arrays
    if backward:
        return Call(lambda: standard_attention_backward(do, q, k, v, **options))
    return Call(lambda: (standard_attention(q, k, v, **options),))


def spoiled(at):
    """A rival that is wrong somewhere."""
    def make(inputs, backward, **options):
        answer = [x.copy() for x in right(inputs, backward, **options).run()]
        answer[-1][at] = np.nan
        return Call(lambda: answer)

    return make


def fails(inputs, backward, **options):
    raise ZeroDivisionError("no such thing\nand more")


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_exact_answer_is_the_oracles_for_the_last_heads(inputs, options, backward):
    answer = exact(inputs, backward, **options)
    oracle = right(inputs, backward, **options).run()
    assert len(answer) == (3 if backward else 1)
    for x, whole in zip(answer, oracle):
        assert x.shape[:2] == (1, 2 if whole.shape[1] == 4 else 1)
        np.testing.assert_allclose(x, contest.last_head(whole, x.shape[1]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("n_q", [1, 70])
def test_the_exact_answer_for_fewer_queries_than_keys(n_q, monkeypatch):
    monkeypatch.setattr(contest, "CHECKED_ROWS", 64)
    inputs = Inputs.of("float32", (1, 4, n_q, 8), (1, 2, 90, 8), gpu=False)
    for options in OPTIONS:
        np.testing.assert_allclose(exact(inputs, False, **options)[0],
                                   right(inputs, False, **options).run()[0][-1:, -2:], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_right_rivals_are_timed(inputs, options, backward):
    rivals = {"cpu": engine("cpu"), "standard": engine("standard"), "reference": right}
    row = measured({"n": 150}, inputs, rivals, 1e9, 2, {"float32": 1000.0}, backward=backward, **options)
    assert list(row.calls) == list(row.seconds) == list(rivals)
    stored = row.stored()
    assert stored["n"] == 150 and stored["cpu error"] < 1e-5
    assert stored["cpu / standard"] == pytest.approx(stored["standard ms"] / stored["cpu ms"])
    assert stored["cpu TFLOP/s"] == pytest.approx(1 / stored["cpu ms"])
    assert stored["cpu of ceiling"] == pytest.approx(stored["cpu TFLOP/s"] / 1000)
    lines = list(row.lines())
    assert [line["by"] for line in lines] == list(rivals) and "cpu / it" not in lines[0] and lines[1]["cpu / it"] > 0
    assert lines[0]["% of ceiling"] == pytest.approx(100 * stored["cpu of ceiling"])


def test_a_wrong_result_is_not_timed(inputs, capsys):
    row = measured({"n": 150}, inputs, {"ours": spoiled(np.s_[-1, -1, 7]), "peer": right}, 1, 1)
    assert list(row.seconds) == ["peer"] and "off by nan" in row.stored()["ours not measured"]
    assert "NOT MEASURED: ours, n 150: it is off by nan" in capsys.readouterr().err
    assert row.ours() == "peer"


def test_a_rival_may_say_how_exact_it_is(inputs):
    """As `precision="tf32"` is not as exact as its dtype."""
    def rough(right_to):
        def make(inputs, backward, **options):
            call = engine("standard", right=right_to, scale=.36)(inputs, backward, **options)
            assert call.right == right_to
            return call

        return make

    row = prepare({}, inputs, {"standard": engine("standard"), "rough": rough(.1), "wrong": rough(None)}, 1)
    assert list(row.calls) == ["standard", "rough"] and "allowed 0.0001" in row.figures["wrong"]["not measured"]


def test_float64_is_held_against_float64():
    inputs = Inputs.of("float64", (1, 2, 20, 64), gpu=False)
    assert inputs.arrays[1].dtype == np.float64
    for backward in (False, True):
        row = prepare({}, inputs, {"cpu": engine("cpu"), "standard": engine("standard")}, 1, backward=backward)
        assert row.figures["cpu"]["error"] < 1e-13 and len(row.calls) == 2


@pytest.mark.parametrize("backward", [False, True])
def test_rivals_must_agree_where_the_exact_answer_does_not_look(inputs, backward):
    row = prepare({}, inputs, {"ours": spoiled(np.s_[0, 0, :9]), "peer": right}, 1, backward=backward)
    assert not row.calls and all("peer and ours differ by nan" in row.figures[name]["not measured"]
                                 for name in ("ours", "peer"))


def test_a_peer_that_fails_has_no_figure(inputs, capsys):
    row = measured({}, inputs, {"ours": right, "peer": fails}, 1, 1, unit="us")
    assert row.stored()["peer not measured"] == "no such thing" and row.stored()["ours us"] > 0
    assert list(row.lines())[1]["not measured"] == "no such thing"


def test_an_engine_that_refuses_says_why(inputs):
    row = measured({}, inputs, {"hopper": engine("hopper"), "cpu": engine("cpu")}, 1, 1)
    assert "arrays are on the CPU" in row.figures["hopper"]["not measured"] and "ms" in row.figures["cpu"]


def test_an_engines_reason_is_enough():
    row = Row({}, 1, "us", "float32", False)
    row.refuse("mma", "kernel='mma' can't do this problem: it has no bias yet; kernel='auto' picks one that can")
    assert row.figures["mma"]["not measured"] == "it has no bias yet"


@pytest.mark.parametrize("times", [1, 2, 4])
def test_who_fails_while_timed_takes_nothing_else_along(inputs, times):
    answers = iter([(standard_attention(*inputs.arrays[1:]),)] * times)
    row = prepare({}, inputs, {"once": lambda *args, **options: Call(lambda: next(answers)), "other": right}, 1)
    take_turns([row], 3)
    assert "while timing" in row.figures["once"]["not measured"] and list(row.seconds) == ["other"]


def test_rows_take_turns_together_with_their_own_counts(inputs):
    rows = [prepare({"i": i}, inputs, {"cpu": engine("cpu")}, 10.0**i, unit="GFLOP/s") for i in range(2)]
    take_turns(rows, 1, clock=lambda run: 0.5)
    assert [row.stored()["cpu GFLOP/s"] for row in rows] == [pytest.approx(2e-9), pytest.approx(2e-8)]


def test_a_call_brings_its_context_and_its_clock(inputs):
    entered = []

    class Context:
        def __enter__(self):
            entered.append("in")

        def __exit__(self, *_):
            entered.append("out")

    row = Row({}, 1, "us", "float32", False, {"x": Call(lambda: None, Context, clock=lambda run: 2.0)}, {"x": {}})
    take_turns([row], 1)
    assert row.figures["x"]["us"] == 2e6 and entered == ["in", "out"] * 2


def test_memory_is_left_full_of_nan(inputs):
    contest.leave_nan(inputs)
    assert all(np.isfinite(x).all() for x in inputs.arrays)
