"""What both backward kernels do for one pair of tiles: P and dS again from q, k, v, lse and delta.

On transposed tiles, as in `forward`: keys are rows, queries are columns.
"""

from collections import namedtuple

import numpy as np
from numba import njit

from ..scores import seeing_queries, shared_keys
from .hooks import hide, is_seen_by_any, sees_any, shape_scores, softcap_slope
from .simd import ROWS, exp, load_row, store, unless_zero, width
from .tiles import dot, fill, is_finite, load, multiply, pitch, round_up, row_of, scale_by, take
from .tiles import transpose

Queries = namedtuple("Queries", "q q_t do do_t o lse delta")
Queries.__doc__ = """Tiles of what belongs to one tile of queries; q is scaled."""

Pairs = namedtuple("Pairs", "k v p ds slope")
Pairs.__doc__ = """Tiles of what belongs to one tile of keys, and to each pair of a query and a key."""


def tiles_elements(block_m, block_n, d, d_v, itemsize):
    """Elements of scratch memory that `take_queries` and `take_pairs` take together."""
    def tile(rows, columns):
        return rows * pitch(columns, itemsize)

    return (tile(block_m, d) + tile(d, block_m) + 2 * tile(block_m, d_v) + tile(d_v, block_m) + 2 * tile(1, block_m)
            + tile(block_n, d) + tile(block_n, d_v) + 3 * tile(block_n, block_m))


@njit
def take_queries(scratch, block_m, d, d_v):
    """Tiles for the rows of one query tile, from scratch memory; and the rest of the memory."""
    q, rest = take(scratch, block_m, d)
    q_t, rest = take(rest, d, block_m)
    do, rest = take(rest, block_m, d_v)
    do_t, rest = take(rest, d_v, block_m)
    o, rest = take(rest, block_m, d_v)
    lse, rest = take(rest, 1, block_m)
    delta, rest = take(rest, 1, block_m)
    return Queries(q, q_t, do, do_t, o, lse, delta), rest


@njit
def take_pairs(scratch, block_m, block_n, d, d_v):
    """Tiles for one key tile and its scores, from scratch memory; and the rest of the memory."""
    k, rest = take(scratch, block_n, d)
    v, rest = take(rest, block_n, d_v)
    p, rest = take(rest, block_n, block_m)
    ds, rest = take(rest, block_n, block_m)
    slope, rest = take(rest, block_n, block_m)
    return Pairs(k, v, p, ds, slope), rest


@njit
def load_queries(tile, q, do, o, lse, dlse, has_dlse, scale, options, b, h, i_first, i_stop, n_k, bfloat16):
    """Load Q_i, dO_i and lse_i, and compute delta = rowsum(dO * O) - dlse.

    A query that sees no key contributes nothing, so nothing of it is kept: not even NaN, which 0 would not hide.
    """
    load(tile.q, q[b, h, i_first:i_stop], bfloat16)
    scale_by(tile.q, scale)
    load(tile.do, do[b, h, i_first:i_stop], bfloat16)
    load(tile.o, o[b, h, i_first:i_stop], bfloat16)
    fill(tile.lse, np.inf)          # exp(s - lse) is 0 there, whatever s
    fill(tile.delta, 0)
    for r in range(i_stop - i_first):
        i = i_first + r
        is_empty = lse[b, h, i] == -np.inf
        # With a sink the lse of an empty row is finite. It only matters where there is something to hide.
        if not is_empty and not (is_finite(tile.q[r:r + 1]) and is_finite(tile.do[r:r + 1])):
            is_empty = not sees_any(options, b, h, i, n_k)
        if is_empty:
            row_of(tile.q, r)[:] = 0
            row_of(tile.do, r)[:] = 0
        if lse[b, h, i] != -np.inf:
            tile.lse[0, r] = lse[b, h, i]
            tile.delta[0, r] = dot(tile.do, tile.o, r)
            if has_dlse:
                tile.delta[0, r] -= dlse[b, h, i]
    transpose(tile.q_t, tile.q)
    transpose(tile.do_t, tile.do)


@njit
def load_keys(tile, k, v, options, b, h, g, i_first, i_stop, j, j_stop, bfloat16):
    """Load K_j and V_j, without the keys that no query of the tile sees; return whether any pair is hidden."""
    load(tile.k, k[b, g, j:j_stop], bfloat16)
    load(tile.v, v[b, g, j:j_stop], bfloat16)
    first, stop = shared_keys(i_first, i_stop, options.offset, options.left, options.right, j_stop)
    has_hidden = j < first or j_stop > stop or options.has_mask or options.has_bias
    if has_hidden and not (is_finite(tile.k) and is_finite(tile.v)):
        for r in range(j_stop - j):
            if not is_seen_by_any(options, b, h, i_first, i_stop, j + r):
                row_of(tile.k, r)[:] = 0
                row_of(tile.v, r)[:] = 0
    return has_hidden


@njit
def seeing_columns(options, i_first, i_stop, j, j_stop, block):
    """Columns of the tile, in whole blocks at the start, whose queries see some of the keys."""
    first, stop = seeing_queries(j, j_stop, options.offset, options.left, options.right, i_stop)
    return max(first - i_first, 0) // block * block, stop - i_first


@njit
def recompute(queries, pairs, options, has_hidden, b, h, i, j, keys, first, stop, n_q):
    """P and dS of the tile's columns from `first` to `stop`, into ``pairs.p`` and ``pairs.ds``.

    dS is the gradient at the scores after the softcap, whose derivative is in ``pairs.slope``.
    """
    rows, last = round_up(keys, ROWS), round_up(stop, width(pairs.p))
    p, ds = pairs.p[:rows, first:last], pairs.ds[:rows, first:last]

    # S = Q K^T
    multiply(p, pairs.k, queries.q_t[:, first:last])
    if options.softcap > 0:
        softcap_slope(pairs.slope[:rows, first:last], p, options)
    shape_scores(p[:keys], options, b, h, i + first, j, n_q)

    # mask
    if has_hidden:
        hide(p[:keys], options, b, h, i + first, j, n_q)

    # dP = dO V^T
    multiply(ds, pairs.v, queries.do_t[:, first:last])

    # P = exp(S - L), dS = P (dP - D)
    score_gradient(p[:keys], ds[:keys], queries.lse[:, first:last], queries.delta[:, first:last])
    fill(p[keys:], 0)
    fill(ds[keys:], 0)


@njit
def score_gradient(p, ds, lse, delta):
    """Turn S^T into P^T and dP^T into dS^T in place. Where p is 0, ds is too: a hidden dp may be NaN."""
    for r in range(p.shape[0]):
        for c in range(0, p.shape[1], width(p)):
            weight = exp(load_row(p, r, c) - load_row(lse, 0, c))
            gradient = weight * (load_row(ds, r, c) - load_row(delta, 0, c))
            store(weight, p, r, c)
            store(unless_zero(weight, gradient), ds, r, c)
