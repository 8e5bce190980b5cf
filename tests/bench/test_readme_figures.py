"""The figures of the README and of the syllabus are those of the stored results."""

import re

import numpy as np
import pytest

from bench.readme import (BATCH, D, HEADS, HOPPER_PARTS, N, ROOT, SYLLABUS, figures, hopper_figures, main, pages,
                          tile_rows)
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
    "error": ({"rows": [{"q factor": factor, "hopper error": 2e-3, "cudnn error": 2e-3, "hopper / cudnn": ratio}
                        for factor, ratio in ((1, 0.9), (6, 1.1))]}, "0.900 to 1.100 times cuDNN's"),
    "host": ({"rows": [{"call": "numba_flash auto", "us": 60.0}, {"call": "numba_flash hopper", "us": 50.0},
                       {"call": "torch cudnn", "us": 40.0}]}, "PyTorch's for 40 µs by cuDNN"),
    "compile": ({"rows": [{"cache": cache, "import s": 1.0, "first call s": taken}
                          for cache, taken in (("empty", 3.5), ("filled", 0.02), ("empty", 4.5))]},
                "3.5 to 4.5 s more than a later one, 0.02 s once"),
    "memory": ({"rows": [{"n": 16384, "bytes": 0}]}, "takes no bytes"),
}


def words_of(names):
    """The figures of some parts, without their line breaks."""
    text = hopper_figures({name: {**WHERE, **PARTS[name][0]} for name in names})
    assert max(map(len, text.splitlines())) <= 120
    return " ".join(text.split())


def test_the_readme_has_the_stored_figures():
    assert figures() in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("number", range(len(pages()[SYLLABUS])))
def test_the_syllabus_has_the_stored_figures(number):
    assert pages()[SYLLABUS][number] in (ROOT / SYLLABUS).read_text(encoding="utf-8"), "run python -m bench readme"


def test_main_puts_figures_back(tmp_path):
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


def test_the_syllabus_shows_all_pictures_and_names_files_that_exist():
    links = set(re.findall(r"\]\(([^)#]+)", (ROOT / SYLLABUS).read_text(encoding="utf-8")))
    folder = (ROOT / SYLLABUS).parent
    assert all((folder / link).exists() for link in links)
    assert {folder / link for link in links if link.endswith(".svg")} == set((folder / "pictures").iterdir())


@pytest.mark.skipif(SIMULATOR, reason="the simulator has tile shapes of its own")
@pytest.mark.parametrize("kernel", ["forward", "dkdv", "dq", "flash1_forward", "flash1_backward"])
def test_the_syllabus_counts_with_the_shapes_that_an_h200_gets(kernel):
    q = np.broadcast_to(np.float32(0), (BATCH, HEADS, N, D))
    tile = choose(kernel, describe("attention", q, q, q).problem, 227 * 1024).tile
    assert tile_rows(kernel) == (tile.block_m, tile.block_n)


@pytest.mark.parametrize("name", HOPPER_PARTS)
def test_a_part_of_hopper_is_mentioned_if_it_was_measured(name):
    words = PARTS[name][1]
    assert words in words_of([name]) and "2026-01-02" in words_of([name])
    assert words in words_of(PARTS)
    assert words not in words_of([other for other in PARTS if other != name])


def test_a_peer_that_was_not_there_leaves_dashes():
    where = {key: x for key, x in WHERE.items() if key != "cudnn"} | {"versions": {}}
    for name in ("speed", "gqa", "options"):
        rows = [{key: x for key, x in row.items() if "cudnn" not in key and "flex" not in key}
                for row in PARTS[name][0]["rows"]]
        text = hopper_figures({name: {**where, "rows": rows, "geometric mean": {}}})
        assert "(not there)" in text and "mean" not in text
