"""Backward, first half: delta and dQ.

A gradient do arrives at o. Through o = p v and p = softmax(s) it goes back to the scores like this,
each line for one row:

    p  = exp(s - lse)               from q, k and one number, not from memory
    dp = do . v_j                   for each key j
    ds = p * (dp - delta)
    dq = scale * sum_j ds_j k_j

delta = sum_j p_j dp_j comes from the softmax: its entries sum to 1, so what raises one lowers the
others. It seems to need the whole row before the first ds is known. But sum_j p_j (do . v_j) = do .
sum_j p_j v_j, and that sum is o:

    delta = do . o

one product of two rows, in a kernel of its own: the first of the backward pass's three. The second,
dQ, is built like the forward pass: a thread for each query, tiles of K and V in shared memory, a
sum in registers. It is simpler, even: lse is known, so there is no running maximum, and nothing is
ever rescaled.

Two kernels that are launched one after the other need no barrier between them: the second starts
when the first has ended.
"""

import numpy as np

from . import Counts, Launch, blocks
from .lesson_07_recurrence import inputs as forward_inputs, specification as attention

HINT = """
row_delta: i = cuda.grid(1); if i < n_q, delta[i] = sum over c of do[i, c] * o[i, c]. flash2_dq: for
each row r of the tile, two sums over c: s of scale * q_row[c] * k_tile[r, c], dp of do_row[c] *
v_tile[r, c]. Then p = exp(s - lse_i), ds = p * (dp - delta_i), and acc[c] += scale * ds * k_tile[r,
c].
"""
BLOCK_M = 4
CASES = {"n_q": 4, "n_k": 6}, {"n_q": 4, "n_k": 1}, {"n_q": 6, "n_k": 10}
GOOD = Counts(global_reads=30, global_writes=5, shared_reads=72, shared_writes=12, pieces=55)
ENFORCED = {"global_reads": "In flash2_dq, use the tiles and what the thread has in its own variables."}


def inputs(rng, n_q, n_k):
    """What the backward pass gets: do, q, k, v, and o and lse of the forward pass."""
    given = forward_inputs(rng, n_q, n_k)
    given.update({name: x.astype(np.float32) for name, x in attention(**given).items()})
    return {"do": rng.standard_normal(given["q"].shape).astype(np.float32), **given}


def specification(do, q, k, v, o, lse, scale):
    """delta and dq."""
    do, q, k, v, o = (x.astype(np.float64) for x in (do, q, k, v, o))
    p = np.exp(scale * q @ k.T - lse[:, None])
    delta = (do * o).sum(axis=1)
    ds = p * (do @ v.T - delta[:, None])
    return {"delta": delta, "dq": scale * ds @ k}


def launches(n_q, n_k):
    """delta first, as dQ needs it."""
    grid = blocks(n_q, BLOCK_M)
    return [Launch("row_delta", grid, BLOCK_M, "delta do o"),
            Launch("flash2_dq", grid, BLOCK_M, "dq q k v do lse delta scale")]
