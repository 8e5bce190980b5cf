"""The figures of the README and of the course are those of the stored results."""

import re

import numpy as np
import pytest

from bench import readme, words
from bench.course import rungs_16_bit
from bench.readme import BACKWARD, COURSE, FORWARD, LATENCY, figures, main, pages
from bench.traffic import BATCH, D, HEADS, N, tile_rows
from bench.words import ROOT
from numba_flash.cuda import SIMULATOR
from numba_flash.cuda.config import choose
from numba_flash.describe import describe

WHERE = {"date": "2026-01-02", "gpu": "NVIDIA H200, and more", "versions": {"torch": "2.11.0"}, "cudnn": "9.19.0"}
SPEED = [{"dtype": "bfloat16", "d": 64, "n": n, "mask": mask, "hopper TFLOP/s": 400.4, **ratio}
         for n, ratio in ((1024, {"hopper / cudnn": 0.951}), (4096, {})) for mask in ("full", "causal")]
# One of each part, and words that only it brings.
PARTS = {
    "speed": ({"rows": SPEED, "geometric mean": {"bfloat16": 0.951}},
              "| bfloat16 | 64 | full | 400 (0.95) | 400 (-) |"),
    "gqa": ({"rows": SPEED}, "| mask | n 1024 | n 4096 | | --- | --- | --- | | full | 400 (0.95) | 400 (-) |"),
    "options": ({"rows": [{"option": "alibi", "n": 4096, "mask": "full", "hopper TFLOP/s": 500.0, "of plain": 0.8,
                           "flex TFLOP/s": 400.0, "hopper / flex": 1.25},
                          {"option": "softcap", "n": 4096, "mask": "full", "flex not measured": "no compiler",
                           "hopper TFLOP/s": 300.0, "of plain": 0.5}]},
                "| alibi | full | 4096 | 500 | 0.80 | 400 | 1.25 | | softcap | full | 4096 | 300 | 0.50 | - | - |"),
    "matmul": ({"size": 8192, "rows": [{"d": d, "n": 16384, "mask": "full", "matmul TFLOP/s": 780.0, "share": share}
                                       for d, share in ((128, 0.8), (256, 0.95))]}, "80% of that for d 128 and 95%"),
    "error": ({"rows": [{"q factor": factor, "hopper error": ratio * 2e-3, "cudnn error": 2e-3}
                        for factor, ratio in ((1, 0.9), (6, 1.1))]}, "0.900 to 1.100 times cuDNN's"),
    "deterministic": ({"rows": [{"d": 64, "mask": "full", "n": 4096, "torch flash TFLOP/s": 250.0,
                                 "torch flash deterministic TFLOP/s": 240.0,
                                 "hopper deterministic not measured": "its bits don't repeat"}]},
                      "PyTorch flash | PyTorch flash deterministic | | --- | --- | --- | --- | --- | | 64 | full | "
                      "4096 | 250 | 240 | Not measured: hopper deterministic (its bits don't repeat)."),
    "float16": ({"rows": [{"direction": "forward", "shape": "1, 1, 128, 64", "auto us": 60.0, "cudnn us": 40.0}]},
                "A float16 call at (1, 1, 128, 64) keeps the host busy for so many µs (NVIDIA H200, 2026-01-02): "
                "forward auto 60, cuDNN 40."),
    "float32": ({"rows": [{"direction": "backward", "shape": "1, 1, 128, 64", "flash2 us": 70.4}]},
                "backward flash2 70."),
    "device": ({"rows": [{"direction": "forward", "shape": "1, 8, 512, 64", "hopper us": 11.25,
                          "torch flash not measured": "none"}]}, "| forward | 1, 8, 512, 64 | 11.2 |"),
    "cpu": ({"rows": [{"direction": "backward", "shape": "1, 8, 128, 64", "auto us": 99.6}]},
            "| backward | 1, 8, 128, 64 | 100 |"),
    "decode": ({"ceiling": {"bfloat16": 4300.0}, "rows": [{"batch": 1, "heads": 32, "kv_heads": 8, "n": 8192, "d": 128,
                                                           "auto GB/s": 999.6}]}, "| 1, 32, 8, 8192, 128 | 1000 |"),
    "compile": ({"rows": [{"cache": cache, "import s": 1.0, "first call s": taken}
                          for cache, taken in (("empty", 3.5), ("filled", 0.02), ("empty", 4.5))]},
                "3.5 to 4.5 s more than a later one, 0.02 s once"),
}


def words_of(parts, names):
    """The figures of some parts, without their line breaks."""
    text = "\n".join(readme.of_parts(parts, {name: {**WHERE, **PARTS[name][0]} for name in names}))
    assert max(map(len, (line for line in text.splitlines() if not line.startswith("|")))) <= 120
    return " ".join(text.split())


def test_the_readme_has_the_stored_figures():
    assert figures() in (ROOT / "README.md").read_text(encoding="utf-8"), "run python -m bench readme"


@pytest.mark.parametrize("number", range(len(pages()[COURSE])))
def test_the_course_has_the_stored_figures(number):
    assert pages()[COURSE][number] in (ROOT / COURSE).read_text(encoding="utf-8"), "run python -m bench readme"


def test_main_puts_figures_back(tmp_path, monkeypatch):
    monkeypatch.setattr(readme.charts, "main", lambda root: None)
    for page, blocks in pages().items():
        text = stored = (ROOT / page).read_text(encoding="utf-8")
        for block in blocks:
            first, *_, last = block.splitlines()
            text = text.replace(block, f"{first}\nold\n{last}")
        assert text != stored
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / page).write_text(text, encoding="utf-8")
    main(tmp_path)
    assert all((tmp_path / page).read_text(encoding="utf-8") == (ROOT / page).read_text(encoding="utf-8")
               for page in pages())


def test_the_course_shows_all_pictures_and_names_files_that_exist():
    links = set(re.findall(r"\]\(([^)#]+)", (ROOT / COURSE).read_text(encoding="utf-8")))
    folder = (ROOT / COURSE).parent
    assert all((folder / link).exists() for link in links)
    assert {folder / link for link in links if link.endswith(".svg")} == set((folder / "pictures").iterdir())


def test_the_readme_shows_charts_that_exist():
    links = re.findall(r"!\[[^]]*\]\(([^)]+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert links and all((ROOT / link).exists() for link in links)


@pytest.mark.skipif(SIMULATOR, reason="the simulator has tile shapes of its own")
@pytest.mark.parametrize("kernel", ["forward", "dkdv", "dq", "flash1_forward", "flash1_backward"])
def test_the_course_counts_with_the_shapes_that_an_h200_gets(kernel):
    q = np.broadcast_to(np.float32(0), (BATCH, HEADS, N, D))
    tile = choose(kernel, describe("attention", q, q, q).problem, 227 * 1024).tile
    assert tile_rows(kernel) == (tile.block_m, tile.block_n)


CASES = [(parts, name) for parts in (FORWARD, BACKWARD, LATENCY) for name in parts]


@pytest.mark.parametrize("parts, name", CASES, ids=[name for _, name in CASES])
def test_a_part_is_mentioned_if_it_was_measured(parts, name):
    expected = PARTS[name][1]
    assert expected in words_of(parts, [name]) and "2026-01-02" in words_of(parts, [name])
    assert expected in words_of(parts, parts)
    assert expected not in words_of(parts, [other for other in parts if other != name])


def test_a_peer_that_was_not_there_leaves_dashes():
    where = {key: x for key, x in WHERE.items() if key != "cudnn"} | {"versions": {}}
    for name in ("speed", "gqa", "options"):
        rows = [{key: x for key, x in row.items() if "cudnn" not in key and "flex" not in key}
                for row in PARTS[name][0]["rows"]]
        text = FORWARD[name]({**where, "rows": rows, "geometric mean": {}})
        assert "(not there)" in text and "mean" not in text


def test_the_course_shows_mma_once_it_was_measured():
    forward = {"speed": {"rows": [{"dtype": "bfloat16", "n": N, "d": D, "mask": "full", "hopper TFLOP/s": 500.0}]}}
    row = {"direction": "forward", "n": N, "d": D, "mask": "full"}
    assert "| mma, query tiles of 128 rows | 4.4 | 0.1 | 124 | 222.0 |" in rungs_16_bit(
        forward, {"rows": [{**row, "mma TFLOP/s": 222.0}]}, "mma")
    assert "| mma, query tiles of 128 rows | 4.4 | 0.1 | 124 | - |" in rungs_16_bit(forward, {"rows": [row]}, "mma")
    assert "mma" not in rungs_16_bit(forward, {"rows": [row]}, "hopper")


def test_mma_is_shown_by_length_beside_one_peer():
    def row(direction, n, speed, **ratios):
        return {"direction": direction, "d": 64, "n": n, "mask": "full", "mma TFLOP/s": speed,
                "torch flash TFLOP/s": 1.0, **{f"mma / {name}": x for name, x in ratios.items()}}

    rows = [row("forward", 1024, 300.4, **{"torch flash": 2.0, "mma tf32": .4}),
            row("forward", 4096, 400.4, **{"torch flash": .5, "mma tf32": .5}),
            row("backward", 4096, 200.4, **{"torch flash": 1.5, "mma deterministic": 1.2}),
            row("backward", 1024, 100.4)]
    text = " ".join(readme.mma({**WHERE, "rows": rows, "ceiling": {"bfloat16": 700.0}}, "bfloat16").split())
    assert "| forward | 64 | full | 300 (2.00) | 400 (0.50) | | backward | 64 | full | 100 (-) | 200 (1.50) |" in text
    assert "Geometric mean: 1.00 forward, 1.50 backward. (-): PyTorch flash did not run" in text
    assert "means are of the others. With `deterministic=True`, the same bits in every run" in text
    assert "gradients take 1.20 times as long" in text
    assert "is 2.0 to 2.5 times as fast" in text and "`standard`" not in text and "runs at 700" in text


def test_a_product_is_shown_with_its_other_runs(monkeypatch):
    runs = {"a": {**WHERE, "ceiling": {"bfloat16": 806.6, "float16": 900.0}}, "b": {**WHERE, "ceiling": {"float16": 1}},
            "c": WHERE, "d": {**WHERE, "gpu": "another", "ceiling": {"bfloat16": 100.0}}}
    other = {"e": {**WHERE, "ceiling": {"bfloat16": 710.2}}}
    monkeypatch.setattr(words, "read", {"forward": runs, "backward": other, "ladder": {}, "mma": {}}.get)
    text = words_of(FORWARD, ["matmul"])
    assert "runs at 780 TFLOP/s in this run, 710 to 807 in others, as the clock varies; attention at n 16384" in text


def test_what_nobody_measured_yet_has_no_section(monkeypatch):
    kept = {name: readme.read(name) for name in ("cpu", "ladder")}
    monkeypatch.setattr(readme, "read", lambda name: kept.get(name, {}))
    titles = [line for line in figures().splitlines() if line.startswith("### ")]
    assert titles == ["### On a CPU, float32", *(f"### On a GPU, {dtype}" for dtype in kept["ladder"])]


def test_bytes_and_training():
    row = {"direction": "forward", "engine": "flash2", "predicted GB read": 8.72, "GB read": 1.0,
           "counted / predicted": 0.13}
    text = readme.traffic({**WHERE, "rows": [row], "sizes": {"batch": 4, "heads": 32, "n": 4096, "d": 64}}, "float32")
    assert "| forward | flash2 | 8.7 | - | 1.0 | - | - | - | 0.13 |" in text
    rows = [{"engine": "standard", "attention in": "float32", "tokens/s": 1234.4, "of the first": 1.0},
            {"engine": "hopper", "attention in": "float32", "not measured": "no float32"}]
    text = readme.train({**WHERE, "rows": rows, "settings": {"context": 2048}}, "gpu")
    assert "| standard | float32 | 1234 | 1.00 |\n| hopper | float32 | - | - |" in text and "context 2048" in text


def test_rungs_and_memory_show_whoever_was_measured():
    rows = [{"direction": "forward", "d": 64, "n": 4096, "mask": "full", "mma TFLOP/s": 99.96,
             "mma / torch efficient": 2.0, "jax xla not measured": "JAX is not installed"}]
    text = readme.ladder({**WHERE, "rows": rows}, "bfloat16")
    assert "| forward | 64 | full | 100.0 | 2.00 |" in text and "Not measured: JAX (JAX is not installed)." in text
    rows = [{"n": 8, "mma both MiB": 1.0, "x not measured": "y", "cudnn not measured": "y"}]
    text = readme.memory({**WHERE, "heads": 4, "d": 64, "rows": rows}, "float32")
    assert "|  |  | n 8 |\n| --- | --- | --- |\n| mma | both | 1.0 |" in text and "Not measured: x, cuDNN (y)." in text
