"""Pictures of the CUDA kernels for their syllabus, computed and not placed by hand: ``python -m bench pictures``.

``tiles``      K/V tiles walk past a query tile: FlashAttention-2's loop, with its numbers
``fragment``   which lane of a warp holds which element of a matrix, and why P is an operand without a move
``pipeline``   the Hopper kernel's warps over time (see `pipeline`)
``schedule``   which block takes which query tile

The first half of this module computes what is drawn; `tests/bench/test_pictures.py` holds it against the kernels.
"""

from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.patches import Polygon

from numba_flash.cuda.hopper.config import Spec, choose
from numba_flash.problem import BFLOAT16
from numba_flash.scores import seen_keys, shared_keys, visible

from .canvas import (BLUE, GREEN, GREY, INK, ORANGE, PALE, PALE_BLUE, PALE_GREEN, PALE_ORANGE, PALE_PURPLE, PAPER,
                     PURPLE, RC, Canvas)
from .pipeline import COPIED, Simulation

# ---- what is drawn: tiles --------------------------------------------------------------------------------------------

N, BLOCK, D = 16, 4, 2          # queries and keys, rows of a tile, head dim
ROW_TILE = 2                    # the query tile whose walk is shown
CAUSAL = 0, N, 0                # offset, left, right


def inputs():
    """q, k, v of one head, such that some rows' maxima grow with each tile."""
    return np.round(np.random.default_rng(25).standard_normal((3, N, D)) * 1.5, 1)


def kind(i_first, j_first):
    """What `flash2` does with a tile of causal scores: "skipped", "masked" or "whole"."""
    first, stop = seen_keys(i_first, i_first + BLOCK, *CAUSAL, N)
    all_first, all_stop = shared_keys(i_first, i_first + BLOCK, *CAUSAL, N)
    if not first // BLOCK * BLOCK <= j_first < stop:
        return "skipped"
    return "masked" if j_first < all_first or j_first + BLOCK > all_stop else "whole"


class Step(NamedTuple):
    """One K/V tile of the walk: its scores, and what the rows know afterwards."""

    j_first: int
    s: np.ndarray
    alpha: np.ndarray
    m: np.ndarray
    l: np.ndarray
    o: np.ndarray


def walk():
    """The steps of FlashAttention-2 for one query tile."""
    q, k, v = inputs()
    i = np.arange(ROW_TILE * BLOCK, (ROW_TILE + 1) * BLOCK)
    m, l, o = np.full(BLOCK, -np.inf), np.zeros(BLOCK), np.zeros((BLOCK, D))
    for j_first in range(0, N, BLOCK):
        if kind(i[0], j_first) == "skipped":
            continue
        j = np.arange(j_first, j_first + BLOCK)
        s = np.where(np.vectorize(visible)(i[:, None], j, *CAUSAL), q[i] @ k[j].T * D**-0.5, -np.inf)
        m_old, m = m, np.maximum(m, s.max(1))
        alpha, p = np.exp(m_old - m), np.exp(s - m[:, None])
        l, o = alpha * l + p.sum(1), alpha[:, None] * o + p @ v[j]
        yield Step(j_first, s, alpha, m, l, o)


# ---- what is drawn: fragment -----------------------------------------------------------------------------------------

LANES, COLUMNS = 32, 16
LANE = 13                       # the one that is highlighted


def place(thread, element):
    """Row and column of an element of a thread's fragment, by the docstring of `ptx.fragments`."""
    warp, lane = divmod(thread, LANES)
    j, e = divmod(element, 4)
    return 16 * warp + lane // 4 + 8 * (e // 2), 8 * j + 2 * (lane % 4) + e % 2


def operand_place(thread, register, half, step):
    """Row and column of A in wgmma's step of 16 columns: a thread's four registers of two 16-bit numbers.

    "Register Fragments for wgmma.mma_async.m64nNk16" in the ISA: registers 0 and 1 are the left eight columns.
    """
    warp, lane = divmod(thread, LANES)
    right, lower = divmod(register, 2)
    return 16 * warp + lane // 4 + 8 * lower, 16 * step + 8 * right + 2 * (lane % 4) + half


def holders(threads, elements):
    """{(row, column): (thread, element)}."""
    return {place(thread, element): (thread, element) for thread in range(threads) for element in range(elements)}


# ---- what is drawn: pipeline -----------------------------------------------------------------------------------------

PIPELINE_TILES, PIPELINE_TURNS, PIPELINE_STOP = 3, 2, 36
SHAPE = choose(Spec(BFLOAT16, 128, 128), keys=0)


def simulate():
    """The shape for head dim 128: two consumers, two places for K and for V."""
    simulation = Simulation(SHAPE, PIPELINE_TILES, PIPELINE_TURNS)
    simulation.run()
    return simulation


def stays(simulation):
    """When a tile lies in a place: {(name, place): [(turn, j, copy starts, copy ends, everybody has read it)]}."""
    found = {}
    for span in simulation.spans:
        if span.what in COPIED:
            found.setdefault((span.what, span.place), []).append((span.turn, span.j, span.start, span.stop))
    return {(name, at): [(*copy, end) for copy, end in zip(copies, simulation.empty[name][at].ends)]
            for (name, at), copies in found.items()}


# ---- what is drawn: schedule -----------------------------------------------------------------------------------------

BLOCKS, HEADS, TOGETHER, ROW_TILES = 4, 6, 3, N // BLOCK


def tile_number(block, turn, reverse=True):
    """Number of a block's tile of a round, as `tensor_cores.schedule.tile_number`."""
    return turn * BLOCKS + (BLOCKS - 1 - block if reverse and turn % 2 else block)


def tile_place(number):
    """Query tile and head, as `tensor_cores.schedule.tile_place`."""
    section, rest = divmod(number, ROW_TILES * TOGETHER)
    from_last, head = divmod(rest, min(TOGETHER, HEADS - section * TOGETHER))
    return ROW_TILES - 1 - from_last, section * TOGETHER + head


def key_tiles(row_tile):
    """How many K/V tiles a query tile sees."""
    return sum(kind(row_tile * BLOCK, j_first) != "skipped" for j_first in range(0, N, BLOCK))


def schedule(reverse=True):
    """{block: [(query tile, head, K/V tiles)] in the order in which it works}."""
    turns = range(-(-ROW_TILES * HEADS // BLOCKS))
    numbers = {block: [tile_number(block, turn, reverse) for turn in turns] for block in range(BLOCKS)}
    return {block: [(*tile_place(x), key_tiles(tile_place(x)[0])) for x in taken if x < ROW_TILES * HEADS]
            for block, taken in numbers.items()}


# ---- drawing ---------------------------------------------------------------------------------------------------------

def number(x):
    """A number in a cell."""
    return "−∞" if x == -np.inf else f"{round(x, 1) + 0.0:.1f}".replace("-", "−")       # + 0.0: no -0.0


KINDS = {"whole": (PALE_BLUE, None), "masked": (PALE_ORANGE, None), "skipped": (PAPER, "////")}
CELL, STRIP = 0.3, 1.55         # inches: a number's cell, and where the scores begin
STATE, STATE_WIDTH = {"m": 6.65, "α": 7.19, "l": 7.73, "O": 8.27}, 0.46


def draw_tiles():
    """Causal scores of 16 queries and keys in tiles of 4, and the walk of one query tile, step by step."""
    canvas = Canvas(9.6, 9.2)
    _overview(canvas, 0.95, 0.55, 0.095)
    canvas.text(7.69, 2.42, "after the tile, in registers", 9)
    for frame, step in enumerate(walk()):
        _frame(canvas, 2.85 + 1.6 * frame, frame, step)
    y, lse = 2.85 + 1.6 * (frame + 1), step.m + np.log(step.l)
    canvas.paragraph(0.35, y + 0.28, "α = exp(old m − m): where a row's maximum has grown, what it summed before,",
                     "its l and O, is first multiplied by α.",
                     "At the end O is divided by l, once, and goes to global memory with",
                     "lse = m + log l, one number a row, from which the backward pass computes P again.")
    _state(canvas, STATE["m"], y, "lse", lse[:, None])
    _state(canvas, STATE["O"], y, "O / l", step.o / step.l[:, None])
    return canvas.figure


def _overview(canvas, x, y, cell):
    size, right = cell * BLOCK, x + N * cell + 0.45
    for i in range(N // BLOCK):
        for j in range(N // BLOCK):
            face, hatch = KINDS[kind(i * BLOCK, j * BLOCK)]
            canvas.box(x + j * size, y + i * size, size, size, face, edge=GREY, hatch=hatch)
    canvas.axes.add_patch(Polygon([(x, y), (x + N * cell, y + N * cell), (x, y + N * cell)], fill=False,
                                  edgecolor=INK, linewidth=1.2))
    canvas.box(x, y + ROW_TILE * size, N * cell, size, "none", line=2.2, edge=BLUE, zorder=4)
    canvas.text(x + N * cell / 2, y - 0.16, f"{N} keys", 9)
    canvas.text(x - 0.16, y + N * cell / 2, f"{N} queries", 9, rotation=90)
    canvas.text(right, 0.42, f"Causal scores S = Q Kᵀ in tiles of {BLOCK} × {BLOCK}", 12, "left", weight="bold")
    meanings = {"whole": "every query sees every key: no mask", "masked": "on the diagonal: hidden scores become −∞",
                "skipped": "no query sees a key: not loaded, not computed"}
    for row, (name, meaning) in enumerate(meanings.items()):
        face, hatch = KINDS[name]
        canvas.box(right, 0.68 + 0.32 * row, 0.3, 0.22, face, edge=GREY, hatch=hatch)
        canvas.text(right + 0.43, 0.79 + 0.32 * row, meaning, 10, "left")
    canvas.box(right, 1.64, 0.3, 0.22, "none", edge=BLUE, line=2.2)
    canvas.text(right + 0.43, 1.75, "the query tile of one block: below, K and V tiles walk past it", 10, "left")


def _frame(canvas, y, frame, step):
    """One K/V tile at a query tile: its scores, and what the rows know afterwards."""
    size = BLOCK * CELL
    canvas.card(0.35, y, 0.85, size, PALE_GREEN, f"Q tile {ROW_TILE}\nstays", 9)
    for j in range(N // BLOCK):
        x, name = STRIP + j * size, kind(ROW_TILE * BLOCK, j * BLOCK)
        face, hatch = KINDS[name]
        if j * BLOCK == step.j_first:
            canvas.card(x + 0.02, y - 0.34, size - 0.04, 0.27, PALE_GREEN, f"K{j}  V{j}", 9.5)
            if frame:
                canvas.arrow((x - 0.4, y - 0.2), (x - 0.03, y - 0.2), GREEN)
            _scores(canvas, x, y, step.s, face)
        elif name == "skipped":
            canvas.box(x, y, size, size, face, edge=GREY, hatch=hatch)
        else:
            canvas.box(x, y, size, size, edge=GREY, linestyle=(0, (3, 3)))
            canvas.text(x + size / 2, y + size / 2, "gone" if j * BLOCK < step.j_first else "to come", 9, color=GREY)
    for name, values in (("m", step.m[:, None]), ("α", step.alpha[:, None]), ("l", step.l[:, None]), ("O", step.o)):
        _state(canvas, STATE[name], y, name, values)


def _scores(canvas, x, y, s, face):
    for r in range(BLOCK):
        for c in range(BLOCK):
            hidden = s[r, c] == -np.inf
            canvas.box(x + c * CELL, y + r * CELL, CELL, CELL, PALE if hidden else face, number(s[r, c]), 8, edge=GREY,
                       color=GREY if hidden else INK)


def _state(canvas, x, y, name, values):
    canvas.text(x + STATE_WIDTH / 2 * values.shape[1], y - 0.17, name, 10, style="italic")
    for r in range(BLOCK):
        for c in range(values.shape[1]):
            canvas.box(x + STATE_WIDTH * c, y + r * CELL, STATE_WIDTH, CELL, PALE_PURPLE, number(values[r, c]), 9,
                       edge=GREY)


# ---- drawing: fragment -----------------------------------------------------------------------------------------------

WARP_COLOURS = PALE_BLUE, PALE_GREEN, PALE_PURPLE, PALE


def draw_fragment():
    """Which lane holds what of 16 rows, the same for a warpgroup's 64, and one lane's registers."""
    canvas = Canvas(9.6, 7.5)
    _warp(canvas, 0.75, 1.05, 0.265)
    _warpgroup(canvas, 6.2, 1.05, 0.11, 0.06625)
    _registers(canvas, 0.75, 6.05)
    return canvas.figure


def _warp(canvas, x, y, cell):
    held = holders(LANES, COLUMNS // 2)
    quad = range(LANE // 4 * 4, LANE // 4 * 4 + 4)
    canvas.text(x, 0.3, "16 rows of a warp: each cell says which lane holds it", 12, "left", weight="bold")
    for column in range(COLUMNS):
        canvas.text(x + (column + 0.5) * cell, y - 0.12, str(column), 8, color=GREY)
    for (row, column), (lane, element) in held.items():
        at = x + column * cell, y + row * cell
        if lane in quad:
            canvas.box(*at, cell, cell, ORANGE if lane == LANE else PALE_ORANGE, line=0)
        canvas.text(at[0] + cell / 2, at[1] + cell / 2, str(lane), 9, weight="bold" if lane == LANE else "normal")
    for row in range(16):
        canvas.line((x, y + row * cell), (x + COLUMNS * cell, y + row * cell), color=PALE)
        canvas.text(x - 0.1, y + (row + 0.5) * cell, str(row), 8, "right", color=GREY)
    for row in range(0, 16, 8):
        for column in range(0, COLUMNS, 8):
            canvas.box(x + column * cell, y + row * cell, 8 * cell, 8 * cell, "none", line=1.6, zorder=3)
    for column in range(2, COLUMNS, 2):
        canvas.line((x + column * cell, y), (x + column * cell, y + 16 * cell), color=GREY, width=0.6, z=2)
    for j in range(COLUMNS // 8):
        canvas.text(x + (8 * j + 4) * cell, y - 0.37, f"elements {4 * j} to {4 * j + 3}", 9)
    canvas.paragraph(x, y + 16 * cell + 0.22,
                     f"Lane {LANE} has two rows, eight apart, and two neighbours of every eight columns. For a row's",
                     "maximum or sum, each lane folds its own numbers; then the four lanes of a quad, here "
                     f"{quad[0]} to {quad[-1]}, exchange theirs.")


def _warpgroup(canvas, x, y, width, height):
    canvas.text(x, 0.3, "64 rows of a warpgroup", 12, "left", weight="bold")
    canvas.text(x, 0.6, f"lane {LANE} of each warp is marked", 9, "left")
    for (row, column), (thread, _) in holders(4 * LANES, COLUMNS // 2).items():
        if thread % LANES == LANE:
            canvas.box(x + column * width, y + row * height, width, height, ORANGE, line=0.4, zorder=3)
    for warp in range(4):
        canvas.box(x, y + 16 * warp * height, COLUMNS * width, 16 * height, WARP_COLOURS[warp], line=1.2)
        canvas.text(x + COLUMNS * width + 0.1, y + 16 * (warp + 0.5) * height, f"warp {warp}\nrows {16 * warp} to "
                    f"{16 * warp + 15}\nthreads {LANES * warp} to {LANES * warp + LANES - 1}", 9, "left",
                    linespacing=1.4)


def _registers(canvas, x, y):
    """The fragment of one lane, as float32 and packed."""
    width, wide, gap, last = 0.5, 0.86, 0.72, COLUMNS // 2 - 1
    canvas.text(x, y - 0.02, f"Lane {LANE}'s fragment: {last + 1} float32", 10, "left", weight="bold")
    start = x + (last + 1) * width + gap
    canvas.text(start, y - 0.02, "packed: 4 registers of two 16-bit numbers", 10, "left", weight="bold")
    for element in range(last + 1):
        row, column = place(LANE, element)
        canvas.box(x + element * width, y + 0.17, width, 0.34, ORANGE, str(element), 10, bold=True)
        canvas.text(x + (element + 0.5) * width, y + 0.64, f"{row}, {column}", 8.5)
    canvas.text(x - 0.08, y + 0.64, "row,\ncolumn", 7, "right", color=GREY)
    canvas.arrow((x + (last + 1) * width + 0.1, y + 0.34), (start - 0.1, y + 0.34))
    for register in range(4):
        places = [operand_place(LANE, register, half, 0) for half in range(2)]
        elements = " ".join(str(element) for element in range(last + 1) if place(LANE, element) in places)
        canvas.box(start + register * wide, y + 0.17, wide, 0.34, PALE_ORANGE, elements, 10, bold=True)
        (row, left), (_, right) = places
        canvas.text(start + (register + 0.5) * wide, y + 0.64, f"{row}, {left}–{right}", 8.5)
    canvas.paragraph(x, y + 1.02,
                     "In just this order wgmma takes a first operand from registers. What S = Q Kᵀ left in a thread,",
                     "made P and packed, is the first operand of O += P V for these 16 keys: nothing has to move.")


# ---- drawing: pipeline -----------------------------------------------------------------------------------------------

CONSUMER_COLOURS = (BLUE, PALE_BLUE), (ORANGE, PALE_ORANGE)
ROWS = {"Q warp": 0.85, "K warp": 1.2, "V warp": 1.55, ("K", 0): 2.3, ("K", 1): 2.65, ("V", 0): 3.0, ("V", 1): 3.35,
        "tensor cores": 4.1, "consumer 0": 4.85, "consumer 1": 5.2}
BAR, ORIGIN, UNIT = 0.28, 1.55, 0.219       # height, left end and scale of the time axis in inches


def draw_pipeline():
    """Warps, places in shared memory and tensor cores over time."""
    canvas, simulation = Canvas(9.6, 6.5), simulate()
    _pipeline_rows(canvas)
    for span in simulation.spans:
        if span.start < PIPELINE_STOP:
            _draw_span(canvas, span)
    for (name, at), found in stays(simulation).items():
        for turn, j, start, ready, end in found:
            if name != "Q" and start < PIPELINE_STOP:
                _bar(canvas, (name, at), start, ready, PAPER, hatch="/////")
                _bar(canvas, (name, at), ready, end, PALE_GREEN, f"{name}{j}{PRIMES[turn]}")
    _arrow_of_k_empty(canvas, simulation)
    return canvas.figure


PRIMES = "", "′"


def _at(time):
    return ORIGIN + UNIT * min(time, PIPELINE_STOP)


def _bar(canvas, row, start, stop, face, words="", color=INK, size=8, **options):
    if start < PIPELINE_STOP:
        words = words if min(stop, PIPELINE_STOP) - start > 0.8 else ""
        canvas.box(_at(start), ROWS[row] - BAR / 2, _at(stop) - _at(start), BAR, face, words, size, color=color,
                   zorder=2, **options)


def _draw_span(canvas, span):
    label = f"{span.j}{PRIMES[span.turn]}" if span.turn >= 0 else ""
    if span.what == "wait":
        canvas.line((_at(span.start), ROWS[span.row]), (_at(span.stop), ROWS[span.row]), color=GREY, width=1.2,
                    style=(0, (1, 1.5)))
    elif span.what in COPIED:
        words = f"Q{PRIMES[span.turn]}" if span.what == "Q" else f"{span.what}{label}"
        _bar(canvas, span.row, span.start, span.stop, PALE_GREEN, words)
    elif span.row == "tensor cores":
        words = f"S{label}" if span.what == "S" else f"P{label}V{label}"
        face = CONSUMER_COLOURS[span.consumer][span.what == "PV"]
        white = span.what == "S" and span.consumer == 0
        _bar(canvas, span.row, span.start, span.stop, face, words, PAPER if white else INK, 7.5)
    else:
        words = f"softmax {label}" if span.what == "softmax" else span.what
        _bar(canvas, span.row, span.start, span.stop, CONSUMER_COLOURS[span.consumer][1], words, size=7.5)


def _pipeline_rows(canvas):
    canvas.text(0.2, 0.3, "The Hopper forward kernel over time", 12, "left", weight="bold")
    canvas.text(9.45, 0.3, f"{SHAPE.consumers} consumers, {SHAPE.stages} places for K and for V; ′ the next query tile",
                9.5, "right")
    for words, x, y in (("producer: its copies", ORIGIN, 0.58),
                        ("shared memory: which tile lies where (hatched: on its way)", ORIGIN + 3.05, 2.02),
                        ("products, which run while their threads go on", ORIGIN, 3.82),
                        ("consumers' threads", ORIGIN, 4.57)):
        canvas.text(x, y, words, 9, "left", style="italic")
    for row, y in ROWS.items():
        canvas.text(ORIGIN - 0.12, y, row if isinstance(row, str) else f"{row[0]}, place {row[1]}", 9.5, "right")
    canvas.line((ORIGIN, 5.62), (_at(PIPELINE_STOP), 5.62))
    canvas.arrow((_at(PIPELINE_STOP) - 0.2, 5.62), (_at(PIPELINE_STOP), 5.62))
    canvas.text(ORIGIN, 5.8, "time", 9, "left")
    canvas.paragraph(0.2, 6.1, "Dotted: waiting. Blue and orange tell the consumers apart; of products, S is dark and "
                     "O += P V pale.", "The order follows from the kernel's barriers; the durations are made up.")


def _arrow_of_k_empty(canvas, simulation):
    """From where the first K tile is read to the copy that may now overwrite it."""
    end = stays(simulation)["K", 0][0][-1]
    canvas.arrow((_at(end), ROWS["K", 0] - BAR / 2), (_at(end), ROWS["K warp"] + BAR / 2), PURPLE)
    canvas.text(_at(end) + 0.08, 2.02, "k_empty: both have read K0", 8.5, "left")


# ---- drawing: schedule -----------------------------------------------------------------------------------------------

BLOCK_COLOURS = PALE_BLUE, PALE_ORANGE, PALE_GREEN, PALE_PURPLE
TILE, STEP = 0.25, 0.245         # inches of a tile of scores, and of the time that it takes


def draw_schedule():
    """Causal query tiles of some heads, coloured by block, and the blocks over time."""
    canvas = Canvas(9.6, 5.2)
    canvas.text(0.3, 0.3, f"{HEADS} heads of {ROW_TILES} query tiles", 12, "left", weight="bold")
    canvas.paragraph(0.3, 0.58, "bar: a query tile with the K/V tiles that it sees",
                     "colour: which block takes it; number: in which round")
    rounds = {(tile, head): (block, turn) for block, taken in schedule().items()
              for turn, (tile, head, _) in enumerate(taken)}
    for head in range(HEADS):
        _head(canvas, 0.3 + head % TOGETHER * 1.3, 1.25 + head // TOGETHER * 1.5, head, rounds)
    canvas.paragraph(0.3, 4.25, f"{TOGETHER} heads at a time, first the last query tile of each,",
                     "which is the longest, then the one before it.",
                     "So at any time blocks read the K and V of few heads.")
    _blocks(canvas, 1.1, "every other round backwards, as the kernel does", schedule())
    _blocks(canvas, 3.35, "always forwards: block 0 gets the longest each time", schedule(reverse=False))
    canvas.text(GANTT, 0.3, f"{BLOCKS} blocks over time", 12, "left", weight="bold")
    canvas.text(GANTT, 0.58, "box: a query tile, as long as it has K/V tiles; number: its head", 9.5, "left")
    return canvas.figure


GANTT = 4.95


def _head(canvas, x, y, head, rounds):
    canvas.text(x + ROW_TILES * TILE / 2, y - 0.14, f"head {head}", 9)
    for tile in range(ROW_TILES):
        block, turn = rounds[tile, head]
        for j in range(tile + 1):
            canvas.box(x + j * TILE, y + tile * TILE, TILE, TILE, BLOCK_COLOURS[block], edge=PAPER, line=0.6)
        canvas.box(x, y + tile * TILE, (tile + 1) * TILE, TILE, "none", str(turn), 9, zorder=3)


def _blocks(canvas, y, title, taken):
    canvas.text(GANTT, y - 0.2, title, 9.5, "left", style="italic")
    ends = []
    for block, tiles in taken.items():
        at = 0
        canvas.text(GANTT - 0.1, y + block * 0.36 + 0.15, f"block {block}", 9, "right")
        for _, head, length in tiles:
            canvas.box(GANTT + at * STEP, y + block * 0.36, length * STEP, 0.3, BLOCK_COLOURS[block], str(head), 9)
            at += length
        ends.append(at)
    longest = max(ends)
    canvas.line(*((GANTT + longest * STEP, y + offset) for offset in (-0.06, BLOCKS * 0.36)), width=1.4,
                style=(0, (4, 2)))
    canvas.text(GANTT + longest * STEP, y + BLOCKS * 0.36 + 0.12, f"end: {longest} tiles", 9, "right")


# ---- files -----------------------------------------------------------------------------------------------------------

PICTURES = {"tiles": draw_tiles, "fragment": draw_fragment, "pipeline": draw_pipeline, "schedule": draw_schedule}
FOLDER = Path(__file__).parent.parent / "numba_flash" / "cuda" / "pictures"


def save(name, path):
    """Draw a picture into a file, the same bytes each time."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(RC)
        PICTURES[name]().savefig(path, metadata={"Date": None} if Path(path).suffix == ".svg" else None)


def main(path=FOLDER):
    """Draw all."""
    Path(path).mkdir(parents=True, exist_ok=True)
    for name in PICTURES:
        save(name, Path(path) / f"{name}.svg")
