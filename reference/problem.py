"""What every function of the reference needs: a checked call, and its options as two hooks.

Inside, all arrays are (batch, heads, n, d): lower ranks get axes of length 1, and each kv head is
repeated for the query heads that read it.  A tile is named by two slices, `rows` of q and `cols`
of k and v.  Hook 1, `Problem.score`, is what happens to one score; hook 2, `Problem.hide`, is which
keys a query may see.  No algorithm knows more about the options than these two.
"""

import math

import numpy as np

from .softmax import as_real, exp_diff, quiet

ALL = slice(None)


def tiles(n, block):
    """The slices of `block` consecutive indices that cover range(n); the last may be shorter."""
    if block < 1:
        raise ValueError(f"a tile needs at least 1 row, got a block of {block}")
    return [slice(start, min(start + block, n)) for start in range(0, n, block)]


class Problem:
    """One call of attention: checked, in one shape and one dtype, with its options as two hooks.

    Parameters
    ----------
    q : array of shape (batch, heads, n_q, d)
    k : array of shape (batch, kv_heads, n_k, d)
    v : array of shape (batch, kv_heads, n_k, d_v)
        Any real dtype; also (heads, n, d) and (n, d), and then the options drop the same axes.
        `heads` is a multiple of `kv_heads`: query head h reads kv head h // (heads // kv_heads).
        batch, n_q and n_k may be 0.
    scale : float, optional
        Factor on q·k; 1 / sqrt(d) if not given.
    causal : False, True, "bottom_right" or "top_left"
        Query i sees the keys j <= i', where i' = i for "top_left" and i + n_k - n_q otherwise::

            n_q = 2, n_k = 4     bottom_right  1 1 1 0    top_left  1 0 0 0
                                               1 1 1 1              1 1 0 0

    window : (left, right), optional
        Query i sees the keys i' - left <= j <= i' + right; None or -1 leaves a side open.
    softcap : float > 0, optional
        s becomes softcap * tanh(s / softcap), after `scale` and before everything else.
    alibi_slopes : array of shape (heads,) or (batch, heads), optional
        Adds -slope * abs(i' - j).
    bias : array that broadcasts to (batch, heads, n_q, n_k), optional
        Is added; -inf hides.
    mask : bool array that broadcasts to (batch, heads, n_q, n_k), optional
        True lets a query see a key.
    sinks : array of shape (heads,), optional
        One more logit for each row, which takes probability and gives nothing.
    dtype : dtype or "input"
        What every array in memory is rounded to: q, k, v, o, the gradients, and p and ds before
        they are multiplied.  16-bit types are multiplied and summed in float32, all others in
        themselves.  float64 is the oracle; "input" is what a plain program in the dtype of q, k
        and v gets, the yardstick for rounding errors.

    Raises
    ------
    ValueError
        If shapes do not fit, or an option has a value that it cannot have.
    TypeError
        If an array is not real, `mask` not bool, or `dtype="input"` has no one float dtype to take.

    Examples
    --------
    >>> problem = Problem(np.ones((2, 4)), np.ones((3, 4)), np.ones((3, 5)), causal=True)
    >>> s = problem.score(problem.q, problem.k)
    >>> problem.hide(s)[0, 0]
    array([[  2.,   2., -inf],
           [  2.,   2.,   2.]])
    """

    @quiet
    def __init__(self, q, k, v, *, scale=None, causal=False, window=None, softcap=None,
                 alibi_slopes=None, bias=None, mask=None, sinks=None, dtype=np.float64):
        q, k, v = as_real("q", q), as_real("k", k), as_real("v", v)
        _check_shapes(q, k, v)
        self.shapes = q.shape, k.shape, v.shape
        self.leading = q.shape[:-2]  # as the caller has it: (batch, heads), (heads,) or ()
        self.batch, self.heads = (1, 1, *self.leading)[-2:]
        self.kv_heads = (1, *k.shape[:-2])[-1]
        self.n_q, self.n_k, self.d, self.d_v = q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]

        if dtype == "input":
            _check_one_float_dtype(q, k, v)
        self.stored = _stored(q, dtype)
        self.computed = np.dtype(np.float32) if self.stored.itemsize == 2 else self.stored
        group = self.heads // self.kv_heads
        self.q = self._lift(q)
        self.k = self._lift(k).repeat(group, axis=1)
        self.v = self._lift(v).repeat(group, axis=1)

        self.scale, self.softcap = _factors(scale, softcap, self.d)
        self.offset, self.left, self.right = _band(self.n_q, self.n_k, causal, window)

        # An option that is not given takes the value that changes nothing.
        self.slopes = self._per_head("alibi_slopes", alibi_slopes, 0, self.leading)
        self.sinks = self._per_head("sinks", sinks, -np.inf, self.leading[-1:])
        numbers = as_real("bias", 0 if bias is None else bias).astype(self.computed)
        flags = np.asarray(True if mask is None else mask)
        if flags.dtype != bool:
            raise TypeError(f"mask must be bool (True = may attend), got {flags.dtype}; "
                            "use mask.astype(bool), or bias for numbers that are added")
        self.bias = self._per_score("bias", numbers)
        self._per_score("mask", flags)
        self.allowed = self._per_score("mask and bias", flags & (numbers != -np.inf))

        # Shape and dtype of the gradients dbias and dsinks; None if there is no such option.
        self.extras = {name: None if x is None else (np.shape(x), _stored(np.asarray(x), dtype))
                       for name, x in (("bias", bias), ("sinks", sinks))}

    def _lift(self, x):
        """`x` rounded to what memory holds, in the computing dtype, with 4 axes."""
        x = self.rounded(x.astype(self.computed))
        return x.reshape((1,) * (2 - len(self.leading)) + x.shape)

    def _per_head(self, name, x, default, most):
        """An option with one number for each head as (batch, heads, 1, 1)."""
        x = as_real(name, np.full(most, default) if x is None else x).astype(self.computed)
        if x.shape not in (most, most[-1:]):
            raise ValueError(f"{name} must have shape {most[-1:]}"
                             f"{f' or {most}' if len(most) > 1 else ''}, got {x.shape}")
        return np.broadcast_to(x, (self.batch, self.heads))[..., None, None]

    def _per_score(self, name, x):
        """An option with one number for each score as (batch, heads, n_q, n_k), without a copy."""
        shape = (*self.leading, self.n_q, self.n_k)
        try:
            x = np.broadcast_to(x, shape)
        except ValueError:
            raise ValueError(f"{name} must broadcast to {shape}, got {x.shape}") from None
        return np.broadcast_to(x, (self.batch, self.heads, self.n_q, self.n_k))

    @quiet
    def rounded(self, x):
        """`x` as it would come back from memory."""
        return x.astype(self.stored).astype(self.computed)

    def like_q(self, name, x, *last):
        """An array of shape (batch, heads, n_q, *last), checked and lifted like q."""
        x, shape = as_real(name, x), (*self.leading, self.n_q, *last)
        if x.shape != shape:
            raise ValueError(f"{name} must have shape {shape}, got {x.shape}")
        return self._lift(x) if last else x.reshape(
            self.batch, self.heads, self.n_q, 1).astype(self.computed)

    def zeros(self, n, width):
        """A new (batch, heads, n, width) array of zeros to sum in."""
        return np.zeros((self.batch, self.heads, n, width), self.computed)

    def start(self, rows=ALL):
        """m and l of `rows` before any key, (batch, heads, rows, 1).

        A sink is a key that was seen first: m = sink and l = 1.  Without one, m = -inf and l = 0.
        """
        n = len(range(self.n_q)[rows])
        m = np.broadcast_to(self.sinks, (self.batch, self.heads, n, 1))
        return m, exp_diff(m, m)

    def distance(self, rows, cols):
        """i' - j for one tile, (rows, cols)."""
        i, j = np.arange(self.n_q)[rows] + self.offset, np.arange(self.n_k)[cols]
        return i[:, None] - j[None, :]

    @quiet
    def score(self, q_i, k_j, rows=ALL, cols=ALL):
        """Hook 1: S = Q K^T with scale, softcap, ALiBi and bias, (batch, heads, rows, cols)."""
        s = self.scale * (q_i @ k_j.mT)
        if self.softcap is not None:
            s = self.softcap * np.tanh(s / self.softcap)
        s = s - self.slopes * np.abs(self.distance(rows, cols)).astype(self.computed)
        return s + self.bias[..., rows, cols]

    @quiet
    def score_derivative(self, q_i, k_j):
        """The derivative of hook 1 by the bare product q·k: scale (1 - tanh^2)."""
        if self.softcap is None:
            return self.scale
        return self.scale * (1 - np.tanh(self.scale * (q_i @ k_j.mT) / self.softcap) ** 2)

    def hide(self, s, rows=ALL, cols=ALL):
        """Hook 2: `s` with -inf wherever causal, window, mask or a bias of -inf hide the key."""
        distance = self.distance(rows, cols)
        visible = (-self.right <= distance) & (distance <= self.left)
        return np.where(self.allowed[..., rows, cols] & visible, s, -np.inf)

    @quiet
    def weighted_sum(self, p, v, visible):
        """p @ v over the visible pairs alone, with p rounded as for any product.

        A plain product would let a hidden NaN or Inf in: its weight is 0, and 0 * NaN is NaN.  So
        rows of v that hold one are added by themselves, to those who see them.
        """
        p, wild = self.rounded(p), ~np.isfinite(v).all(axis=(0, 1, 3))
        o = p[..., ~wild] @ v[..., ~wild, :]
        for j in np.flatnonzero(wild):
            term = p[..., j, None] * v[..., None, j, :]
            o = o + np.where(visible[..., j, None], term, 0)
        return o

    @quiet
    def output(self, o, lse, return_lse):
        """o, or o and lse, in the caller's shape; lse stays in the computing dtype."""
        o = o.reshape(*self.leading, self.n_q, self.d_v).astype(self.stored)
        return (o, lse.reshape(*self.leading, self.n_q)) if return_lse else o


def _check_shapes(q, k, v):
    """Raise a ValueError unless the shapes of q, k and v fit together."""
    shapes = f"got q {q.shape}, k {k.shape}, v {v.shape}"
    if not q.ndim == k.ndim == v.ndim or q.ndim not in (2, 3, 4):
        raise ValueError(f"q, k and v must all have 2, 3 or 4 axes, {shapes}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q and k must have the same head dimension, {shapes}")
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"k and v may differ in their last axis only, {shapes}")
    if q.shape[:-3] != k.shape[:-3]:
        raise ValueError(f"q and k must have the same batch size, {shapes}")
    if 0 in (q.shape[-1], v.shape[-1], *q.shape[-3:-2], *k.shape[-3:-2]):
        raise ValueError(f"heads and head dimensions must be at least 1, {shapes}")
    if q.ndim > 2 and q.shape[-3] % k.shape[-3]:
        raise ValueError(f"the heads of q must be a multiple of those of k and v, {shapes}")


def _check_one_float_dtype(q, k, v):
    """Raise a TypeError unless q, k and v share one dtype that is not an integer one."""
    if not q.dtype == k.dtype == v.dtype or q.dtype.kind in "biu":
        raise TypeError('dtype="input" needs q, k and v of one float dtype, '
                        f"got {q.dtype}, {k.dtype}, {v.dtype}")


def _stored(x, dtype):
    """The dtype that belongs to `x` in memory."""
    return np.dtype(x.dtype if dtype == "input" else dtype)


def _factors(scale, softcap, d):
    """scale and softcap, checked."""
    scale = 1 / math.sqrt(d) if scale is None else float(scale)
    if not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap must be None or a finite number > 0, got {softcap}")
    return scale, None if softcap is None else float(softcap)


def _band(n_q, n_k, causal, window):
    """(offset, left, right) such that i' = i + offset sees i' - left <= j <= i' + right."""
    if causal not in (False, True, "bottom_right", "top_left"):
        raise ValueError('causal must be False, True, "bottom_right" or "top_left", '
                         f"got {causal!r}")
    left, right = (None, None) if window is None else window
    left, right = (math.inf if side is None or side == -1 else side for side in (left, right))
    if min(left, right) < 0:
        raise ValueError(f"window must be (left, right), each >= 0, -1 or None, got {window}")
    offset = 0 if causal == "top_left" else n_k - n_q
    return offset, left, min(right, 0) if causal else right
