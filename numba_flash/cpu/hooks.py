"""The two hooks of `scores.py` on tiles of transposed scores: what happens to a score, which keys a query may see.

Every option is one pass over a tile, made only by calls that have it, so that one kernel serves all of them.
"""

from collections import namedtuple

import numpy as np
from numba import njit
from numba.extending import register_jitable

from ..scores import make_score, seeing_queries, seen_keys, shared_keys, squash, visible
from .simd import load_row, store, width
from .tiles import row_of

for _function in (visible, seen_keys, shared_keys, seeing_queries):
    register_jitable(_function)

_softcap, _softcap_grad = (njit(f) for f in make_score(True, False, False, njit(squash)))
_alibi, _ = (njit(f) for f in make_score(False, True, False, None))
_bias, _ = (njit(f) for f in make_score(False, False, True, None))

Options = namedtuple("Options", "offset left right softcap has_alibi has_bias has_mask alibi_slopes bias mask")
Options.__doc__ = """The options that change scores, as the kernels get them; `softcap` is 0 where there is none."""


@njit
def shape_scores(s, options, b, h, i_first, j_first, n_q):
    """Apply softcap, ALiBi and bias to S^T (keys x queries) in place; queries past the end get what they get."""
    zero = s.dtype.type(0)
    columns = min(s.shape[1], n_q - i_first)
    if options.softcap > 0:
        for r in range(s.shape[0]):
            for c in range(0, s.shape[1], width(s)):
                store(_softcap(load_row(s, r, c), options.softcap, zero, zero, zero), s, r, c)
    if options.has_alibi:
        slope = options.alibi_slopes[b, h]
        for r in range(s.shape[0]):
            row = row_of(s, r)
            for c in range(columns):
                distance = s.dtype.type(abs(i_first + c + options.offset - j_first - r))
                row[c] = _alibi(row[c], zero, slope, distance, zero)
    if options.has_bias:
        bias = options.bias[b, h, i_first:, j_first:]
        for r in range(s.shape[0]):
            row = row_of(s, r)
            for c in range(columns):
                # A bias of -inf hides the key, whose score may be NaN.
                row[c] = bias[c, r] if bias[c, r] == -np.inf else _bias(row[c], zero, zero, zero, bias[c, r])


@njit
def softcap_slope(slope, s, options):
    """The derivative of the softcap for a tile of S^T that it has not been applied to yet."""
    for r in range(s.shape[0]):
        for c in range(0, s.shape[1], width(s)):
            store(_softcap_grad(load_row(s, r, c), options.softcap), slope, r, c)


@njit
def hide(s, options, b, h, i_first, j_first, n_q):
    """Put -inf where the band or the mask does not let a query see a key."""
    columns = min(s.shape[1], n_q - i_first)
    for r in range(s.shape[0]):
        row = row_of(s, r)
        first, stop = seeing_queries(j_first + r, j_first + r + 1, options.offset, options.left, options.right, n_q)
        row[:min(max(first - i_first, 0), columns)] = -np.inf
        row[max(stop - i_first, 0):columns] = -np.inf
    if options.has_mask:
        mask = options.mask[b, h, i_first:, j_first:]
        for r in range(s.shape[0]):
            row = row_of(s, r)
            for c in range(columns):
                x = row[c]      # read in any case: a branch that nobody can predict would cost more
                row[c] = x if mask[c, r] else -np.inf


@njit
def is_seen(options, b, h, i, j):
    """Whether query i sees key j, as far as band, mask and bias go."""
    return (visible(i, j, options.offset, options.left, options.right)
            and not (options.has_mask and not options.mask[b, h, i, j])
            and not (options.has_bias and options.bias[b, h, i, j] == -np.inf))


@njit
def sees_any(options, b, h, i, n_k):
    """Whether query i sees any key at all."""
    first, stop = seen_keys(i, i + 1, options.offset, options.left, options.right, n_k)
    for j in range(first, stop):
        if is_seen(options, b, h, i, j):
            return True
    return False


@njit
def is_seen_by_any(options, b, h, i_first, i_stop, j):
    """Whether any query of a tile sees key j."""
    for i in range(i_first, i_stop):
        if is_seen(options, b, h, i, j):
            return True
    return False
