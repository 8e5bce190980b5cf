"""Threads in two dimensions: a transpose.

Blocks and grids may have two dimensions (or three). A block of (8, 8) threads has threadIdx.x and
threadIdx.y from 0 to 7 each, and blockIdx has an x and a y as well. The kernel y = x.T gives one
element of x to each thread:

    row = cuda.blockIdx.y * cuda.blockDim.y + cuda.threadIdx.y
    col = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x

In NumPy's usual order the elements of a row lie side by side in memory, and threads are counted
along x first: so neighbouring threads should have neighbouring *columns*. A warp, 32 threads that
run in step, then reads one stretch of memory, and the memory delivers it in pieces of 32 bytes, 8
numbers each.

Both axes have a tail now: check both. The report counts the pieces that all warps move. What is
read here comes in few; what is written goes to y in columns: it takes twice as many. (The other way
round the reads do.) The next lesson does something about that.
"""

import numpy as np

from . import Counts, Launch, blocks

HINT = """
x.shape is (rows, cols). The thread's element is x[row, col], if row < rows and col < cols; it goes
to y[col, row].
"""
TILE = 8
CASES = {"rows": 16, "cols": 16}, {"rows": 8, "cols": 8}, {"rows": 10, "cols": 19}, {"rows": 1, "cols": 9}
GOOD = Counts(global_reads=1, global_writes=1, shared_reads=0, shared_writes=0, pieces=96)
ENFORCED = {}


def inputs(rng, rows, cols):
    """A matrix."""
    return {"x": rng.standard_normal((rows, cols)).astype(np.float32)}


def specification(x):
    """The transpose."""
    return {"y": x.T}


def launches(rows, cols):
    """A block for each 8 x 8 tile of x."""
    return [Launch("transpose", (blocks(cols, TILE), blocks(rows, TILE)), (TILE, TILE), "y x")]
