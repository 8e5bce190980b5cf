"""The charts are those of the stored results."""

import json

import pytest

pytest.importorskip("matplotlib")

from bench import charts  # noqa: E402
from bench.__main__ import MEASURED  # noqa: E402
from bench.words import RESULTS, ROOT, read  # noqa: E402

GRID = {"rows": [{"dtype": "bfloat16", "d": 64, "n": n, "mask": "full", "hopper TFLOP/s": 1.0 * n} for n in (1, 2)]}
SAMPLES = {
    "forward": ({"speed": GRID}, [("bfloat16, d 64, full", {"hopper": ([1, 2], [1, 2])})]),
    "backward": ({"gqa": GRID}, [("64 heads on 8, full", {"hopper": ([1, 2], [1, 2])})]),
    "mma": ({"float64": {"rows": [{"direction": "forward", "d": 64, "n": n, "mask": "full", "mma TFLOP/s": 3.0 * n}
                                  for n in (1, 2)]}},
            [("forward, float64, d 64", {"mma": (["1 full", "2 full"], [3, 6])})]),
    "ladder": ({"float32": {"rows": [{"direction": "forward", "d": 64, "mask": "full", "mma TFLOP/s": 3.0,
                                      "mma / x": 2.0}]}},
               [("forward, float32", {"mma": (["d 64 full"], [3])})]),
    "memory": ({"cpu": {"heads": 2, "d": 8, "rows": [{"n": n, "cpu both MiB": 0.0, "x y not measured": "z"}
                                                     for n in (1, 2)]}},
               [("both, cpu, 2 heads of 8", {"cpu": ([1, 2], [0.01, 0.01])})]),
    "traffic": ({"float32": {"rows": [{"direction": "forward", "engine": "flash2", "GB read": 1.0, "GB written": 2.0,
                                       "predicted GB read": 3.0}]}},
                [("forward, float32", {"counted at HBM": (["flash2"], [3])})]),
    "latency": ({"compile": {"rows": []},
                 "decode": {"rows": [{"batch": 1, "heads": 2, "kv_heads": 1, "n": 8, "auto GB/s": 5.0}]},
                 "cpu": {"rows": [{"direction": "forward", "shape": "1, 1", "auto us": 7.0}]}},
                [("decoding", {"auto": (["1, 2, 1, 8"], [5])}),
                 ("a small call on a CPU", {"auto": (["forward 1, 1"], [7])})]),
    "train": ({"gpu": {"settings": {"context": 8}, "rows": [
        {"engine": "cpu", "attention in": "float32", "tokens/s": 9.0}, {"engine": "hopper", "not measured": "x"}]}},
              [("training, gpu, context 8", {"attention in float32": (["cpu"], [9])})]),
    "cpu": ({"speed": {"rows": [{"direction": "forward", "n": 8, "d": 4, "mask": "full", "torch GFLOP/s": 1.0}]}},
            [("forward", {"torch": (["n 8 d 4 full"], [1])})]),
}


def test_every_benchmark_has_a_chart():
    assert set(charts.PANELS) == set(MEASURED) == set(SAMPLES)


@pytest.mark.parametrize("name", SAMPLES)
def test_a_chart_shows_the_figures(name, tmp_path):
    result, expected = SAMPLES[name]
    panels = charts.PANELS[name](result)
    assert [(panel.title, {name: (list(places), list(values)) for name, (places, values) in panel.series.items()})
            for panel in panels] == expected
    (tmp_path / "x.json").write_text(json.dumps(result))
    charts.save(name, tmp_path / "x.json", tmp_path / "x.png")
    assert charts.stored_digest(tmp_path / "x.png") == charts.digest(panels)
    axes = charts.draw(panels).axes
    assert [x.get_title() for x in axes] == [title for title, _ in expected]
    bars = sorted(bar.get_height() for x in axes for bar in x.patches)
    curves = [list(line.get_ydata()) for x in axes for line in x.lines]
    values = [values for _, series in expected for _, values in series.values()]
    assert bars == sorted(sum(values, [])) or curves == values


@pytest.mark.parametrize("name", charts.stored())
def test_the_stored_chart_is_that_of_the_stored_figures(name):
    path = ROOT / RESULTS / f"{name}.png"
    assert charts.stored_digest(path) == charts.digest(charts.PANELS[name](read(name))), "run python -m bench readme"


def test_main_draws_all(tmp_path):
    (tmp_path / RESULTS).mkdir(parents=True)
    charts.main(tmp_path)
    assert {path.stem for path in (tmp_path / RESULTS).iterdir()} == set(charts.stored())
