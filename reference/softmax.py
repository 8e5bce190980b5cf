"""Three ways to a softmax: two passes that overflow, three that do not, and two that do not.

The recurrence of `online_softmax` is what makes attention by tiles possible: it never needs to have
seen the whole row.  All three follow Milakov and Gimelshein, "Online normalizer calculation for
softmax", arXiv 1805.02867, whose d is our l.

One rule holds in the whole reference: an entry of -inf is *hidden*.  It weighs exactly 0, in every
row, and a row with nothing else in it is all zeros, not NaN.  A NaN that is not hidden comes out.
"""

import numpy as np

# What is hidden is computed with and then thrown away: a NaN met on the way is no news.
quiet = np.errstate(divide="ignore", invalid="ignore", over="ignore")


@quiet
def exp_diff(x, m):
    """exp(x - m), and 0 where x is hidden, even if m is -inf too (nothing seen so far) or NaN."""
    return np.where(x == -np.inf, 0, np.exp(x - m))


@quiet
def divide(x, l):
    """x / l, and 0 where x is 0, even if l is 0 too (a row that sees nothing) or NaN."""
    return np.where(x == 0, 0, x / l)


@quiet
def log_sum(m, l):
    """m + log(l): the log of a sum that is held as l * exp(m); -inf for an empty sum."""
    return m + np.log(l)


def as_real(name, x):
    """`x` as a NumPy array, or a TypeError if it does not hold real numbers."""
    x = np.asarray(x)
    if not np.can_cast(x.dtype, np.float64, casting="same_kind"):
        raise TypeError(f"{name} must hold real numbers, got dtype {x.dtype}")
    return x


def _rows(x):
    """`x` as float64 with at least one axis."""
    x = as_real("x", x).astype(np.float64)
    if x.ndim == 0:
        raise ValueError("x must have at least one axis, got a scalar; reshape it to (1,)")
    return x


def naive_softmax(x):
    """Softmax over the last axis as the formula says: exp(x) / sum(exp(x)).

    Algorithm 1 of arXiv 1805.02867: two passes, one for the sum and one for the quotient.  It
    overflows: exp(710) is already infinite in float64, and exp(12) in float16.

    Parameters
    ----------
    x : array of shape (..., n), any real dtype

    Returns
    -------
    p : float64 array of shape (..., n)

    Raises
    ------
    TypeError
        If `x` does not hold real numbers.
    ValueError
        If `x` is a scalar.

    Examples
    --------
    >>> naive_softmax([0.0, 0.0, -np.inf])
    array([0.5, 0.5, 0. ])
    >>> naive_softmax([1000.0, 1000.0])
    array([nan, nan])
    """
    w = exp_diff(_rows(x), 0)
    return divide(w, w.sum(axis=-1, keepdims=True))


def safe_softmax(x):
    """Softmax over the last axis with the row maximum taken off first: nothing overflows.

    Algorithm 2 of arXiv 1805.02867: three passes over x, for m, for l and for the quotient.

    Parameters, returned value and errors are those of `naive_softmax`.

    Examples
    --------
    >>> safe_softmax([1000.0, 1000.0])
    array([0.5, 0.5])
    >>> safe_softmax([-np.inf, -np.inf])
    array([0., 0.])
    """
    x = _rows(x)
    m = x.max(axis=-1, keepdims=True, initial=-np.inf)
    l = exp_diff(x, m).sum(axis=-1, keepdims=True)
    return divide(exp_diff(x, m), l)


def online_softmax(x, *, return_steps=False):
    """Softmax over the last axis in two passes: maximum and sum are found together.

    Algorithm 3 of arXiv 1805.02867.  When a larger maximum turns up, everything summed before it
    was measured against the wrong one, and a single factor puts that right::

        m_i = max(m_{i-1}, x_i)
        l_i = l_{i-1} exp(m_{i-1} - m_i) + exp(x_i - m_i)

    Parameters
    ----------
    x : array of shape (..., n), any real dtype
    return_steps : bool
        Also return every m_i and l_i.

    Returns
    -------
    p : float64 array of shape (..., n)
    m, l : float64 arrays of shape (..., n)
        Only with `return_steps`.  The last ones are the maximum and the sum of the whole row.

    Raises
    ------
    TypeError, ValueError
        As `naive_softmax`.

    Examples
    --------
    >>> p, m, l = online_softmax([0.0, 0.0, np.log(2.0)], return_steps=True)
    >>> p
    array([0.25, 0.25, 0.5 ])
    >>> l  # the third step halves what was summed before it
    array([1., 2., 2.])
    """
    x = _rows(x)
    m, l = np.empty_like(x), np.empty_like(x)
    m_i, l_i = np.full(x.shape[:-1], -np.inf), np.zeros(x.shape[:-1])
    for i in range(x.shape[-1]):
        m_old, m_i = m_i, np.maximum(m_i, x[..., i])
        l_i = l_i * exp_diff(m_old, m_i) + exp_diff(x[..., i], m_i)
        m[..., i], l[..., i] = m_i, l_i
    p = divide(exp_diff(x, m_i[..., None]), l_i[..., None])
    return (p, m, l) if return_steps else p
