"""Lesson 3: y = x.T by way of a tile in shared memory.

x: (rows, cols), y: (cols, rows), float32. Blocks of (8, 8) threads; blocks along x cover the columns of x, blocks along
y its rows.
"""

import numpy as np
from numba import cuda

TILE = 8


@cuda.jit
def transpose_by_tiles(y, x):
    tile = cuda.shared.array((TILE, TILE), np.float32)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y

    # Your code: x into the tile, along a row of x; wait for all; the tile into y, along a row of y.
    ...
