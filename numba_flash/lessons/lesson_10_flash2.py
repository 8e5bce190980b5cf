"""FlashAttention-2: queries outside, causal tiles skipped, one division at the end.

FlashAttention-2 (arXiv 2307.08691) exchanges the two loops. The loop over query tiles is carried
out by the grid, a block for each; inside, one loop runs over the tiles of K and V, and a row's o, m
and l stay in registers until the row is done. Three things follow.

*One division.* Nobody sees o before the end, so it need not be a valid attention on the way: keep
the plain sum o = alpha * o + p v, and divide by l once, in the epilogue.

*Causal.* Query i may see key j only if j <= i + n_k - n_q: the last query sees all keys. A hidden
score is -inf; its p is 0.

*Skipping.* A tile that no query of the block sees needs no loading. The block's last query is
i_stop - 1, so the loop over keys ends at

    stop = min(n_k, i_stop + n_k - n_q)

which saves nearly half of the work of a long sequence. The first block sees little and the last one
sees all.

numba_flash.cuda.flash2_forward is this with more threads for each row, all options, and the longest
blocks first. (Here n_q <= n_k, so every row sees key 0, m is finite from the first tile on, and the
trap of lesson 6 isn't there.)
"""

import numpy as np

from . import Counts, Launch, blocks
from .lesson_07_recurrence import inputs  # noqa: F401 (the same inputs)

HINT = """
The loop ends at `stop` as the text says. In it: s[r] = -inf if j_first + r > i + n_k - n_q. Then
m_new = max(m, s[0], ...), alpha = exp(m - m_new), l *= alpha, each acc[c] *= alpha, and for each row
r of the tile p = exp(s[r] - m_new) is added to l, and p * v_tile[r, c] to acc[c]. In the end o is
acc / l and lse is m + log(l).
"""
BLOCK_M = 4
CASES = {"n_q": 8, "n_k": 8}, {"n_q": 4, "n_k": 10}, {"n_q": 7, "n_k": 7}, {"n_q": 1, "n_k": 5}, {"n_q": 10, "n_k": 11}
GOOD = Counts(global_reads=20, global_writes=5, shared_reads=64, shared_writes=16, pieces=62)
ENFORCED = {"pieces": "Are tiles of keys skipped that no query of the block sees?"}


def specification(q, k, v, scale):
    """Causal attention, and the logarithm of each row's sum."""
    n_q, n_k = len(q), len(k)
    s = scale * q.astype(np.float64) @ k.T
    s[np.arange(n_k) > np.arange(n_q)[:, None] + n_k - n_q] = -np.inf
    m = s.max(axis=1, keepdims=True)
    p = np.exp(s - m)
    l = p.sum(axis=1, keepdims=True)
    return {"o": p / l @ v, "lse": (m + np.log(l))[:, 0]}


def launches(n_q, n_k):
    """A block for each tile of queries."""
    return [Launch("flash2_forward", blocks(n_q, BLOCK_M), BLOCK_M, "o lse q k v scale")]
