"""Each NAME of ``python -m bench`` exists, and says in words what can't be measured here."""

import json
from importlib import import_module

import pytest

from bench import __main__ as command
from bench import peers
from bench.contest import Inputs, Row, engine, measured
from bench.parts import Part, choose, run
from numba_flash.check import gpu_trouble

needs_no_gpu = pytest.mark.skipif(gpu_trouble() is None, reason="there is a GPU")
PARTS = {"fast": Part(lambda rounds: {}), "slow": Part(lambda rounds: {}, slow=True),
         "cpu": Part(lambda rounds: {}, gpu=False)}


@pytest.mark.parametrize("name", command.MEASURED)
def test_each_name_measures_parts_that_its_docstring_lists(name):
    module = import_module(f"bench.{name}")
    assert module.PARTS and f"\n{name} " in command.__doc__
    for part, content in module.PARTS.items():
        assert content.measure.__doc__
        assert len(module.PARTS) == 1 or f"\n`{part}` " in module.__doc__


@pytest.mark.parametrize("name", command.MADE)
def test_each_name_makes_something(name):
    if name == "pictures":
        pytest.importorskip("matplotlib")
    assert callable(import_module(f"bench.{name}").main) and f"\n{name} " in command.__doc__


@needs_no_gpu
@pytest.mark.parametrize("name", ["forward", "backward", "mma", "ladder", "traffic"])
def test_a_missing_gpu_is_said_in_words(name):
    with pytest.raises(SystemExit, match="needs a GPU: CuPy "):
        command.main([name, "--quick"])


def test_quick_stores_nothing_and_says_so(capsys, monkeypatch, tmp_path):
    from bench import cpu

    monkeypatch.setattr(cpu, "PARTS", {"first": Part(measure, gpu=False)})
    monkeypatch.chdir(tmp_path)
    command.main(["cpu", "--quick"])
    err = capsys.readouterr().err
    assert "nothing stored (--quick)" in err and "wrote" not in err and not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [["nothing"], ["readme", "--part", "x"], ["pictures", "--quick"], []])
def test_arguments_that_make_no_sense(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(arguments)
    assert stop.value.code == 2 and "usage: python -m bench" in capsys.readouterr().err


def test_a_part_that_does_not_exist():
    with pytest.raises(SystemExit, match="there is no part warp; the parts are speed"):
        command.main(["cpu", "--part", "warp"])


@pytest.mark.parametrize("wanted, trouble, names", [
    (None, None, ["fast"]), (None, "no GPU", ["cpu"]), (["cpu"], None, ["cpu"]), (["slow"], None, ["slow"]),
    (["cpu", "fast"], "no GPU", ["fast", "cpu"])])
def test_parts_are_those_of_the_machine(wanted, trouble, names):
    assert choose(PARTS, wanted, trouble) == names


def test_nothing_can_be_measured():
    with pytest.raises(SystemExit, match="can't measure fast here, which needs a GPU: no driver"):
        choose({"fast": PARTS["fast"]}, None, "no driver")


def measure(rounds):
    """A title."""
    row = Row({"n": 1}, 2e9, "GFLOP/s", "float32", False, figures={"ours": {}})
    row.enter("ours", 0.5 * rounds)
    return {"rows": [row, {"n": 2}], "more": 3}


def fail(rounds):
    """A title."""
    raise OSError("no such thing")


def test_a_part_that_fails_leaves_the_others(tmp_path, capsys, monkeypatch):
    path = tmp_path / "x.json"
    with pytest.raises(SystemExit, match="not measured: first"):
        run({"first": Part(fail, gpu=False), "second": Part(measure, gpu=False)}, path, rounds=1)
    stored = json.loads(path.read_text())
    assert list(stored) == ["second"] and stored["second"]["rows"] == [
        {"n": 1, "ours ms": 500.0, "ours GFLOP/s": 4.0}, {"n": 2}]
    assert stored["second"]["more"] == 3 and {"commit", "took_s", "versions"} <= set(stored["second"])
    out, err = capsys.readouterr()
    assert "NOT MEASURED: first: OSError: no such thing" in err and "second: A title." in out
    assert "ours" in out and "more: 3" in out and "error" not in out


@needs_no_gpu
def test_parts_for_the_gpu_are_left_out_with_words(tmp_path, capsys):
    with pytest.raises(SystemExit, match="not measured: a"):
        run({"a": Part(measure), "b": Part(measure, gpu=False)}, tmp_path / "x.json", ["a", "b"])
    assert "NOT MEASURED: a needs a GPU: CuPy " in capsys.readouterr().err
    assert list(json.loads((tmp_path / "x.json").read_text())) == ["b"]


def test_measuring_draws_a_chart(tmp_path, monkeypatch):
    charts = pytest.importorskip("bench.charts")
    monkeypatch.setitem(charts.PANELS, "cpu", lambda result: [
        charts.Panel("a", "GFLOP/s", series={"ours": (["x"], [result["speed"]["rows"][0]["ours GFLOP/s"]])})])
    monkeypatch.setattr(import_module("bench.cpu"), "PARTS", {"speed": Part(measure, gpu=False)})
    pytest.importorskip("matplotlib")
    command.main(["cpu", "--out", str(tmp_path / "mine.json")])
    assert charts.stored_digest(tmp_path / "mine.png")


def test_a_peer_that_is_missing_says_so(monkeypatch):
    def no_torch():
        raise peers.Missing("PyTorch is not installed (no module)")

    monkeypatch.setattr(peers, "import_torch", no_torch)
    assert peers.why_not() == "PyTorch is not installed (no module)" and peers.versions() == {}
    inputs = Inputs.of("float32", (1, 1, 4, 8), gpu=False)
    row = measured({}, inputs, {"cpu": engine("cpu"), "cudnn": peers.sdpa("cudnn"), "flex": peers.flex}, 1, 1)
    assert list(row.seconds) == ["cpu"]
    assert all("not installed" in row.figures[name]["not measured"] for name in ("cudnn", "flex"))


def test_a_peer_refuses_options_that_it_has_not():
    with pytest.raises(peers.Missing, match="it has no softcap"):
        peers.sdpa("cudnn")(None, False, softcap=1.0)
    with pytest.raises(peers.Missing, match="it has no window"):
        peers.jax_attention("xla")(None, False, window=(1, 1))
