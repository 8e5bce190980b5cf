"""What of the Hopper benchmark can be tested without a GPU: what it measures, and that it judges before it times."""

import numpy as np
import pytest

pytest.importorskip("cupy")
from bench import hopper, peers     # noqa: E402
from bench.readme import HOPPER_PARTS       # noqa: E402
from reference.attention import standard_attention      # noqa: E402


def test_every_part_has_its_kernels_and_its_words():
    assert list(hopper.PARTS) == list(hopper.KERNELS) == list(HOPPER_PARTS)
    assert all(part.__doc__ for part in hopper.PARTS.values())


def test_the_shapes_have_their_kernels_compiled_ahead():
    shapes = hopper.speed_shapes()
    assert len(shapes) == len(set(shapes)) == 2 * 9 + 4
    assert {(dtype, d) for dtype, d, _ in shapes} == set(hopper.KERNELS["speed"])


def test_geometric_means_need_all_ratios_of_the_usual_head_dims():
    rows = [{"dtype": "bfloat16", "d": d, "hopper / cudnn": ratio} for d, ratio in ((64, 0.5), (128, 2.0), (96, 9.0))]
    assert hopper.geometric_means(rows) == {"bfloat16": pytest.approx(1)}
    assert hopper.geometric_means([*rows, {"dtype": "bfloat16", "d": 256}]) == {}


def test_only_causal_windows_are_counted():
    for group in hopper.option_groups().values():
        plain, *others = group.values()
        assert set(plain) <= {"causal"}
        for options in others:
            assert options.get("causal") == plain.get("causal") and options.get("window", (0, 0))[1] == 0


@pytest.fixture
def inputs(monkeypatch):
    """Inputs in host memory, with the reference as the engine."""
    monkeypatch.setattr(hopper, "in_float64", lambda x: x.astype(np.float64))
    monkeypatch.setattr(hopper.cp, "asarray", np.asarray)
    monkeypatch.setattr(hopper, "attention", lambda q, k, v, out, kernel, **options: out.__setitem__(
        ..., standard_attention(q, k, v, **options)))
    monkeypatch.setattr(peers, "why_not", lambda: None)
    monkeypatch.setattr(peers, "last_rows", lambda o, rows: o[-1:, -1:, -rows:])
    monkeypatch.setattr(peers, "distance", hopper.distance)
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((2, 4, 200, 8)), *rng.standard_normal((2, 2, 2, 200, 8))
    o = np.empty_like(q)
    return hopper.Inputs("bfloat16", [q, k, v], o, [q, k, v], o)


OPTIONS = [{}, {"causal": True}, {"causal": True, "window": (20, 0)}, {"softcap": 2.0},
           {"alibi_slopes": np.arange(4, dtype=np.float32)}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_last_rows_are_a_problem_of_their_own(inputs, options):
    whole = standard_attention(*inputs.arrays, **options)
    np.testing.assert_allclose(hopper.exact_last_rows(inputs, **options),
                               whole[-1:, -1:, -hopper.CHECKED_ROWS:], rtol=1e-9, atol=1e-12)


def make_right(tensors, **options):
    return lambda: standard_attention(*tensors, **options)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_right_rivals_are_timed(inputs, options):
    row = {}
    assert set(hopper.rivals(row, inputs, "peer", make_right, **options)) == {"hopper", "peer"} and not row


def test_a_wrong_result_is_not_timed(inputs, monkeypatch):
    monkeypatch.setattr(hopper, "attention", lambda *args, out, **options: out.fill(0))
    with pytest.raises(SystemExit, match="hopper is off by"):
        hopper.rivals({}, inputs, "peer", make_right)


def test_rivals_must_agree_everywhere(inputs, monkeypatch):
    def wrong_at_first(q, k, v, out, kernel):
        out[...] = standard_attention(q, k, v)
        out[0, 0, :20] = np.nan

    monkeypatch.setattr(hopper, "attention", wrong_at_first)
    with pytest.raises(SystemExit, match="hopper and peer differ by nan"):
        hopper.rivals({}, inputs, "peer", make_right)


@pytest.mark.parametrize("call, reason", [(lambda: 1 / 0, "division by zero"),
                                          (lambda: np.zeros((2, 4, 200, 8)), "it is off by 1.0")])
def test_a_peer_that_fails_has_no_figure(inputs, call, reason, capsys):
    row = {}
    assert set(hopper.rivals(row, inputs, "peer", lambda tensors: call)) == {"hopper"}
    assert reason in row["peer not measured"] and "NOT MEASURED: peer" in capsys.readouterr().err
