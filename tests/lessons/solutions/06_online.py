"""Lesson 6: the online softmax of each row, a thread for each row.

x, p: (rows, n), m, l: (rows,), float32. Blocks of 4 threads, as many as cover the rows.
"""

from math import exp, inf

import numpy as np
from numba import cuda

CHUNK = 4


@cuda.jit
def online_softmax(p, m, l, x):
    row = cuda.grid(1)          # the thread's number in the whole grid
    n = x.shape[1]
    if row >= x.shape[0]:
        return                  # allowed here: there is no barrier below

    chunk = cuda.local.array(CHUNK, np.float32)
    m_row, l_row = np.float32(-inf), np.float32(0)
    for first in range(0, n, CHUNK):
        # Your code: the chunk that begins at column `first`, and what it does to m_row and l_row.
        m_new = m_row
        for c in range(CHUNK):
            chunk[c] = x[row, first + c] if first + c < n else -inf
            m_new = max(m_new, chunk[c])
        base = m_new if m_new != -inf else np.float32(0)
        l_row *= exp(m_row - base)
        for c in range(CHUNK):
            l_row += exp(chunk[c] - base)
        m_row = m_new

    m[row], l[row] = m_row, l_row
    for col in range(n):
        p[row, col] = exp(x[row, col] - m_row) / l_row
