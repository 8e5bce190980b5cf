"""Lesson 7: attention, a thread for each query.

q, o: (n_q, D), k, v: (n_k, D), lse: (n_q,), float32. Blocks of 4 threads, as many as cover the queries.
"""

from math import exp, inf, log

import numpy as np
from numba import cuda

D = 4


@cuda.jit
def attention_rows(o, lse, q, k, v, scale):
    i = cuda.grid(1)
    if i >= q.shape[0]:
        return

    q_row = cuda.local.array(D, np.float32)
    acc = cuda.local.array(D, np.float32)       # the row of o
    for c in range(D):
        q_row[c], acc[c] = q[i, c], np.float32(0)
    m, l = np.float32(-inf), np.float32(0)

    for j in range(k.shape[0]):
        # S = Q K^T
        s = np.float32(0)
        for c in range(D):
            s += scale * q_row[c] * k[j, c]

        # Your code: m, alpha, p, l, and acc.
        m_new = max(m, s)
        alpha, p = exp(m - m_new), exp(s - m_new)
        l_new = alpha * l + p
        for c in range(D):
            acc[c] = (alpha * l * acc[c] + p * v[j, c]) / l_new
        m, l = m_new, l_new

    for c in range(D):
        o[i, c] = acc[c]
    lse[i] = m + log(l)
