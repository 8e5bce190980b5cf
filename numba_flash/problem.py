"""One validated, frozen description of a call: what every engine is asked to compute.

`attention.py` builds a `Problem` (numbers and flags) and its `Operands` (arrays); engines read both and check nothing.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from .scores import seen_keys

FLOAT16, FLOAT32, FLOAT64 = (np.dtype(t) for t in (np.float16, np.float32, np.float64))
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = (FLOAT16, BFLOAT16, FLOAT32, FLOAT64)


@dataclass(frozen=True)
class Problem:
    """Sizes, dtype and options of one attention call, forward or backward.

    `describe` gives equal calls the same one, so what it once worked out is there at the next call.

    Attributes
    ----------
    batch, heads, kv_heads, n_q, n_k, d, d_v : int
        q is (batch, heads, n_q, d), k (batch, kv_heads, n_k, d), v (batch, kv_heads, n_k, d_v).
        Query head h reads key/value head ``h // group``.
    dtype : numpy.dtype
        Of q, k, v and o: float16, bfloat16, float32 or float64.
    scale : float
        Factor on q·k.
    offset, left, right : int
        The band: query i sees key j if ``i + offset - left <= j <= i + offset + right``. Causal attention is
        ``right = 0``; an open side is a bound that no pair of positions reaches. A mask or a bias may hide more.
    softcap : float or None
        ``s -> softcap * tanh(s / softcap)`` after `scale`.
    alibi, bias, mask, sinks : bool
        Which of these operands there are.
    deterministic : bool
        Whether gradients must be bitwise repeatable.
    tf32 : bool
        Whether products of float32 numbers may take their leading 11 bits only; never for other dtypes.
    """

    batch: int
    heads: int
    kv_heads: int
    n_q: int
    n_k: int
    d: int
    d_v: int
    dtype: np.dtype
    scale: float
    offset: int
    left: int
    right: int
    softcap: float | None = None
    alibi: bool = False
    bias: bool = False
    mask: bool = False
    sinks: bool = False
    deterministic: bool = False
    tf32: bool = False

    def __hash__(self):             # engines look up what they know of a problem at each call: not 19 fields each time
        return self._hash

    @cached_property
    def _hash(self):
        return hash(self._fields)

    @property
    def _fields(self):
        return tuple(getattr(self, field) for field in self.__dataclass_fields__)

    def __reduce__(self):           # hashes of another process are others
        return Problem, self._fields

    @cached_property
    def group(self):
        """Query heads that share one key/value head."""
        return self.heads // self.kv_heads

    @cached_property
    def accumulator(self):
        """The dtype that sums, lse and the option arrays have: float32, or float64 for float64."""
        return FLOAT64 if self.dtype == FLOAT64 else FLOAT32

    @cached_property
    def q_shape(self):
        return self.batch, self.heads, self.n_q, self.d

    @cached_property
    def k_shape(self):
        return self.batch, self.kv_heads, self.n_k, self.d

    @cached_property
    def v_shape(self):
        return self.batch, self.kv_heads, self.n_k, self.d_v

    @cached_property
    def o_shape(self):
        return self.batch, self.heads, self.n_q, self.d_v

    @cached_property
    def lse_shape(self):
        return self.batch, self.heads, self.n_q

    @cached_property
    def s_shape(self):
        return self.batch, self.heads, self.n_q, self.n_k

    @cached_property
    def is_empty(self):
        """Whether there is no query or no key."""
        return 0 in self.s_shape

    @cached_property
    def has_band(self):
        """Whether the band hides any key from any query."""
        return (self.n_q - 1 + self.offset - self.left > 0
                or self.offset + self.right < self.n_k - 1)

    @cached_property
    def seen(self):
        """The keys between the first and the last that the band shows to any query, as (first, stop); at least one."""
        first, stop = seen_keys(0, self.n_q, self.offset, self.left, self.right, self.n_k)
        first = min(first, self.n_k - 1)
        return first, max(stop, first + 1)

    @cached_property
    def on_seen_keys(self):
        """The same problem on the keys that are `seen`: another n_k and offset."""
        first, stop = self.seen
        return replace(self, n_k=stop - first, offset=self.offset - first)


class Operands(NamedTuple):
    """The arrays of one call, NumPy or CuPy, in the shapes that every engine sees; strides are the caller's.

    Attributes
    ----------
    q, k, v : array
        Four axes, as in `Problem`.
    alibi_slopes : array or None
        (batch, heads), `Problem.accumulator`.
    bias : array or None
        (batch, heads, n_q, n_k), a broadcast view, `Problem.accumulator`.
    mask : array or None
        (batch, heads, n_q, n_k), a broadcast view, bool.
    sinks : array or None
        (heads,), `Problem.accumulator`.
    """

    q: Any
    k: Any
    v: Any
    alibi_slopes: Any = None
    bias: Any = None
    mask: Any = None
    sinks: Any = None


@dataclass(frozen=True)
class Gradients:
    """What a backward pass fills: new C-contiguous arrays; None where nobody asked.

    Attributes
    ----------
    dq, dk, dv : array
        The shapes and the dtype of q, k, v.
    dbias : array or None
        Four axes, each of size 1 where bias was broadcast, `Problem.accumulator`.
    dsinks : array or None
        (heads,), `Problem.accumulator`.
    """

    dq: Any
    dk: Any
    dv: Any
    dbias: Any = None
    dsinks: Any = None


def without_unseen_keys(problem, operands):
    """The same problem on the keys between the first and the last that the band shows to any query.

    For engines that multiply what they load: a key that no row sees, padding say, is then never loaded.

    Parameters
    ----------
    problem : Problem
    operands : Operands

    Returns
    -------
    problem : Problem
        With another n_k and offset. It keeps a key at least.
    operands : Operands
        Views.
    """
    first, stop = problem.seen
    if (first, stop) == (0, problem.n_k):
        return problem, operands
    keys = {name: getattr(operands, name)[:, :, first:stop] for name in ("k", "v")}
    pairs = {name: getattr(operands, name)[..., first:stop] for name in ("bias", "mask")
             if getattr(operands, name) is not None}
    return problem.on_seen_keys, operands._replace(**keys, **pairs)
