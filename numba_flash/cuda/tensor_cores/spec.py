"""What a kernel for tensor cores is compiled for, and the sizes that the hardware fixes."""

import math
from dataclasses import dataclass, replace

import numpy as np

from ...problem import FLOAT64

WARP, WARPGROUP = 32, 128   # threads
BOX_BYTES = 128         # of a row of a box with the 128-byte swizzle: boxes of a tile lie behind one another
BOX, ITEM = 64, 2       # columns of a box, and bytes of an element, of 16-bit numbers
LOG2_E = math.log2(math.e)
KEY_STEP = 16           # d is rounded up to the depth of one product's instruction
VALUE_STEP = 16         # and d_v to the columns of a packed fragment; both are multiples of it for each of `sides_of`
ROWS_OF_LANES = 4       # that lanes share before a backward kernel: so more is under way at once, and less counted
SMALLEST_FACTOR, LARGEST_FACTOR, SMALLEST_DIVISOR = 1e-30, 1e30, 1e-6
WIDEST_IN_FLOAT64 = 128         # columns of O for which the threads of a warp have registers, with 16 rows


def round_up(x, step):
    """The next multiple of `step`."""
    return -(-x // step) * step


def sides_of(dtype, d, d_v):
    """How many blocks share the columns of an output, in `mma`: 2 for wide ones in float64, else 1.

    Each computes all of S, but half of O. That is slow, and simple: for nothing else need kernels know of it.
    """
    return 2 if dtype == FLOAT64 and max(d, d_v) > WIDEST_IN_FLOAT64 else 1


@dataclass(frozen=True)
class Spec:
    """What a kernel is compiled for, besides its tile shape.

    Attributes
    ----------
    dtype : numpy.dtype
    d, d_v : int
        Rounded up; copies fill tiles up with zeros.
    hook : bool
        Whether scores are multiplied by `scale`; else the exponent's factor does that, and a slope is divided by it.
    softcap, alibi, sinks : bool
    tf32 : bool
        Whether products of float32 numbers take their leading 11 bits only.
    quarters : bool
        Whether products of float64 numbers are by quarters, as before compute capability 9.0: see `ptx.mma`.
    """

    dtype: np.dtype
    d: int
    d_v: int
    hook: bool = False
    softcap: bool = False
    alibi: bool = False
    sinks: bool = False
    tf32: bool = False
    quarters: bool = False

    @property
    def item(self):
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def box(self):
        """Columns of a box."""
        return BOX_BYTES // self.item

    @property
    def q_boxes(self):
        """Boxes of a tile of Q or K."""
        return -(-self.d // self.box)

    @property
    def v_boxes(self):
        """Boxes of a tile of V or dO."""
        return -(-self.d_v // self.box)

    @property
    def factors(self):
        """What products multiply: see `ptx.mma`."""
        return "tf32" if self.tf32 else "float64 by quarters" if self.quarters else self.dtype

    @property
    def sides(self):
        """See `sides_of`."""
        return sides_of(self.dtype, self.d, self.d_v)

    @classmethod
    def of(cls, problem, quarters=False):
        """The spec of a kernel for this problem; `quarters`: if it is float64.

        A factor of the exponent must be a positive float32, or ``max(s) * factor`` is not the maximum, and a slope must
        not overflow when it is divided by it: else, hook.
        """
        softcap, smallest = problem.softcap is not None, SMALLEST_DIVISOR if problem.alibi else SMALLEST_FACTOR
        hook = softcap or not smallest < problem.scale < LARGEST_FACTOR
        sides = sides_of(problem.dtype, problem.d, problem.d_v)
        d, d_v = round_up(problem.d, sides * KEY_STEP), round_up(problem.d_v, sides * VALUE_STEP)
        return cls(problem.dtype, d, d_v, hook, softcap, problem.alibi, problem.sinks, problem.tf32,
                   problem.dtype == FLOAT64 and quarters)

    @classmethod
    def of_backward(cls, problem, quarters=False):
        """The same for backward kernels, which need not know of sinks: they are in lse."""
        return replace(cls.of(problem, quarters), sinks=False)


def _is_causal(problem):
    return problem.right < problem.n_k and problem.left >= problem.n_k


def heads_together(problem, processors):
    """How many heads' last query tiles come first, before any head's last but one: see `schedule`."""
    return max(1, processors // 4) if _is_causal(problem) else 1


def key_heads_together(problem, tiles, processors):
    """The same for K/V tiles, so many for a head, of which each is a block: as many as run at the same time.

    Twice as many were slower at n 4096 and 16384; one, 1.5 times as slow at n 4096 where blocks add to dQ in turn, and
    1.2 times with 8 key heads under a causal mask.
    """
    return -(-processors // tiles) if problem.deterministic else max(1, processors // tiles)


def shares_of_group(problem, tiles, processors):
    """How many blocks share the query heads that have keys in common, for K/V tiles as in `key_heads_together`.

    Of 1 and the group's divisors, what makes the whole shortest, as counted here in steps of 64 queries. If bits are to
    repeat, two at most: their sum is the same in either order.
    """
    blocks, most = tiles * problem.batch * problem.kv_heads, 2 if problem.deterministic else problem.group

    def time(shares):
        """How long all blocks take."""
        longest, ends = problem.group / shares * problem.n_q / 64, 12       # a block begins and ends
        if _is_causal(problem):                                             # blocks of all lengths, the longest first
            return max(longest + ends, blocks * shares / processors * (longest / 2 + ends)) + longest / 2
        return -(-blocks * shares // processors) * (longest + ends)

    return min((shares for shares in range(1, most + 1) if problem.group % shares == 0), key=time)


@dataclass(frozen=True)
class SumParts:
    """How a gradient lies while blocks add to it: part by part, each as the threads of a group hold it.

    So what a warp adds at once lies side by side. A tile of rows has its parts row by row.

    Attributes
    ----------
    threads : int
        Of a group: a warp or a warpgroup.
    tile_rows : int
    rows, columns : int
        Of a part.
    across : int
        How many parts lie side by side.
    by_four : bool
        Whether a thread adds four float32 numbers at once, which GPUs can from compute capability 9.0 on.
    """

    threads: int
    tile_rows: int
    rows: int
    columns: int
    across: int
    by_four: bool = True

    @property
    def in_tile(self):
        """Parts of a tile."""
        return self.tile_rows // self.rows * self.across

    def shape(self, rows):
        """Of a head's numbers, for so many rows: parts, numbers of a part."""
        return -(-rows // self.tile_rows) * self.in_tile, self.rows * self.columns
