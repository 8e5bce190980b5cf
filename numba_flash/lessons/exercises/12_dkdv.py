"""Lesson 12: the backward pass, dK and dV.

q, do: (n_q, D), k, v, dk, dv: (n_k, D), lse, delta: (n_q,), float32. Blocks of BLOCK_N threads, a thread for each key.
"""

from math import exp

import numpy as np
from numba import cuda

D, BLOCK_M, BLOCK_N = 4, 3, 4


@cuda.jit
def flash2_dkdv(dk, dv, q, k, v, do, lse, delta, scale):
    tx = cuda.threadIdx.x
    j = cuda.blockIdx.x * BLOCK_N + tx
    n_q, n_k = q.shape[0], k.shape[0]
    q_tile = cuda.shared.array((BLOCK_M, D), np.float32)
    do_tile = cuda.shared.array((BLOCK_M, D), np.float32)
    lse_tile = cuda.shared.array(BLOCK_M, np.float32)
    delta_tile = cuda.shared.array(BLOCK_M, np.float32)

    # load K_j, V_j; dK = dV = 0
    k_row = cuda.local.array(D, np.float32)
    v_row = cuda.local.array(D, np.float32)
    acc_k = cuda.local.array(D, np.float32)
    acc_v = cuda.local.array(D, np.float32)
    for c in range(D):
        k_row[c] = k[j, c] if j < n_k else np.float32(0)
        v_row[c] = v[j, c] if j < n_k else np.float32(0)
        acc_k[c], acc_v[c] = 0, 0

    for i_first in range(0, n_q, BLOCK_M):
        rows = min(BLOCK_M, n_q - i_first)
        # Your code: load Q_i, dO_i, lse_i, delta_i into the tiles, between two barriers.
        ...

        for r in range(rows):
            # Your code: S^T = K Q^T, P^T; dV += P^T dO; dP^T = V dO^T, dS^T; dK += dS^T Q.
            ...

    if j < n_k:
        for c in range(D):
            dk[j, c], dv[j, c] = acc_k[c], acc_v[c]
