"""What the backward kernels of both engines do with a tile of scores: transposed, keys down and queries across."""

from functools import lru_cache
from math import inf

from ..compile import device
from ..ptx.arithmetic import exp2, fma, quotient
from ..ptx.assembly import int32
from ..ptx.fragments import elementwise, first_column, first_row, make_rows_down, rowwise
from ..signatures import real_type
from .softmax import hide, make_squash, scaled, visible
from .steps import less, with_slope

first_row, first_column = device(first_row), device(first_column)


@rowwise
def until(position, key, left, n_k):
    """Where the queries end that see the row's key."""
    return position + left + 1 if key < n_k else 0


def probability(s, factor, lse):
    """exp(s - lse), lse in base 2."""
    return exp2(fma(s, factor, -lse))


def score_gradient(dp, p, delta):
    """dS = P (dP - delta)."""
    return p * (dp - delta)


def less_delta(dp, delta):
    """dP - delta."""
    return dp - delta


@lru_cache(maxsize=None)
def make_transposed_score_tile(spec, block_m, parts, thread):
    """Build ``score_tile(s, i, j, slope, scale, cap, band, all_first, all_stop)``.

    Parameters
    ----------
    spec : Spec
    block_m : int
        Columns of the tile.
    parts : int
        Of a fragment.
    thread : device function
        The thread's number in its group.

    Notes
    -----
    Queries past the last one need no mask: with +inf for their lse, P is 0.
    """
    softcap, alibi, hook, real = spec.softcap, spec.alibi, spec.hook, real_type(spec.dtype)
    down, squash = make_rows_down(parts), make_squash(spec.dtype)

    @device
    def score_tile(s, i, j, slope, scale, cap, band, all_first, all_stop):
        """From ``k·q`` to scores, hidden ones -inf; `i` is the tile's first query, `j` the group's first key."""
        n_k, offset, left, right = band
        if softcap:
            s = squash(s, scale, cap)
        elif hook:
            s = scaled(s, scale)
        if alibi:
            number = thread()
            its_first = real(int32(j + first_row(number) - offset - i - first_column(number)))
            s = with_slope(s, real(0), down(its_first), slope)
        if i < all_first or i + block_m > all_stop:
            number = thread()
            key = down(int32(j + first_row(number)))
            position = less(key, int32(offset + i + first_column(number)))      # of the query at this key
            s = hide(s, int32(0), visible(less(position, int32(right)), until(position, key, int32(left), n_k)),
                     real(-inf))
        return s

    return score_tile


@lru_cache(maxsize=None)
def make_damped(alibi):
    """Build ``damped(x, column, s, distance, slope, cap)``: x times the derivative of a score under a softcap."""
    @elementwise
    def damped(x, column, s, distance, slope, cap):
        if alibi:
            s += slope * abs(distance - column)
        t = quotient(s, cap)
        one = type(x)(1)
        return x * ((one - t) * (one + t)) if s != type(x)(-inf) else type(x)(0)

    return damped
