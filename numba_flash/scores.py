"""The two hooks that carry all options: what happens to one score, and which keys a tile of queries may see.

Plain Python functions of scalars. The CPU engine compiles them with ``@njit``, the CUDA kernels as device functions,
and the CUDA simulator runs them as they are.

Which pairs attend is a band around the (shifted) diagonal, whatever mix of `causal` and `window` was asked for::

    query i sees key j  if  i + offset - left <= j <= i + offset + right

            j -->                    n_q = 3, n_k = 5, offset = 2 (bottom right), left = 1, right = 0
          . # # . .
      i   . . # # .
          . . . # #

so a tile of queries has one contiguous range of keys that some of its rows see, and inside of it one (perhaps empty)
range that all of its rows see, where no pair needs to be checked.
"""

from functools import lru_cache
from math import tanh


def squash(s, cap):
    """A score into (-cap, cap)."""
    return cap * tanh(s / cap)


@lru_cache(maxsize=None)
def make_score(softcap, alibi, bias, squash):
    """Build the score hook and its derivative for one choice of options.

    The flags are compile-time constants, so a kernel holds code for the options of its call and for no others.

    Parameters
    ----------
    softcap, alibi, bias : bool
        Which options the call has.
    squash : function
        The function above, compiled for the caller, or one that does the same with what the caller's hardware is
        fast at.

    Returns
    -------
    score : function
        ``score(s, cap, slope, distance, b)``: the score that goes into softmax, from ``s = scale * q·k``, with
        ``distance = |i + offset - j|`` and ``b`` the bias of the pair. All in one floating dtype.
    score_grad : function
        ``score_grad(s, cap)``: its derivative with respect to ``s``.
    """

    def score(s, cap, slope, distance, b):
        if softcap:
            s = squash(s, cap)
        if alibi:
            s = s - slope * distance
        if bias:
            s = s + b
        return s

    def score_grad(s, cap):
        if softcap:
            t = tanh(s / cap)
            one = cap / cap          # the literal 1 is an integer, with which Numba would compute in float64
            return (one - t) * (one + t)
        return 1

    return score, score_grad


def visible(i, j, offset, left, right):
    """Whether the band lets query i see key j."""
    return i + offset - left <= j and j <= i + offset + right


def seen_keys(i_first, i_stop, offset, left, right, n_k):
    """Keys that some query of rows [i_first, i_stop) sees, as (first, stop); empty if first >= stop."""
    return max(0, i_first + offset - left), min(n_k, i_stop + offset + right)


def shared_keys(i_first, i_stop, offset, left, right, n_k):
    """Keys that every query of rows [i_first, i_stop) sees, as (first, stop); empty if first >= stop."""
    return max(0, i_stop - 1 + offset - left), min(n_k, i_first + offset + right + 1)


def seeing_queries(j_first, j_stop, offset, left, right, n_q):
    """Queries that see some key of rows [j_first, j_stop), as (first, stop): `seen_keys` read by columns."""
    return max(0, j_first - offset - right), min(n_q, j_stop - offset + left)
