"""The engine `standard`: attention as it is written without a fused kernel, each operation its own pass.

New idea: none; the baseline that everything else is measured against. It is what a NumPy or CuPy user writes today:
matrix product (BLAS, cuBLAS), scale, mask, softmax, matrix product, with S and P, (batch, heads, n_q, n_k), in memory.
16-bit inputs are converted first, so that scores are neither rounded nor overflow before they are scaled.

A hidden value is multiplied by zero, so a NaN or Inf in it reaches rows that do not see it, if other rows do; a key
that no row sees is cleared beforehand and never leaks.
"""

import numpy as np

from . import arrays


def why_not(problem, backward=False):
    """None: any machine, any problem, if memory suffices."""
    return None


def forward(problem, operands, o, lse):
    """Fill o and lse.

    Parameters
    ----------
    problem : Problem
    operands : Operands
    o, lse : array
        As `Problem.o_shape` and `Problem.lse_shape`.
    """
    xp = arrays.namespace(o)
    with np.errstate(all="ignore"):
        q, k, v = _by_kv_head(problem, operands.q), *(_per_kv_head(x, problem) for x in (operands.k, operands.v))
        s, allowed = _scores(problem, operands, q, k, xp)[1:]
        v = _clear(v, allowed, -2, xp)
        m = s.max(-1, keepdims=True)
        if problem.sinks:
            sinks = _by_kv_head(problem, operands.sinks[None, :, None, None])
            m = xp.maximum(m, sinks)
        m = xp.where(m == -np.inf, xp.zeros_like(m), m)      # an empty row: exp(-inf - 0) = 0, not exp(-inf + inf)
        p = xp.exp(xp.subtract(s, m, out=s), out=s)
        l = p.sum(-1, keepdims=True)
        if problem.sinks:
            l += xp.exp(sinks - m)
        acc = p @ v
        acc /= xp.where(l == 0, xp.ones_like(l), l)
        o[...] = acc.reshape(problem.o_shape).astype(problem.dtype)
        lse[...] = (m + xp.log(l)).reshape(problem.lse_shape)


def backward(problem, operands, do, dlse, o, lse, gradients):
    """Fill the gradients, from o and lse.

    Parameters
    ----------
    problem : Problem
    operands : Operands
    do, o : array of `Problem.o_shape`
    dlse : array of `Problem.lse_shape`, or None
    lse : array of `Problem.lse_shape`
    gradients : Gradients
    """
    xp, accumulator = arrays.namespace(o), problem.accumulator
    with np.errstate(all="ignore"):
        q, do, o = (_by_kv_head(problem, x).astype(accumulator) for x in (operands.q, do, o))
        k, v = (_per_kv_head(x, problem) for x in (operands.k, operands.v))
        lse = _by_kv_head(problem, lse[..., None])
        raw, s, allowed = _scores(problem, operands, q, k, xp)
        k, v = (_clear(x, allowed, -2, xp) for x in (k, v))
        q, do, o = (_clear(x, allowed, -1, xp) for x in (q, do, o))

        delta = (do * o).sum(-1, keepdims=True)
        if dlse is not None:
            delta -= _by_kv_head(problem, dlse[..., None])
        hidden = s == -np.inf
        p = xp.exp(s - lse)
        xp.copyto(p, 0, where=hidden)                        # by choice and not by product: 0 * NaN is NaN
        gradients.dv[...] = (p.swapaxes(-1, -2) @ do).sum(2).astype(problem.dtype)
        ds = do @ v.swapaxes(-1, -2)
        ds -= delta
        ds *= p
        xp.copyto(ds, 0, where=hidden)
        if gradients.dbias is not None:
            _sum_into(gradients.dbias, ds.reshape(problem.s_shape))
        if gradients.dsinks is not None:
            sinks = _by_kv_head(problem, operands.sinks[None, :, None, None])
            p_sink = xp.where(lse == -np.inf, 0, xp.exp(sinks - lse))
            gradients.dsinks[...] = -xp.where(p_sink == 0, 0, p_sink * delta).sum((0, 3, 4)).reshape(problem.heads)
        if problem.softcap is not None:
            ds *= 1 - xp.tanh(raw / problem.softcap)**2
            xp.copyto(ds, 0, where=hidden)
        ds *= problem.scale
        gradients.dq[...] = (ds @ k).reshape(problem.q_shape).astype(problem.dtype)
        gradients.dk[...] = (ds.swapaxes(-1, -2) @ q).sum(2).astype(problem.dtype)


def _by_kv_head(problem, x):
    """(batch, heads, ...) as (batch, kv_heads, group, ...), so that a group meets its one key/value head."""
    return x.reshape(x.shape[0], problem.kv_heads, problem.group, *x.shape[2:])


def _per_kv_head(x, problem):
    return x[:, :, None].astype(problem.accumulator)


def _scores(problem, operands, q, k, xp):
    """Scores before and after the options, and which pairs attend (None if all do)."""
    raw = q.astype(problem.accumulator) @ k.swapaxes(-1, -2)
    raw *= problem.scale
    s = raw
    if problem.softcap is not None:
        s = problem.softcap * xp.tanh(s / problem.softcap)
    i = xp.arange(problem.n_q)[:, None] + problem.offset
    j = xp.arange(problem.n_k)[None, :]
    if problem.alibi:
        slopes = _by_kv_head(problem, operands.alibi_slopes[:, :, None, None])
        s = s - slopes * abs(i - j).astype(problem.accumulator)
    allowed = None
    if problem.bias:
        bias = _by_kv_head(problem, operands.bias)
        s = s + bias
        allowed = bias != -np.inf
    if problem.mask:
        allowed = _and(allowed, _by_kv_head(problem, operands.mask))
    if problem.has_band:
        allowed = _and(allowed, ((i - problem.left <= j) & (j <= i + problem.right))[None, None, None])
    if allowed is not None:
        s = xp.where(allowed, s, s.dtype.type(-np.inf))
    return raw, s, allowed


def _and(a, b):
    return b if a is None else a & b


def _clear(x, allowed, axis, xp):
    """Zero the rows of x that take no part: keys that no query sees (axis -2), or queries that see no key (-1)."""
    if allowed is None:
        return x
    takes_part = allowed.any(axis)
    if axis == -2:
        takes_part = takes_part.any(2, keepdims=True)        # a key is shared by its group of query heads
    return xp.where(takes_part[..., None], x, x.dtype.type(0))


def _sum_into(total, x):
    """Sum x over the axes along which `total` was broadcast."""
    axes = tuple(axis for axis in range(x.ndim) if total.shape[axis] != x.shape[axis])
    total[...] = x.sum(axes, keepdims=True) if axes else x
