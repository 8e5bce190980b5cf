"""Safe softmax: two reductions over the same shared memory.

The softmax of a row x is exp(x) / sum(exp(x)). Computed like this it overflows: in float32 exp(89)
is infinite, and inf / inf is NaN. Attention scores do get that large. The safe softmax takes the
row's maximum off first, which changes nothing in the quotient:

    m = max(x)          first pass over the row
    l = sum(exp(x - m)) second
    p = exp(x - m) / l  third

No exponent is above 0 now, and one is 0, so l is at least 1. An x of -inf is a *hidden* entry: its
p is exactly 0, by itself, as exp(-inf) is 0.

You write the second and third pass, and the reduction by halving again, in the same strip of shared
memory that held the maxima. There is a trap in that: every thread reads m = strip[0], and a fast
thread may go on and write its share of l there while a slow one has still to read m. What separates
a *read* from the next *write* to the same place is a barrier, just as between a write and the next
read.
"""

import numpy as np

from . import Counts, Launch

HINT = """
m = strip[0] is read by all threads. Before strip[tx] = share there must be a barrier. The share of
l: the sum of exp(x[row, col] - m) over this thread's columns. Halve with +, barrier in each step, l
= strip[0]. Then each thread writes p for its own columns.
"""
THREADS = 8
CASES = ({"rows": 2, "n": 32, "large": False}, {"rows": 2, "n": 21, "large": False},
         {"rows": 1, "n": 3, "large": False}, {"rows": 2, "n": 19, "large": True})
GOOD = Counts(global_reads=12, global_writes=4, shared_reads=14, shared_writes=8, pieces=32)
ENFORCED = {"global_reads": "Three passes, each over the thread's own share of the row."}


def inputs(rng, rows, n, large):
    """A matrix; with `large`, of numbers whose exp overflows, and with hidden entries."""
    x = rng.standard_normal((rows, n)).astype(np.float32)
    if large:
        x = x * np.float32(300)
        x[:, ::5] = -np.inf
    return {"x": x}


def specification(x):
    """Softmax of each row."""
    x = x.astype(np.float64)
    p = np.exp(x - x.max(axis=1, keepdims=True))
    return {"p": p / p.sum(axis=1, keepdims=True)}


def launches(rows, n, large):
    """A block for each row."""
    return [Launch("safe_softmax", rows, THREADS, "p x")]
