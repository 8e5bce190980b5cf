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
    row, col = cuda.blockIdx.y * TILE + ty, cuda.blockIdx.x * TILE + tx
    if row < x.shape[0] and col < x.shape[1]:
        tile[ty, tx] = x[row, col]
    cuda.syncthreads()
    row, col = cuda.blockIdx.x * TILE + ty, cuda.blockIdx.y * TILE + tx
    if row < y.shape[0] and col < y.shape[1]:
        y[row, col] = tile[tx, ty]
