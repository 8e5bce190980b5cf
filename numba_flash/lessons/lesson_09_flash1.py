"""FlashAttention-1: keys and values outside, queries inside.

FlashAttention (arXiv 2205.14135) loads each tile of K and V *once*. The loop over them is the outer
one; inside, all tiles of queries pass by. So a row's o, m and l can't stay with a thread: when the
next tile of keys comes, the thread has long been busy with other queries. They live in global
memory, begin as 0, -inf and 0, and are read, corrected and written back at each step.

The step takes a whole tile of keys: first all scores of the row, in a local array of BLOCK_N, and
their maximum, then

    m_new = max(m, m_tile)
    alpha = exp(m - m_new)
    p     = exp(s - m_new)                      for each key of the tile
    l_new = alpha * l + sum(p)
    o     = (alpha * l * o + p v) / l_new       one correction for the whole tile

One block does the whole head here, thread tx row tx of each query tile. No other thread touches its
rows of o, m and l, so they need no barrier; the tile of K and V does.
numba_flash.cuda.flash1_forward is this with more threads for each row.

Count the global reads: o is read and written n_k / block_n times. That is what FlashAttention-2
does away with.
"""

import numpy as np

from . import Counts, Launch
from .lesson_07_recurrence import inputs, specification as attention  # noqa: F401 (the same inputs)

HINT = """
Begin with m_old, l_old = m[i], l[i] and m_new = max(m_old, m_tile), alpha = exp(m_old - m_new).
Turn s[r] into p in place and add it to l_new, which starts as alpha * l_old. For each column c: pv
= sum of s[r] * v_tile[r, c], and o[i, c] = (alpha * l_old * o[i, c] + pv) / l_new. Then write m[i]
and l[i].
"""
BLOCK_M = 4
CASES = {"n_q": 8, "n_k": 6}, {"n_q": 4, "n_k": 3}, {"n_q": 6, "n_k": 10}, {"n_q": 1, "n_k": 1}
GOOD = Counts(global_reads=52, global_writes=36, shared_reads=96, shared_writes=12, pieces=144)
ENFORCED = {"global_reads": "For each tile, read o, m and l once."}


def specification(q, k, v, scale):
    """Attention, and each row's maximum and sum."""
    s = scale * q.astype(np.float64) @ k.T
    m = s.max(axis=1)
    return {"o": attention(q, k, v, scale)["o"], "m": m, "l": np.exp(s - m[:, None]).sum(axis=1)}


def launches(n_q, n_k):
    """One block."""
    return [Launch("flash1_forward", 1, BLOCK_M, "o m l q k v scale")]
