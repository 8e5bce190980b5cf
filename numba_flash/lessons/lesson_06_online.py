"""Online softmax: maximum and sum in one pass.

Three passes over a row are two too many if the row never lies in memory, as in attention. The
*online* softmax finds m and l together. It keeps the maximum m and the sum l of what it has seen,
and when a new chunk brings a larger maximum, all that was summed before was measured against the
wrong one; one factor puts that right:

    m_new = max(m, max(chunk))
    alpha = exp(m - m_new)
    l     = alpha * l + sum(exp(chunk - m_new))

It starts with m = -inf and l = 0: then alpha is exp(-inf) = 0, and nothing is taken over. A trap:
if the first chunk is hidden altogether, m_new is still -inf, and -inf - -inf is NaN. Subtract 0 in
its place:

    base  = m_new if m_new != -inf else 0

Here *one* thread does a row by itself, so there is no shared memory and no barrier. It takes CHUNK
columns at a time into a local array, reads each x once for m and l, and once more for p. The last
chunk may be shorter: what isn't there counts as -inf.
"""

import numpy as np

from . import Counts, Launch, blocks

HINT = """
For each chunk: m_new starts as m_row. For c in range(CHUNK): chunk[c] = x[row, first + c] if that
column exists, else -inf, and m_new = max(m_new, chunk[c]). Then base, then l_row *= exp(m_row -
base), then l_row += exp(chunk[c] - base) for each c, then m_row = m_new.
"""
THREADS = 4
CASES = ({"rows": 4, "n": 16, "hidden": 0}, {"rows": 6, "n": 10, "hidden": 0},
         {"rows": 1, "n": 3, "hidden": 0}, {"rows": 5, "n": 11, "hidden": 5})
GOOD = Counts(global_reads=32, global_writes=18, shared_reads=0, shared_writes=0, pieces=194)
ENFORCED = {"global_reads": "Keep a chunk in the local array: read x once for m and l together, and once for p."}


def inputs(rng, rows, n, hidden):
    """A matrix whose first columns are hidden, with maxima that grow along the row."""
    x = (rng.standard_normal((rows, n)) * 20 + np.arange(n) * 10).astype(np.float32)
    x[:, :hidden] = -np.inf
    return {"x": x}


def specification(x):
    """Softmax of each row, its maximum and its sum."""
    x = x.astype(np.float64)
    m = x.max(axis=1)
    p = np.exp(x - m[:, None])
    return {"p": p / p.sum(axis=1, keepdims=True), "m": m, "l": p.sum(axis=1)}


def launches(rows, n, hidden):
    """A thread for each row."""
    return [Launch("online_softmax", blocks(rows, THREADS), THREADS, "p m l x")]
