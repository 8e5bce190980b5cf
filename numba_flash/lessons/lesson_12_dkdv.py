"""Backward, second half: dK and dV.

The gradients of a key and its value sum over *queries*:

    dv_j = sum_i p_ij do_i
    dk_j = scale * sum_i ds_ij q_i

A thread of the last lesson has a query; to add its part to row j of dK and dV it would have to
write where all other threads write too, a race (or many atomic additions, which are slow and come
in no fixed order). So the third kernel turns things round: a thread has a *key*. k_j, v_j and the
sums for dk_j and dv_j are its own, in registers, and tiles of queries pass by: q, do, and with them
lse and delta, in shared memory. Each row is written once, by one thread.

p and ds are computed a second time, transposed. That is cheaper than to store them. It makes seven
products of tiles in the two kernels, s and dp twice, where the forward pass has two.

The tails change places as well: the last tile of *queries* may be short, and the threads of the
last block that have no *key* help to load, come to the barriers and write nothing.

After this lesson read numba_flash.cuda.flash2_backward: make_dq and make_dkdv are these kernels,
grown up.
"""

import numpy as np

from . import Counts, Launch, blocks
from .lesson_11_dq import inputs as first_inputs

HINT = """
Load do_tile like q_tile. lse_tile[tx] and delta_tile[tx] come from query i_first + tx, if tx <
rows: a tile of queries has 3 rows and a block 4 threads, so one of them has none to load. Then, for
each row r: s and dp are sums over c, p = exp(s - lse_tile[r]), ds = p * (dp - delta_tile[r]);
acc_v[c] += p * do_tile[r, c], acc_k[c] += scale * ds * q_tile[r, c].
"""
BLOCK_N = 4
CASES = {"n_q": 6, "n_k": 4}, {"n_q": 3, "n_k": 4}, {"n_q": 10, "n_k": 6}, {"n_q": 1, "n_k": 1}
GOOD = Counts(global_reads=24, global_writes=8, shared_reads=108, shared_writes=16, pieces=48)
ENFORCED = {"global_reads": "Load each tile of queries together, and use it from shared memory."}


def inputs(rng, n_q, n_k):
    """What the backward pass gets, and delta."""
    given = first_inputs(rng, n_q, n_k)
    delta = (given["do"] * given.pop("o")).sum(axis=1)
    return {**given, "delta": delta}


def specification(do, q, k, v, lse, delta, scale):
    """dk and dv."""
    do, q, k, v = (x.astype(np.float64) for x in (do, q, k, v))
    p = np.exp(scale * q @ k.T - lse[:, None])
    ds = p * (do @ v.T - delta[:, None])
    return {"dk": scale * ds.T @ q, "dv": p.T @ do}


def launches(n_q, n_k):
    """A thread for each key."""
    return [Launch("flash2_dkdv", blocks(n_k, BLOCK_N), BLOCK_N, "dk dv q k v do lse delta scale")]
