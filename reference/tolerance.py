"""How right is right: the one rule by which tests, ``numba_flash check`` and benchmarks judge a result.

A result may be off by `factor` times what the same formula is off by when it is evaluated naively in the dtype of its
inputs (2 for o and lse, 3 for gradients), plus a small absolute term. The oracle is `standard_attention` in float64,
the naive evaluation ``standard_attention(..., dtype="input")``. Gradients have two naive evaluations, and the worse
counts: with delta as rowsum(P dP), and as rowsum(dO O) from the o that was stored, as all fused kernels do.

The absolute term is one rounding of the largest value, and what a few roundings in the accumulator's precision do,
which the naive evaluation may be spared by luck: of the scores (an error of a large score is a factor on p), and of the
terms of P (dP - delta), which cancel. For 16-bit types there is also what rounding the stored o does to delta.
"""

import numpy as np

from .attention import standard_attention
from .backward import flash_attention_2_backward, standard_attention_backward

# One rounding of a value in each dtype, about.
ROUNDING = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 2e-6, "float64": 1e-14}


def error_and_limit(got, oracle, naive, dtype, factor=2, absolute=0.0):
    """Largest error of a result, and what it may be.

    Parameters
    ----------
    got : array
        The result to judge.
    oracle : array of the same shape
        The right values in float64.
    naive : list of arrays of the same shape
        What naive evaluations make of them; the worst of them counts.
    dtype : dtype
        Of the inputs.
    factor : float
        How many times the naive error is allowed.
    absolute : float
        Further error that is allowed.

    Returns
    -------
    error, limit : float
        The result passes if ``error <= limit``. NaN and infinities must stand where the oracle's do, or error is inf.

    Examples
    --------
    >>> error_and_limit(np.array([1.5, -np.inf]), np.array([1.0, -np.inf]), [np.array([1.25, -np.inf])], "float64")
    (0.5, 0.50000000000001)
    """
    got, oracle = np.asarray(got, np.float64), np.asarray(oracle, np.float64)
    if got.shape != oracle.shape:
        raise ValueError(f"got must have the oracle's shape {oracle.shape}, got {got.shape}")
    finite = np.isfinite(oracle)
    if not np.array_equal(got[~finite], oracle[~finite], equal_nan=True) or not np.isfinite(got[finite]).all():
        return np.inf, 0.0
    naive_error = np.abs([np.asarray(x, np.float64)[finite] - oracle[finite] for x in naive])
    naive_error = naive_error[np.isfinite(naive_error)].max(initial=0.0)
    largest = np.abs(oracle[finite]).max(initial=0.0)
    limit = factor * naive_error + ROUNDING[np.dtype(dtype).name] * largest + absolute
    return float(np.abs(got[finite] - oracle[finite]).max(initial=0.0)), float(limit)


def judge(answer, do, q, k, v, *, dlse=None, need=(), **options):
    """Errors and limits of everything that a forward and a backward pass return.

    Parameters
    ----------
    answer : sequence of arrays
        o, lse, dq, dk, dv and, as `need` says, dbias and dsinks; or the first few of these.
    do, q, k, v, dlse, need, **options
        What `standard_attention_backward` takes.

    Returns
    -------
    judgement : dict
        Name to (error, limit); ``judgement["dq"]`` for instance.

    Examples
    --------
    >>> x = np.eye(3)
    >>> answer = [*standard_attention(x, x, x, return_lse=True), *standard_attention_backward(x, x, x, x)]
    >>> all(error <= limit for error, limit in judge(answer, x, x, x, x).values())
    True
    """
    names = ["o", "lse", "dq", "dk", "dv"] + ["d" + name for name in ("bias", "sinks") if name in need]
    backward = {"dlse": dlse, "need": need, **options}
    oracle = (*standard_attention(q, k, v, return_lse=True, **options),
              *standard_attention_backward(do, q, k, v, **backward))
    o, lse = standard_attention(q, k, v, return_lse=True, dtype="input", **options)
    naive = ([o], [lse], *zip(standard_attention_backward(do, q, k, v, dtype="input", **backward),
                              flash_attention_2_backward(do, q, k, v, o, lse, dtype="input", **backward)))
    absolute = _roundings(oracle[0], do, q, k, v, options.get("scale"), options.get("bias"))
    return {name: error_and_limit(got, right, rough, q.dtype, 2 if name in ("o", "lse") else 3, absolute[name])
            for name, got, right, rough in zip(names, answer, oracle, naive)}


def _roundings(o, do, q, k, v, scale, bias):
    """What rounding alone may do to each answer, from the sizes of scores, and of the terms that cancel."""
    bias = np.ones(1) if bias is None else np.atleast_1d(bias)
    rows, heads = q.size // q.shape[-1], q.shape[-3] if q.ndim > 2 else 1
    bias_rows = max(1, bias.size // max(1, bias.shape[-1]))
    scale = q.shape[-1]**-0.5 if scale is None else abs(scale)
    do_size, q_size, k_size, v_size = (_row_norms(x).max(initial=0.0) for x in (do, q, k, v))
    eps = np.finfo(np.float64 if np.dtype(q.dtype) == np.float64 else np.float32).eps
    of_score = eps * scale * q_size * k_size
    ds = (4 * eps + of_score) * do_size * v_size
    if q.dtype.itemsize == 2:       # delta sums d_v products with a rounded o; their signs are random
        ds += ROUNDING[q.dtype.name] * (_row_norms(do) * _row_norms(o)).max(initial=0.0) / o.shape[-1]**0.5
    return {"o": of_score * np.abs(o).max(initial=0.0, where=np.isfinite(o)), "lse": of_score,
            "dq": scale * ds * k_size, "dk": scale * ds * q_size, "dv": (4 * eps + of_score) * do_size,
            "dbias": ds * max(1, rows / bias_rows)**0.5, "dsinks": ds * (rows / heads)**0.5}


def _row_norms(x):
    """Norms of the rows of x, leaving out what is not finite."""
    x = np.asarray(x, np.float64)
    return np.sqrt((np.where(np.isfinite(x), x, 0)**2).sum(-1))
