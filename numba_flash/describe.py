"""Arguments into a `Call`, or an error: everything that is checked is checked here, before anything is launched."""

import math
import numbers
import operator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from . import arrays
from .problem import DTYPES, FLOAT32, FLOAT64, Operands, Problem


OPTIONS = ("scale", "causal", "window", "softcap", "alibi_slopes", "bias", "mask", "sinks",
           "precision")
OPEN = -1, -1           # a window without sides
# Types whose values are what they are: equal ones of one type are the same argument, now and at the next call.
PLAIN = {type(None), bool, int, float, str, np.bool_, np.float32, np.float64}


class Call(NamedTuple):
    """A validated call: the problem, its operands with all four axes, and what the answer must look like.

    Attributes
    ----------
    problem : Problem
    operands : Operands
    rank : int
        Number of axes of the caller's arrays.
    origin : str
        Library of the caller's arrays.
    device : int or None
        Number of the GPU that they are on.
    given : dict
        Name to array, as the caller sees them: operands may be copies of another dtype or views with more axes.
    """

    problem: Problem
    operands: Operands
    rank: int
    origin: str
    device: Any
    given: dict

    def on_views(self):
        """The same call on arrays of its own, of the same memory: the caller may give his another shape."""
        def view(x):
            return None if x is None else x[...]

        return self._replace(operands=Operands(*map(view, self.operands)),
                             given={name: view(x) for name, x in self.given.items()})

    def drop_axes(self, x):
        """Take off the leading axes that the caller's arrays don't have."""
        return x if self.rank == 4 else x.reshape(x.shape[4 - self.rank:])

    def adopt(self, x, name, shape, dtypes=None):
        """Check one more array against the call and give it the leading axes that the caller's arrays don't have.

        It may come from the library of the caller's arrays, or be one of ours, as an answer to them is.
        """
        x, origin = arrays.adopt(x, name)
        ours = arrays.namespace(self.operands.q).__name__
        _same_place(x, name, self.origin if origin == ours else origin, self.operands.q, self.origin)
        wanted = shape[4 - self.rank:]
        if x.shape != wanted:
            raise ValueError(f"{name} must have shape {wanted}, got {x.shape}")
        if dtypes is None:
            _floating(x, name)
        elif x.dtype not in dtypes:
            raise TypeError(f"{name} must be {' or '.join(map(str, dtypes))}, got {x.dtype}; pass "
                            + (f"an array of dtype {dtypes[0]}" if name == "out" else f"{name}.astype('{dtypes[0]}')"))
        return x if self.rank == 4 else x[(None,) * (4 - self.rank)]


def describe(caller, q, k, v, /, *, scale=None, causal=False, window=None, softcap=None, alibi_slopes=None, bias=None,
             mask=None, sinks=None, precision=None, **unknown):
    """Turn a call's arguments into a `Call`, or raise.

    What doesn't depend on the arrays themselves, but only on their shapes and dtypes and on plain options, is checked
    and worked out by `make_problem`, and for a call like one before it only looked up.

    Parameters
    ----------
    caller : str
        The public function that was called, for errors.
    q, k, v, scale, causal, window, softcap, alibi_slopes, bias, mask, sinks, precision
        As in `attention`.
    **unknown
        What no option is called.

    Returns
    -------
    call : Call
    """
    if unknown:
        raise TypeError(f"{caller}() got an unexpected keyword argument {next(iter(unknown))!r}; the options are "
                        f"{', '.join(OPTIONS)}")
    if arrays.alike(q, k, v):
        origin = arrays.namespace(q).__name__
    else:
        (q, origin), (k, k_origin), (v, v_origin) = (
            arrays.adopt(x, name) for x, name in ((q, "q"), (k, "k"), (v, "v")))
        _same_place(k, "k", k_origin, q, origin)
        _same_place(v, "v", v_origin, q, origin)
    plain = all(type(option) in PLAIN for option in (scale, causal, softcap, precision))
    problem = (known_problem if plain else make_problem)(
        q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, scale, causal, OPEN if window is None else _sides(window),
        softcap, alibi_slopes is not None, bias is not None, mask is not None, sinks is not None, precision)
    rank = q.ndim
    given, operands = {"q": q, "k": k, "v": v}, {}
    if problem.alibi or problem.bias or problem.mask or problem.sinks:
        options = {name: _option(x, name, rank, q, origin) for name, x in (
            ("alibi_slopes", alibi_slopes), ("bias", bias), ("mask", mask), ("sinks", sinks)) if x is not None}
        with arrays.on_device(q):
            operands = _option_operands(problem, options, rank, arrays.namespace(q))
        given.update(options)
    if rank < 4:
        lead = (None,) * (4 - rank)
        q, k, v = q[lead], k[lead], v[lead]
    return Call(problem, Operands(q, k, v, **operands), rank, origin, arrays.device(q), given)


def make_problem(q, k, v, q_dtype, k_dtype, v_dtype, scale, causal, sides, softcap, alibi, bias, mask, sinks,
                 precision):
    """Check shapes, dtypes and numbers, and put them into a `Problem`.

    Parameters
    ----------
    q, k, v : tuple of int
        Shapes.
    q_dtype, k_dtype, v_dtype : numpy.dtype
    scale, causal, softcap, precision
        As in `attention`.
    sides : (int, int)
        Of the window; -1 is an open side.
    alibi, bias, mask, sinks : bool
        Which of these options are given.
    """
    _check_dtypes({"q": q_dtype, "k": k_dtype, "v": v_dtype})
    _check_shapes(q, k, v)
    rank = len(q)
    (batch, heads, n_q, d), (_, kv_heads, n_k, d_v) = (1,) * (4 - rank) + q, (1,) * (4 - rank) + v
    offset, left, right = _band(causal, sides, n_q, n_k)
    is_float64 = q_dtype == FLOAT64
    dtype = DTYPES[DTYPES.index(q_dtype)]           # without the metadata that the caller's may carry
    return Problem(batch, heads, kv_heads, n_q, n_k, d, d_v, dtype, _scale(scale, d, is_float64), offset, left, right,
                   _softcap(softcap, is_float64), alibi, bias, mask, sinks,
                   tf32=_is_tf32(precision, dtype) and dtype == FLOAT32)


# True == 1 == 1.0, but they are not the same argument: hence `typed`.
known_problem = lru_cache(maxsize=4096, typed=True)(make_problem)


def check_flag(x, name):
    """Raise if what switches something on or off is not a bool: 'no' would be true, and an array neither."""
    if not isinstance(x, (bool, np.bool_)):
        got = repr(x) if x is None or isinstance(x, (str, numbers.Number)) else type(x).__name__
        raise TypeError(f"{name} must be True or False, got {got}")


def _option_operands(problem, given, rank, xp):
    """The option arrays in the shapes and dtypes of `Operands`."""
    operands, heads = {}, problem.heads
    for name, x in given.items():
        if name == "mask":
            if x.dtype != np.bool_:
                raise TypeError(f"mask must be bool, True where a query may attend, got {x.dtype}; "
                                f"pass mask.astype(bool), or what is to be added to the scores as bias")
            operands[name] = _broadcast(x, name, problem.s_shape, rank, xp)
            continue
        _floating(x, name)
        if name == "bias":
            operands[name] = _broadcast(_convert(x, problem.accumulator, xp), name, problem.s_shape, rank, xp)
            continue
        allowed = [(heads,)[:rank - 2]]
        if name == "alibi_slopes" and rank == 4:
            allowed.append((problem.batch, heads))
        if x.shape not in allowed:
            raise ValueError(f"{name} must have shape {' or '.join(map(str, allowed))}, one for each query head, "
                             f"got {x.shape}")
        x = _convert(x, problem.accumulator, xp)
        shape = (problem.batch, heads) if name == "alibi_slopes" else (heads,)
        operands[name] = xp.ascontiguousarray(xp.broadcast_to(x, shape))
    return operands


def _convert(x, dtype, xp):
    """x in another dtype; finite numbers that are too large for it become its largest, not infinite."""
    if x.dtype.itemsize <= dtype.itemsize:
        return x.astype(dtype, copy=False)
    largest = np.finfo(dtype).max
    return xp.where(xp.isinf(x), x, xp.clip(x, -largest, largest)).astype(dtype)


def _same_place(x, name, origin, q, q_origin):
    if origin == q_origin and type(x) is type(q) and arrays.device(x) == arrays.device(q):
        return
    if origin != q_origin or arrays.namespace(x) is not arrays.namespace(q):
        raise TypeError(f"all arrays must come from one library and be on the same side, got q from {q_origin} "
                        f"({_side(q)}) and {name} from {origin} ({_side(x)}); convert one, with cupy.asarray or "
                        f"cupy.asnumpy for instance")
    if arrays.device(x) != arrays.device(q):
        raise ValueError(f"all arrays must be on one device, got q on GPU {arrays.device(q)} and {name} on GPU "
                         f"{arrays.device(x)}")


def _side(x):
    return "host" if arrays.device(x) is None else "GPU"


def _check_dtypes(dtypes):
    for name, dtype in dtypes.items():
        if not dtype.isnative:
            raise TypeError(f"{name} must have native byte order, got {dtype.str!r}; "
                            f"pass {name}.astype({name}.dtype.newbyteorder('='))")
        if dtype not in DTYPES:
            raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {dtype}; "
                            f"{_conversion(name, dtype)}")
    q, k, v = dtypes.values()
    if not q == k == v:
        raise TypeError(f"q, k and v must have one dtype, got {q}, {k} and {v}; convert with astype")


def _conversion(name, dtype):
    """What to do about an array whose dtype is none of ours."""
    if dtype.kind == "c":
        return f"the imaginary part would be lost: pass {name}.real if that is meant"
    return f"pass {name}.astype('{'float64' if dtype.kind == 'f' and dtype.itemsize > 8 else 'float32'}')"


def _check_shapes(q, k, v):
    rank = len(q)
    if rank not in (2, 3, 4):
        raise ValueError(f"q must be (batch, heads, n, d), (heads, n, d) or (n, d), got shape {q}")
    if (len(k), len(v)) != (rank, rank):
        raise ValueError(f"q, k and v must have the same number of axes, got shapes {q}, {k}, {v}")
    shapes = f"got q {q}, k {k}, v {v}"
    q, k, v = ((1,) * (4 - rank) + shape for shape in (q, k, v))
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


def _number(x, name, is_float64):
    """A plain number that the accumulator can hold; 0 and infinity are told from numbers that round to them."""
    if isinstance(x, (bool, np.bool_)) or not isinstance(x, (numbers.Real, np.floating)):
        raise TypeError(f"{name} must be a number, got {type(x).__name__}; pass float({name})")
    with np.errstate(over="ignore", under="ignore"):
        try:
            rounded = np.float64(x) if is_float64 else np.float32(x)
        except OverflowError:
            rounded = math.inf
    if not math.isfinite(rounded) or (rounded == 0 and x != 0):
        raise ValueError(f"{name} must be finite and within the range of {'float64' if is_float64 else 'float32'}, "
                         f"got {x}")
    return float(x)


def _scale(scale, d, is_float64):
    return 1 / math.sqrt(d) if scale is None else _number(scale, "scale", is_float64)


def _softcap(softcap, is_float64):
    if softcap is None:
        return None
    softcap = _number(softcap, "softcap", is_float64)
    if softcap <= 0:
        raise ValueError(f"softcap must be positive, got {softcap}; pass None for no cap")
    return softcap


def _is_tf32(precision, dtype):
    if precision is None:
        return False
    if isinstance(precision, str) and precision == "tf32":
        if dtype == FLOAT64:
            raise ValueError("precision must be None for float64 inputs, got 'tf32', which takes 11 bits of float32 "
                             "inputs; pass None, or q.astype('float32') and k and v likewise")
        return True
    raise ValueError(f"precision must be None or 'tf32', got {precision!r}; pass None for the accuracy of the inputs' "
                     f"dtype")


def _sides(window):
    """`window` as two whole numbers, -1 for an open side."""
    try:
        sides = tuple(-1 if side is None else operator.index(side) for side in window)
    except TypeError:
        raise TypeError(f"window must be (left, right), whole numbers or None, got {window!r}") from None
    if len(sides) != 2 or min(sides) < -1:
        raise ValueError(f"window must be (left, right), each at least 0, or None or -1 for an open side, "
                         f"got {window!r}")
    return sides


def _band(causal, sides, n_q, n_k):
    """`causal` and the sides of the window as (offset, left, right) of `Problem`."""
    if not (isinstance(causal, (bool, np.bool_))
            or isinstance(causal, str) and causal in ("bottom_right", "top_left")):
        raise ValueError(f"causal must be False, True, 'bottom_right' or 'top_left', got {causal!r}")
    offset = 0 if isinstance(causal, str) and causal == "top_left" else n_k - n_q
    open_side = n_q + n_k      # no two positions are further apart
    left, right = (open_side if side == -1 else min(side, open_side) for side in sides)
    return offset, left, 0 if causal else right


def _option(x, name, rank, q, q_origin):
    """Adopt an option array; for (n, d) inputs, whose slopes and sinks have no axes, plain numbers will do."""
    if rank == 2 and isinstance(x, (numbers.Real, np.generic)):
        with arrays.on_device(q):
            return arrays.namespace(q).asarray(x if isinstance(x, (bool, np.generic)) else float(x))
    x, origin = arrays.adopt(x, name)
    _same_place(x, name, origin, q, q_origin)
    return x


def _floating(x, name):
    if not (x.dtype in DTYPES and x.dtype.isnative):
        raise TypeError(f"{name} must be float16, bfloat16, float32 or float64 in native byte order, got {x.dtype.str} "
                        f"({x.dtype}); {_conversion(name, x.dtype)}")


def _broadcast(x, name, s_shape, rank, xp):
    wanted = s_shape[4 - rank:]
    try:
        if x.ndim > rank:
            raise ValueError
        return xp.broadcast_to(x, wanted)[(None,) * (4 - rank)]
    except ValueError:
        per_batch = rank == 4 and x.shape == (s_shape[0], s_shape[3])
        raise ValueError(f"{name} must broadcast to {wanted}, (batch, heads, n_q, n_k) less the axes that q lacks, "
                         f"got {x.shape}" + (f", (batch, n_k); pass {name}[:, None, None, :]" if per_batch else "")
                         ) from None
