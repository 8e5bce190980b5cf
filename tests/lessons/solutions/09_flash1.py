"""Lesson 9: FlashAttention-1, one block for the whole head.

q, o: (n_q, D), k, v: (n_k, D), m, l: (n_q,), float32. One block of BLOCK_M threads; thread tx has row tx of each
tile of queries.
"""

from math import exp, inf

import numpy as np
from numba import cuda

D, BLOCK_M, BLOCK_N = 4, 4, 3


@cuda.jit
def flash1_forward(o, m, l, q, k, v, scale):
    tx = cuda.threadIdx.x
    n_q, n_k = q.shape[0], k.shape[0]
    k_tile = cuda.shared.array((BLOCK_N, D), np.float32)
    v_tile = cuda.shared.array((BLOCK_N, D), np.float32)
    s = cuda.local.array(BLOCK_N, np.float32)

    # O = 0, m = -inf, l = 0
    for i in range(tx, n_q, BLOCK_M):
        for c in range(D):
            o[i, c] = 0
        m[i], l[i] = -inf, 0

    for j_first in range(0, n_k, BLOCK_N):
        # load K_j, V_j
        rows = min(BLOCK_N, n_k - j_first)
        cuda.syncthreads()      # or a fast thread overwrites the tile that others still use
        for e in range(tx, rows * D, BLOCK_M):
            k_tile[e // D, e % D] = k[j_first + e // D, e % D]
            v_tile[e // D, e % D] = v[j_first + e // D, e % D]
        cuda.syncthreads()      # or a thread uses what others haven't loaded yet

        for i in range(tx, n_q, BLOCK_M):
            # S = Q K^T
            m_tile = np.float32(-inf)
            for r in range(rows):
                s[r] = 0
            for c in range(D):
                q_c = scale * q[i, c]
                for r in range(rows):
                    s[r] += q_c * k_tile[r, c]
            for r in range(rows):
                m_tile = max(m_tile, s[r])

            # Your code: m, alpha, P, l; O = (alpha l O + P V) / l; write O, m and l back.
            m_old, l_old = m[i], l[i]
            m_new = max(m_old, m_tile)
            alpha = exp(m_old - m_new)
            l_new = alpha * l_old
            for r in range(rows):
                s[r] = exp(s[r] - m_new)
                l_new += s[r]
            for c in range(D):
                pv = np.float32(0)
                for r in range(rows):
                    pv += s[r] * v_tile[r, c]
                o[i, c] = (alpha * l_old * o[i, c] + pv) / l_new
            m[i], l[i] = m_new, l_new
