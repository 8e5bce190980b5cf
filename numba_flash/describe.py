"""Arguments into a `Call`, or an error: everything that is checked is checked here, before anything is launched."""

import math
import numbers
import operator
from dataclasses import dataclass

import numpy as np

from . import arrays
from .problem import DTYPES, Operands, Problem


@dataclass(frozen=True)
class Call:
    """A validated call: the problem, its operands with all four axes, and what the answer must look like."""

    problem: Problem
    operands: Operands
    rank: int             # of the caller's arrays
    origin: str           # library of the caller's arrays
    bias: object = None   # bias and sinks as the caller sees them, for their gradients
    sinks: object = None

    def drop_axes(self, x):
        """Take off the leading axes that the caller's arrays don't have."""
        return x if self.rank == 4 else x.reshape(x.shape[4 - self.rank:])

    def adopt(self, x, name, shape, dtypes=None):
        """Check one more array against the call and give it the leading axes that the caller's arrays don't have."""
        x, origin = arrays.adopt(x, name)
        _same_place(x, name, origin, self.operands.q, self.origin)
        wanted = shape[4 - self.rank:]
        if x.shape != wanted:
            raise ValueError(f"{name} must have shape {wanted}, got {x.shape}")
        if dtypes is not None and x.dtype not in dtypes:
            raise TypeError(f"{name} must be {' or '.join(map(str, dtypes))}, got {x.dtype}; "
                            f"pass {name}.astype('{dtypes[0]}')")
        if dtypes is None:
            _floating(x, name)
        return x if self.rank == 4 else x[(None,) * (4 - self.rank)]


def describe(q, k, v, *, scale=None, causal=False, window=None, softcap=None, alibi_slopes=None, bias=None, mask=None,
             sinks=None):
    """Turn a call's arguments into a `Call`, or raise."""
    (q, origin), (k, k_origin), (v, v_origin) = (arrays.adopt(x, name) for x, name in ((q, "q"), (k, "k"), (v, "v")))
    _same_place(k, "k", k_origin, q, origin)
    _same_place(v, "v", v_origin, q, origin)
    _check_dtypes(q, k, v)
    rank = q.ndim
    if rank not in (2, 3, 4):
        raise ValueError(f"q must be (batch, heads, n, d), (heads, n, d) or (n, d), got shape {q.shape}")
    if (k.ndim, v.ndim) != (rank, rank):
        raise ValueError(f"q, k and v must have the same number of axes, got shapes {q.shape}, {k.shape}, {v.shape}")
    shapes = f"got q {q.shape}, k {k.shape}, v {v.shape}"
    if rank < 4:
        lead = (None,) * (4 - rank)
        q, k, v = q[lead], k[lead], v[lead]
    (batch, heads, n_q, d), (kv_heads, n_k, d_v) = q.shape, v.shape[1:]
    _check_shapes(q.shape, k.shape, v.shape, shapes)

    offset, left, right = _band(causal, window, n_q, n_k)
    problem = Problem(batch, heads, kv_heads, n_q, n_k, d, d_v, q.dtype, _scale(scale, d), offset, left, right,
                      softcap=_softcap(softcap), alibi=alibi_slopes is not None, bias=bias is not None,
                      mask=mask is not None, sinks=sinks is not None)
    place, accumulator, xp = (q, origin), problem.accumulator, arrays.namespace(q)

    with arrays.on_device(q):
        caller_bias, caller_sinks = (None if x is None else _option(x, name, rank, place)
                                     for x, name in ((bias, "bias"), (sinks, "sinks")))
        if alibi_slopes is not None:
            alibi_slopes = _option(alibi_slopes, "alibi_slopes", rank, place)
            _check_slopes(alibi_slopes, batch, heads, rank)
            alibi_slopes = xp.ascontiguousarray(
                xp.broadcast_to(alibi_slopes.astype(accumulator, copy=False), (batch, heads)))
        if bias is not None:
            _floating(caller_bias, "bias")
            bias = _broadcast(caller_bias.astype(accumulator, copy=False), "bias", problem.s_shape, rank, xp)
        if mask is not None:
            mask = _option(mask, "mask", rank, place)
            if mask.dtype != np.bool_:
                raise TypeError(f"mask must be bool, True where a query may attend, got {mask.dtype}; "
                                f"pass mask.astype(bool), or what is to be added to the scores as bias")
            mask = _broadcast(mask, "mask", problem.s_shape, rank, xp)
        if sinks is not None:
            _floating(caller_sinks, "sinks")
            if caller_sinks.shape != (heads,)[:rank - 2]:
                raise ValueError(f"sinks must have shape {(heads,)[:rank - 2]}, one for each query head, "
                                 f"got {caller_sinks.shape}")
            sinks = xp.ascontiguousarray(caller_sinks.astype(accumulator, copy=False).reshape(heads))
    operands = Operands(q, k, v, alibi_slopes, bias, mask, sinks)
    return Call(problem, operands, rank, origin, caller_bias, caller_sinks)


def _same_place(x, name, origin, q, q_origin):
    if origin != q_origin or arrays.namespace(x) is not arrays.namespace(q):
        raise TypeError(f"all arrays must come from one library and be on the same side, got q from {q_origin} "
                        f"({_side(q)}) and {name} from {origin} ({_side(x)}); convert one, with cupy.asarray or "
                        f"cupy.asnumpy for instance")
    if arrays.device(x) != arrays.device(q):
        raise ValueError(f"all arrays must be on one device, got q on GPU {arrays.device(q)} and {name} on GPU "
                         f"{arrays.device(x)}")


def _side(x):
    return "host" if arrays.device(x) is None else "GPU"


def _check_dtypes(q, k, v):
    for x, name in ((q, "q"), (k, "k"), (v, "v")):
        if not x.dtype.isnative:
            raise TypeError(f"{name} must have native byte order, got {x.dtype.str!r}; "
                            f"pass {name}.astype({name}.dtype.newbyteorder('='))")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {x.dtype}; "
                            f"pass {name}.astype('float32')")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}; convert with astype")


def _check_shapes(q, k, v, shapes):
    if q[0] != k[0] or k[0] != v[0]:
        raise ValueError(f"q, k and v must have the same batch, {shapes}")
    if q[3] != k[3]:
        raise ValueError(f"q and k must have the same head dim, {shapes}")
    if k[2] != v[2]:
        raise ValueError(f"k and v must have the same length, {shapes}")
    if k[1] != v[1]:
        raise ValueError(f"k and v must have the same heads, {shapes}; axes are (batch, heads, n, d): pass "
                         f"x.transpose(0, 2, 1, 3) for (batch, n, heads, d) data")
    if 0 in (q[1], k[1], q[3], v[3]):
        raise ValueError(f"heads, d and d_v must be at least 1, {shapes}")
    if q[1] % k[1]:
        raise ValueError(f"q's heads must be a multiple of the heads of k and v, {shapes}; axes are (batch, heads, n, "
                         f"d): pass x.transpose(0, 2, 1, 3) for (batch, n, heads, d) data")


def _number(x, name):
    if isinstance(x, (bool, np.bool_)) or not isinstance(x, (numbers.Real, np.floating)):
        raise TypeError(f"{name} must be a number, got {type(x).__name__}; pass float({name})")
    if not math.isfinite(x):
        raise ValueError(f"{name} must be finite, got {x}")
    return float(x)


def _scale(scale, d):
    return 1 / math.sqrt(d) if scale is None else _number(scale, "scale")


def _softcap(softcap):
    if softcap is None:
        return None
    softcap = _number(softcap, "softcap")
    if softcap <= 0:
        raise ValueError(f"softcap must be positive, got {softcap}; pass None for no cap")
    return softcap


def _band(causal, window, n_q, n_k):
    """`causal` and `window` as (offset, left, right) of `Problem`."""
    if not (isinstance(causal, (bool, np.bool_)) or causal in ("bottom_right", "top_left")):
        raise ValueError(f"causal must be False, True, 'bottom_right' or 'top_left', got {causal!r}")
    offset = 0 if isinstance(causal, str) and causal == "top_left" else n_k - n_q
    if window is None:
        window = (None, None)
    try:
        sides = tuple(-1 if side is None else operator.index(side) for side in window)
    except TypeError:
        raise TypeError(f"window must be (left, right), whole numbers or None, got {window!r}") from None
    if len(sides) != 2 or min(sides) < -1:
        raise ValueError(f"window must be (left, right), each at least 0, or None or -1 for an open side, "
                         f"got {window!r}")
    open_side = n_q + n_k      # no two positions are further apart
    left, right = (open_side if side == -1 else min(side, open_side) for side in sides)
    return offset, left, 0 if causal else right


def _option(x, name, rank, place):
    """Adopt an option array; for (n, d) inputs, whose slopes and sinks have no axes, plain numbers will do."""
    if rank == 2 and isinstance(x, (numbers.Real, np.floating)):
        return arrays.namespace(place[0]).asarray(x)
    x, origin = arrays.adopt(x, name)
    _same_place(x, name, origin, *place)
    return x


def _floating(x, name):
    if not (x.dtype in DTYPES and x.dtype.isnative):
        raise TypeError(f"{name} must be float16, bfloat16, float32 or float64 in native byte order, got {x.dtype.str} "
                        f"({x.dtype}); pass {name}.astype('float32')")


def _check_slopes(slopes, batch, heads, rank):
    _floating(slopes, "alibi_slopes")
    allowed = [(heads,), (batch, heads)] if rank == 4 else [(heads,)] if rank == 3 else [()]
    if slopes.shape not in allowed:
        raise ValueError(f"alibi_slopes must have shape {' or '.join(map(str, allowed))}, got {slopes.shape}")


def _broadcast(x, name, s_shape, rank, xp):
    wanted = s_shape[4 - rank:]
    try:
        if x.ndim > rank:
            raise ValueError
        return xp.broadcast_to(x, wanted)[(None,) * (4 - rank)]
    except ValueError:
        raise ValueError(f"{name} must broadcast to {wanted}, (batch, heads, n_q, n_k) less the axes that q lacks, "
                         f"got {x.shape}") from None
