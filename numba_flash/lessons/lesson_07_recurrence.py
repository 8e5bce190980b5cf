"""The attention row recurrence: a thread for each query.

Attention is s = scale * q kT, p = softmax(s) row by row, o = p v. One query's row of o is an
average of the rows of v, weighted by the softmax of its scores. Now let o join the online softmax:
o_j, the attention over the first j keys, follows from o_{j-1} and one more key, so a row of s is
never stored, and neither k nor v is read twice:

    s     = scale * q . k_j
    m_new = max(m, s)
    alpha = exp(m - m_new),  p = exp(s - m_new)
    l_new = alpha * l + p
    o     = (alpha * l * o + p * v_j) / l_new

What was known before is weighted anew by alpha, exactly as l is: o * l is the sum that hasn't been
divided yet. The division makes every o_j a valid attention, if over fewer keys. This is all of
FlashAttention's mathematics; the rest is about where the numbers lie.

The kernels also write lse = m + log(l), the logarithm of the row's sum of exp(s). The backward pass
needs that one number to get every p back: p = exp(s - lse).

A thread keeps its row of q and of o in local arrays of D numbers, which become registers. Every
thread reads all of k and v from global memory: 2 * n_k * D reads. The next lesson divides them.
"""

import numpy as np

from . import Counts, Launch, blocks

HINT = """
For each j: s is given. m_new = max(m, s), alpha and p are exps of differences to m_new, l_new =
alpha * l + p. Then, for every column c, acc[c] = (alpha * l * acc[c] + p * v[j, c]) / l_new; only
after that m, l = m_new, l_new.
"""
D, BLOCK_M = 4, 4
CASES = {"n_q": 4, "n_k": 6}, {"n_q": 4, "n_k": 1}, {"n_q": 6, "n_k": 9}
GOOD = Counts(global_reads=52, global_writes=5, shared_reads=0, shared_writes=0, pieces=65)
ENFORCED = {"global_reads": "Each key and each value need be read once."}


def inputs(rng, n_q, n_k):
    """q, k, v of one head; scores that grow along the row, so that the maximum changes often."""
    q, k, v = (rng.standard_normal((n, D)).astype(np.float32) for n in (n_q, n_k, n_k))
    k[:, 0] += np.arange(n_k) * np.sign(q[0, 0])
    return {"q": q, "k": k, "v": v, "scale": np.float32(0.5)}


def specification(q, k, v, scale):
    """Attention, and the logarithm of each row's sum."""
    s = scale * q.astype(np.float64) @ k.T
    m = s.max(axis=1, keepdims=True)
    p = np.exp(s - m)
    l = p.sum(axis=1, keepdims=True)
    return {"o": p / l @ v, "lse": (m + np.log(l))[:, 0]}


def launches(n_q, n_k):
    """A thread for each query."""
    return [Launch("attention_rows", blocks(n_q, BLOCK_M), BLOCK_M, "o lse q k v scale")]
