"""Lesson 11: the backward pass, delta and dQ: two kernels.

q, do, o, dq: (n_q, D), k, v: (n_k, D), lse, delta: (n_q,), float32. Both kernels: blocks of BLOCK_M
threads, a thread for each query.
"""

from math import exp

import numpy as np
from numba import cuda

D, BLOCK_M, BLOCK_N = 4, 4, 3


@cuda.jit
def row_delta(delta, do, o):
    # Your code: delta[i] is the product of two rows.
    ...


@cuda.jit
def flash2_dq(dq, q, k, v, do, lse, delta, scale):
    tx = cuda.threadIdx.x
    i = cuda.blockIdx.x * BLOCK_M + tx
    n_q, n_k = q.shape[0], k.shape[0]
    k_tile = cuda.shared.array((BLOCK_N, D), np.float32)
    v_tile = cuda.shared.array((BLOCK_N, D), np.float32)

    # load Q_i, dO_i, lse_i, delta_i; dQ = 0
    q_row = cuda.local.array(D, np.float32)
    do_row = cuda.local.array(D, np.float32)
    acc = cuda.local.array(D, np.float32)
    for c in range(D):
        q_row[c] = q[i, c] if i < n_q else np.float32(0)
        do_row[c] = do[i, c] if i < n_q else np.float32(0)
        acc[c] = 0
    lse_i = lse[i] if i < n_q else np.float32(0)
    delta_i = delta[i] if i < n_q else np.float32(0)

    for j_first in range(0, n_k, BLOCK_N):
        # load K_j, V_j
        rows = min(BLOCK_N, n_k - j_first)
        cuda.syncthreads()      # or a fast thread overwrites the tile that others still use
        for e in range(tx, rows * D, BLOCK_M):
            k_tile[e // D, e % D] = k[j_first + e // D, e % D]
            v_tile[e // D, e % D] = v[j_first + e // D, e % D]
        cuda.syncthreads()      # or a thread uses what others haven't loaded yet

        for r in range(rows):
            # Your code: S = Q K^T, P; dP = dO V^T, dS; dQ += dS K.
            ...

    if i < n_q:
        for c in range(D):
            dq[i, c] = acc[c]
