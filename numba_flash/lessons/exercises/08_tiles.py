"""Lesson 8: attention, a thread for each query, tiles of k and v in shared memory.

q, o: (n_q, D), k, v: (n_k, D), lse: (n_q,), float32. Blocks of BLOCK_M threads, as many as cover the queries.
"""

from math import exp, inf, log

import numpy as np
from numba import cuda

D, BLOCK_M, BLOCK_N = 4, 4, 3


@cuda.jit
def attention_tiles(o, lse, q, k, v, scale):
    tx = cuda.threadIdx.x
    i = cuda.blockIdx.x * BLOCK_M + tx
    n_q, n_k = q.shape[0], k.shape[0]
    k_tile = cuda.shared.array((BLOCK_N, D), np.float32)
    v_tile = cuda.shared.array((BLOCK_N, D), np.float32)

    q_row = cuda.local.array(D, np.float32)
    acc = cuda.local.array(D, np.float32)
    for c in range(D):
        q_row[c], acc[c] = q[i, c] if i < n_q else np.float32(0), np.float32(0)
    m, l = np.float32(-inf), np.float32(0)

    for j_first in range(0, n_k, BLOCK_N):
        # Your code: load K_j, V_j, the rows of k and v from j_first on, into the tiles; the barriers; and rows, the
        # number of rows of the tile that there are.
        ...

        for r in range(rows):  # noqa: F821
            # S = Q K^T
            s = np.float32(0)
            for c in range(D):
                s += scale * q_row[c] * k_tile[r, c]

            # online softmax: m, alpha, p, l; O = (alpha l O + p V) / l
            m_new = max(m, s)
            alpha, p = exp(m - m_new), exp(s - m_new)
            l_new = alpha * l + p
            for c in range(D):
                acc[c] = (alpha * l * acc[c] + p * v_tile[r, c]) / l_new
            m, l = m_new, l_new

    if i < n_q:
        for c in range(D):
            o[i, c] = acc[c]
        lse[i] = m + log(l)
