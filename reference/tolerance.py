"""How right is right: the one rule by which tests, ``numba_flash check`` and benchmarks judge a result.

A result may be off by `factor` times what the same formula is off by when it is evaluated naively in the dtype of its
inputs (2 for o and lse, 3 for gradients), plus a small absolute term. The oracle is `standard_attention` in float64,
the naive evaluation ``standard_attention(..., dtype="input")``.

The absolute term is one rounding of the largest value, and a few roundings in the accumulator's precision of the terms
of a sum that may cancel: with a single key, dq is the difference of two equal numbers, which the naive evaluation may
hit exactly by luck.
"""

import numpy as np

from .attention import standard_attention
from .backward import standard_attention_backward

# One rounding of a value in each dtype, about.
ROUNDING = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 2e-6, "float64": 1e-14}


def error_and_limit(got, oracle, naive, dtype, factor=2, terms=0.0):
    """Largest error of a result, and what it may be.

    Parameters
    ----------
    got : array
        The result to judge.
    oracle, naive : array of the same shape
        The right values in float64, and what naive evaluation makes of them.
    dtype : dtype
        Of the inputs.
    factor : float
        How many times the naive error is allowed.
    terms : float
        Size of the summed terms, where they may cancel.

    Returns
    -------
    error, limit : float
        The result passes if ``error <= limit``. NaN and infinities must stand where the oracle's do, or error is inf.

    Examples
    --------
    >>> error_and_limit(np.array([1.5, -np.inf]), np.array([1.0, -np.inf]), np.array([1.25, -np.inf]), "float64")
    (0.5, 0.50000000000001)
    """
    got, oracle, naive = (np.asarray(x, np.float64) for x in (got, oracle, naive))
    if got.shape != oracle.shape:
        raise ValueError(f"got must have the oracle's shape {oracle.shape}, got {got.shape}")
    finite = np.isfinite(oracle)
    if not np.array_equal(got[~finite], oracle[~finite], equal_nan=True) or not np.isfinite(got[finite]).all():
        return np.inf, 0.0
    naive_error = np.abs(naive[finite] - oracle[finite])
    naive_error = naive_error[np.isfinite(naive_error)].max(initial=0.0)
    largest = np.abs(oracle[finite]).max(initial=0.0)
    eps = np.finfo(np.float64 if np.dtype(dtype) == np.float64 else np.float32).eps
    limit = factor * naive_error + ROUNDING[np.dtype(dtype).name] * largest + 4 * eps * terms
    return float(np.abs(got[finite] - oracle[finite]).max(initial=0.0)), float(limit)


def judge(answer, do, q, k, v, *, dlse=None, need=(), **options):
    """Errors and limits of everything that a forward and a backward pass return.

    Parameters
    ----------
    answer : sequence of arrays
        o, lse, dq, dk, dv and, as `need` says, dbias and dsinks.
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
    oracle, naive = ((*standard_attention(q, k, v, return_lse=True, dtype=dtype, **options),
                      *standard_attention_backward(do, q, k, v, dlse=dlse, need=need, dtype=dtype, **options))
                     for dtype in (np.float64, "input"))
    do_size, q_size, k_size, v_size = map(_longest_row, (do, q, k, v))
    scale = options.get("scale")
    scale = q.shape[-1]**-0.5 if scale is None else abs(scale)
    ds_size = do_size * v_size
    terms = {"o": 0.0, "lse": 0.0, "dq": scale * ds_size * k_size, "dk": scale * ds_size * q_size, "dv": do_size,
             "dbias": ds_size, "dsinks": ds_size}
    return {name: error_and_limit(got, right, rough, q.dtype, 2 if name in ("o", "lse") else 3, terms[name])
            for name, got, right, rough in zip(names, answer, oracle, naive, strict=True)}


def _longest_row(x):
    """The largest norm of a row of x, leaving out what is not finite."""
    x = np.asarray(x, np.float64)
    return np.sqrt(np.where(np.isfinite(x), x, 0)**2 @ np.ones(x.shape[-1])).max(initial=0.0)
