"""Lesson 2: y = x.T, a thread for each element of x.

x: (rows, cols), y: (cols, rows), float32. Blocks of (8, 8) threads; blocks along x cover the columns of x, blocks along
y its rows.
"""

from numba import cuda


@cuda.jit
def transpose(y, x):
    # Your code: the thread's row and column of x; if they are inside, y there.
    ...
