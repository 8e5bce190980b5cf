"""The pictures are those that the code draws, and what they show is true."""

import re
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

matplotlib = pytest.importorskip("matplotlib")

from bench import pictures  # noqa: E402
from bench.pipeline import Barrier, Simulation  # noqa: E402
from numba_flash.cuda import compile  # noqa: E402
from numba_flash.cuda.hopper.config import TILES, Tile  # noqa: E402
from numba_flash.scores import visible  # noqa: E402
from reference.attention import standard_attention  # noqa: E402

needs_kernels = pytest.mark.skipif(compile.import_error is not None, reason=f"no numba-cuda: {compile.import_error}")
SHAPES = [*(tile for _, _, tile in TILES), Tile(128, consumers=1), Tile(128, stages=3, consumers=4, q_stages=2),
          Tile(128, consumers=3, turns=True)]


# ---- the files -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", pictures.PICTURES)
def test_picture_is_what_the_code_draws(name, tmp_path):
    stored = (pictures.FOLDER / f"{name}.svg").read_text(encoding="utf-8")
    version = re.search(r"Matplotlib v([\w.]+)", stored).group(1)
    if version != matplotlib.__version__:
        pytest.skip(f"drawn with Matplotlib {version}; other versions write other files, and this is "
                    f"{matplotlib.__version__}")
    pictures.save(name, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text(encoding="utf-8") == stored, "run python -m bench pictures"


def test_users_settings_do_not_matter(tmp_path):
    with matplotlib.rc_context({"lines.dashed_pattern": [9, 9], "savefig.facecolor": "red", "font.family": "serif"}):
        pictures.save("schedule", tmp_path / "mine.svg")
    pictures.save("schedule", tmp_path / "plain.svg")
    assert (tmp_path / "mine.svg").read_bytes() == (tmp_path / "plain.svg").read_bytes()


def test_main_draws_all(tmp_path):
    pictures.main(tmp_path / "new")
    assert {path.stem for path in (tmp_path / "new").iterdir()} == set(pictures.PICTURES)


# ---- tiles -----------------------------------------------------------------------------------------------------------

def test_the_walk_ends_with_attention():
    *_, last = steps = list(pictures.walk())
    rows = slice(pictures.ROW_TILE * pictures.BLOCK, (pictures.ROW_TILE + 1) * pictures.BLOCK)
    o, lse = standard_attention(*pictures.inputs(), causal=True, return_lse=True)
    np.testing.assert_allclose(last.o / last.l[:, None], o[rows])
    np.testing.assert_allclose(last.m + np.log(last.l), lse[rows])
    assert all(0 < step.alpha.min() < 0.95 for step in steps[1:]), "a dull example: no maximum grows"


def test_kinds_of_tiles():
    block = pictures.BLOCK
    for i, j in product(range(0, pictures.N, block), repeat=2):
        seen = [visible(i + row, j + col, *pictures.CAUSAL) for row, col in product(range(block), repeat=2)]
        assert pictures.kind(i, j) == ("whole" if all(seen) else "masked" if any(seen) else "skipped")


# ---- fragment --------------------------------------------------------------------------------------------------------

def test_a_fragment_has_each_element_once():
    for warps in 1, 4:
        held = pictures.holders(32 * warps, pictures.COLUMNS // 2)
        assert set(held) == set(product(range(16 * warps), range(pictures.COLUMNS)))
        assert len(held) == len(set(held.values())) == 32 * warps * pictures.COLUMNS // 2


def test_a_packed_fragment_is_an_operand():
    for thread, step, register, half in product(range(128), range(3), range(4), range(2)):
        element = 8 * step + 2 * register + half        # `make_pack16` puts neighbours into a register, in order
        assert pictures.operand_place(thread, register, half, step) == pictures.place(thread, element)


@needs_kernels
def test_fragments_are_those_of_the_kernels():
    from numba_flash.cuda.ptx import fragments

    elements = 16
    for thread, element in product(range(128), range(elements)):
        row = fragments.first_row(thread) + 8 * fragments._row(element, elements)
        column = fragments.first_column(thread) + fragments._column(element, elements)
        assert pictures.place(thread, element) == (row, column)


# ---- pipeline --------------------------------------------------------------------------------------------------------

def wrong_reads(simulation):
    """Products that read a place when their tile isn't all there, or is being overwritten."""
    spans = simulation.spans
    wrong = []
    for what, name in ("S", "K"), ("PV", "V"):
        for read in (span for span in spans if span.what == what):
            copies = [span for span in spans if (span.what, span.place) == (name, read.place)]
            at = next(n for n, copy in enumerate(copies) if (copy.turn, copy.j) == (read.turn, read.j))
            if copies[at].stop > read.start or any(later.start < read.stop for later in copies[at + 1:]):
                wrong.append(read)
    return wrong


@pytest.mark.parametrize("tile", SHAPES, ids=lambda tile: f"{tile.consumers}x{tile.block_n}-{tile.stages}")
@pytest.mark.parametrize("tiles, turns", [(1, 1), (1, 4), (2, 3), (3, 2), (5, 3)])
def test_no_tile_is_overwritten_while_it_is_read(tile, tiles, turns):
    simulation = Simulation(tile, tiles, turns)
    spans = simulation.run()
    assert not wrong_reads(simulation)
    for what in "S", "PV", "softmax":
        done = [(span.consumer, span.turn, span.j) for span in spans if span.what == what]
        assert sorted(done) == list(product(range(tile.consumers), range(turns), range(tiles)))
    for span in spans:
        if span.what == "Q" and span.turn >= tile.q_stages and not tile.q_in_registers:
            assert all(read.stop <= span.start for read in spans
                       if (read.what, read.consumer, read.turn) == ("S", span.j, span.turn - tile.q_stages))


@pytest.mark.parametrize("tile", SHAPES, ids=lambda tile: f"{tile.consumers}x{tile.block_n}-{tile.stages}")
def test_rows_do_one_thing_at_a_time(tile):
    busy = {}
    for span in Simulation(tile, 3, 3).run():
        if span.what != "wait":
            busy.setdefault(span.row, []).append((span.start, span.stop))
    for spans in busy.values():
        spans.sort()
        assert all(stop <= start for (_, stop), (start, _) in zip(spans, spans[1:]))


def test_one_place_is_not_enough():
    """A consumer keeps V_j until it knows that V_{j+1} has come."""
    with pytest.raises(RuntimeError, match="everybody waits"):
        Simulation(Tile(128, stages=1), 2, 1).run()


@pytest.mark.parametrize("name", "KV")
def test_a_barrier_that_counts_one_consumer_too_few_is_noticed(name):
    simulation = Simulation(Tile(128, q_in_registers=True), 5, 3)
    simulation.empty[name] = [Barrier(1) for _ in simulation.empty[name]]
    try:
        simulation.run()
    except RuntimeError:
        return
    assert wrong_reads(simulation)


def test_a_barrier_that_counts_one_too_many_stops_everybody():
    simulation = Simulation(Tile(128, q_in_registers=True), 5, 3)
    simulation.empty["K"] = [Barrier(3) for _ in simulation.empty["K"]]
    with pytest.raises(RuntimeError, match="everybody waits: K warp"):
        simulation.run()


# ---- schedule --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("reverse", [True, False])
def test_each_query_tile_is_taken_once(reverse):
    taken = [(tile, head) for tiles in pictures.schedule(reverse).values() for tile, head, _ in tiles]
    assert sorted(taken) == list(product(range(pictures.ROW_TILES), range(pictures.HEADS)))


def test_every_other_round_backwards_shares_better():
    ends, others = ([sum(length for *_, length in tiles) for tiles in pictures.schedule(reverse).values()]
                    for reverse in (True, False))
    assert max(ends) - min(ends) <= 1 and max(ends) < max(others)


@needs_kernels
def test_the_schedule_is_that_of_the_kernel(monkeypatch):
    from numba_flash.cuda.tensor_cores import schedule

    for name in "int32", "uint32", "uniform":
        monkeypatch.setattr(schedule, name, int)
    monkeypatch.setattr(schedule, "divide", divmod)
    monkeypatch.setattr(schedule, "tile_and_head", schedule.tile_and_head.py_func)
    for block, tiles in pictures.schedule().items():
        x = SimpleNamespace(x=block)
        monkeypatch.setattr(schedule, "cuda", SimpleNamespace(blockIdx=x, gridDim=SimpleNamespace(x=pictures.BLOCKS)))
        for turn, (tile, head, length) in enumerate(tiles):
            number = schedule.tile_number.py_func(turn)
            place = schedule.tile_place.py_func(number, 128, pictures.ROW_TILES, pictures.HEADS, pictures.TOGETHER)
            assert place == (128 * tile, head)
            monkeypatch.setattr(schedule, "seen_keys", pictures.seen_keys)
            n = 128 * pictures.ROW_TILES
            assert schedule.key_tiles.py_func(place[0], 128, 128, (n, n, 0, n, 0)) == (0, length)
