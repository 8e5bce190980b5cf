"""Shared memory and a barrier: a transpose without scattered writes.

Whichever way round you do it, the plain transpose reads or writes global memory in columns, and
moves more pieces of 32 bytes than it has numbers for. The way out: a block copies an 8 x 8 tile of
x to *shared memory*, which is near and doesn't mind columns, and writes y from there, row by row.
Both directions now touch global memory along rows.

    tile = cuda.shared.array((TILE, TILE), np.float32)

makes an array that all threads of the block see; its shape must be known to the compiler. Every
thread puts one number in and takes *another thread's* number out. Between the two all must have put
theirs in, and the warps of a block don't wait for each other: a fast one would read what isn't
there yet. That is a *race*. cuda.syncthreads() is a *barrier*: it holds each thread of the block
until all have come.

All, without exception. A barrier inside of `if row < rows` is never reached by the threads outside
of the matrix, and the others wait for them. So: branch, then meet at the barrier, then branch
again.

The block's tile of y is where its tile of x is mirrored: blockIdx.x and blockIdx.y change places;
and in the tile so do threadIdx.x and threadIdx.y. (On a GPU, make the tile (TILE, TILE + 1): then a
column's elements lie in different banks.)
"""

from . import Counts, Launch
from .lesson_02_transpose import (CASES, TILE, inputs, launches as plain_launches,  # noqa: F401 (as there)
                                  specification)

HINT = """
First half:  if the element (row, col) of x exists: tile[ty, tx] = x[row, col]. Then the barrier,
outside of the if. Second half: row = cuda.blockIdx.x * TILE + ty and col = cuda.blockIdx.y * TILE +
tx are this thread's place in *y*; if it exists, y[row, col] = tile[tx, ty].
"""
GOOD = Counts(global_reads=1, global_writes=1, shared_reads=1, shared_writes=1, pieces=64)
ENFORCED = {"shared_reads": "Copy the tile to shared memory and write y from there.",
            "pieces": "Let threads with neighbouring threadIdx.x read and write neighbouring columns."}


def launches(rows, cols):
    """As for the plain transpose."""
    return [Launch("transpose_by_tiles", step.grid, (TILE, TILE), "y x") for step in plain_launches(rows, cols)]
