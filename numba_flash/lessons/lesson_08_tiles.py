"""Tiles: a block reads k and v together.

In the last lesson all threads of a block read the same keys and values, each for itself. Let them
share: the block copies a *tile* of block_n keys and values to shared memory, every thread a part of
it, and all use all of it. Each thread then reads a 1 / block_m part of k and v from global memory;
with real tiles, of 64 or 128 rows, that is what makes attention fast.

The loop over keys becomes a loop over tiles with two barriers in each step:

    for j_first in range(0, n_k, BLOCK_N):
        cuda.syncthreads()      # or a fast thread overwrites the tile that others still use
        load this thread's part of the tile
        cuda.syncthreads()      # or a thread uses what others haven't loaded yet
        use the tile

Two tails meet here. The last tile of *keys* may be short: use only the rows that exist. And in the
last block some threads have no *query*; they have no result to write, but they must load their part
and come to every barrier. So this kernel must not return early.

The rows of a tile are loaded thread by thread: elements number tx, tx + BLOCK_M, tx + 2 BLOCK_M ...
of BLOCK_N * D, counted along its rows: element e lies in row e // D, column e % D.
"""

from . import Counts, Launch
from .lesson_07_recurrence import inputs, launches as row_launches, specification  # noqa: F401 (as there)

HINT = """
    for e in range(tx, BLOCK_N * D, BLOCK_M):
        j, c = j_first + e // D, e % D
        if j < n_k:
            k_tile[e // D, c] = k[j, c]     # and v_tile likewise
between two barriers, of which the first comes before the loading. The tile has
rows = min(BLOCK_N, n_k - j_first).
"""
CASES = {"n_q": 4, "n_k": 6}, {"n_q": 4, "n_k": 3}, {"n_q": 6, "n_k": 10}, {"n_q": 1, "n_k": 1}
GOOD = Counts(global_reads=16, global_writes=5, shared_reads=48, shared_writes=12, pieces=29)
ENFORCED = {"global_reads": "Let each thread load only its part of the tiles.",
            "shared_reads": "Put the tiles of k and v into shared memory."}


def launches(n_q, n_k):
    """A thread for each query."""
    return [Launch("attention_tiles", step.grid, step.block, step.arguments) for step in row_launches(n_q, n_k)]
