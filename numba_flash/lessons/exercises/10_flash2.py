"""Lesson 10: FlashAttention-2, causal, a block for each tile of queries.

q, o: (n_q, D), k, v: (n_k, D), lse: (n_q,), float32, n_q <= n_k. Blocks of BLOCK_M threads, a thread for
each query.
"""

from math import exp, inf, log

import numpy as np
from numba import cuda

D, BLOCK_M, BLOCK_N = 4, 4, 3


@cuda.jit
def flash2_forward(o, lse, q, k, v, scale):
    tx = cuda.threadIdx.x
    n_q, n_k = q.shape[0], k.shape[0]
    i_first = cuda.blockIdx.x * BLOCK_M
    i, i_stop = i_first + tx, min(i_first + BLOCK_M, n_q)
    k_tile = cuda.shared.array((BLOCK_N, D), np.float32)
    v_tile = cuda.shared.array((BLOCK_N, D), np.float32)

    # load Q_i; O = 0, m = -inf, l = 0
    q_row = cuda.local.array(D, np.float32)
    acc = cuda.local.array(D, np.float32)
    s = cuda.local.array(BLOCK_N, np.float32)
    for c in range(D):
        q_row[c], acc[c] = q[i, c] if i < n_q else np.float32(0), np.float32(0)
    m, l = np.float32(-inf), np.float32(0)

    # Your code: where does the loop over keys end for this block?
    stop = ...
    for j_first in range(0, stop, BLOCK_N):
        # load K_j, V_j
        rows = min(BLOCK_N, n_k - j_first)
        cuda.syncthreads()      # or a fast thread overwrites the tile that others still use
        for e in range(tx, rows * D, BLOCK_M):
            k_tile[e // D, e % D] = k[j_first + e // D, e % D]
            v_tile[e // D, e % D] = v[j_first + e // D, e % D]
        cuda.syncthreads()      # or a thread uses what others haven't loaded yet

        # S = Q K^T
        for r in range(rows):
            s[r] = 0
            for c in range(D):
                s[r] += scale * q_row[c] * k_tile[r, c]

        # Your code: mask; online softmax: m, alpha, P, l; O = alpha O + P V.
        ...

    # Your code: the epilogue, O / l and lse, for rows that exist.
    ...
