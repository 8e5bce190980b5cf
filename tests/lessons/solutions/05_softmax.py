"""Lesson 5: the safe softmax of each row.

x, p: (rows, n), float32. A block of 8 threads for each row; thread tx has columns tx, tx + 8, ...
"""

from math import exp, inf

import numpy as np
from numba import cuda

THREADS = 8


@cuda.jit
def safe_softmax(p, x):
    strip = cuda.shared.array(THREADS, np.float32)
    row, tx, n = cuda.blockIdx.x, cuda.threadIdx.x, x.shape[1]

    # m, the maximum of the row
    share = np.float32(-inf)
    for col in range(tx, n, THREADS):
        share = max(share, x[row, col])
    strip[tx] = share
    cuda.syncthreads()
    half = THREADS // 2
    while half > 0:
        if tx < half:
            strip[tx] = max(strip[tx], strip[tx + half])
        cuda.syncthreads()
        half //= 2
    m = strip[0]

    # Your code: l, the sum of exp(x - m) over the row, through the same strip; then p = exp(x - m) / l.
    cuda.syncthreads()          # or a fast thread overwrites strip[0] before others have read m
    share = np.float32(0)
    for col in range(tx, n, THREADS):
        share += exp(x[row, col] - m)
    strip[tx] = share
    cuda.syncthreads()
    half = THREADS // 2
    while half > 0:
        if tx < half:
            strip[tx] += strip[tx + half]
        cuda.syncthreads()
        half //= 2
    l = strip[0]
    for col in range(tx, n, THREADS):
        p[row, col] = exp(x[row, col] - m) / l
