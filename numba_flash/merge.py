"""Attention over the union of several sets of keys, from the attention over each."""

import numpy as np

from . import arrays
from .problem import DTYPES, FLOAT32, FLOAT64


def merge_states(states):
    """Merge partial attention results over disjoint sets of keys.

    The identity behind online softmax: ``lse = log(sum_s exp(lse_s))`` and ``o = sum_s exp(lse_s - lse) o_s``.

    Parameters
    ----------
    states : sequence of (o, lse)
        What ``attention(..., return_lse=True)`` returned for the same queries and different keys: o of shape
        (..., n_q, d_v), lse of shape (..., n_q). A sink takes part once only: give it to one of the calls.

    Returns
    -------
    o : array
        New, the shape and dtype of the parts.
    lse : array
        Natural logarithm. A row that is empty in every part stays o = 0, lse = -inf; a part where it is empty has no
        effect.

    Raises
    ------
    TypeError, ValueError
        If there are no states, or if their libraries, dtypes, shapes or devices differ.

    Examples
    --------
    >>> import numpy as np, numba_flash as nf
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 6, 4))
    >>> parts = [nf.attention(q, k[:, :, s], v[:, :, s], return_lse=True) for s in (slice(0, 2), slice(2, 6))]
    >>> o, lse = nf.merge_states(parts)
    >>> np.allclose(o, nf.attention(q, k, v))
    True
    """
    try:
        states = [_check_state(i, state) for i, state in enumerate(states)]
    except TypeError as error:
        if "iterable" not in str(error):
            raise
        raise TypeError(f"states must be a sequence of (o, lse), got {type(states).__name__}") from None
    if not states:
        raise ValueError("states must hold at least one (o, lse), got none")
    (o, lse), first = states[0]
    for i, ((o_i, lse_i), origin) in enumerate(states):
        if origin != first:
            raise TypeError(f"states must come from one library, got {first} and, in states[{i}], {origin}")
        if (o_i.dtype, lse_i.dtype) != (o.dtype, lse.dtype):
            raise TypeError(f"states must share dtypes, got {o.dtype}, {lse.dtype} and, in states[{i}], {o_i.dtype}, "
                            f"{lse_i.dtype}")
        if o_i.shape != o.shape:
            raise ValueError(f"states must share shapes, got o {o.shape} and, in states[{i}], {o_i.shape}")
        if arrays.device(o_i) != arrays.device(o) or arrays.device(lse_i) != arrays.device(o):
            raise ValueError(f"states must be on one device, states[{i}] is not on that of states[0]")

    xp = arrays.namespace(o)
    with arrays.on_device(o), np.errstate(all="ignore"):
        m = lse
        for (_, lse_i), _ in states[1:]:
            m = xp.maximum(m, lse_i)
        m = xp.where(m == -np.inf, xp.zeros_like(m), m)      # or -inf - -inf would be NaN where all are empty
        l_total, acc = xp.zeros_like(m), xp.zeros(o.shape, lse.dtype)
        for (o_i, lse_i), _ in states:
            weight = xp.exp(lse_i - m)
            l_total += weight
            acc += xp.where(lse_i[..., None] == -np.inf, 0, weight[..., None] * o_i.astype(lse.dtype))
        merged_lse = xp.log(l_total) + m
        acc /= xp.where(l_total == 0, xp.ones_like(l_total), l_total)[..., None]
        return acc.astype(o.dtype), merged_lse


def _check_state(i, state):
    if hasattr(state, "__dlpack__") or hasattr(state, "__cuda_array_interface__"):     # or it were taken apart
        raise TypeError(f"states must be [(o1, lse1), (o2, lse2)], got an array for states[{i}]")
    try:
        o, lse = state
    except (TypeError, ValueError):
        raise TypeError(f"states[{i}] must be (o, lse), got {type(state).__name__}") from None
    (o, origin), (lse, lse_origin) = arrays.adopt(o, f"states[{i}][0]"), arrays.adopt(lse, f"states[{i}][1]")
    if lse_origin != origin:
        raise TypeError(f"states[{i}] must come from one library, got {origin} and {lse_origin}")
    if o.dtype not in DTYPES or lse.dtype != (FLOAT64 if o.dtype == FLOAT64 else FLOAT32):
        raise TypeError(f"states[{i}] must be o in a floating dtype and lse in float32 (float64 for float64), got "
                        f"{o.dtype} and {lse.dtype}")
    if o.ndim < 2 or o.shape[:-1] != lse.shape:
        raise ValueError(f"states[{i}] must be o (..., n, d_v) and lse (..., n), got {o.shape} and {lse.shape}")
    return (o, lse), origin
