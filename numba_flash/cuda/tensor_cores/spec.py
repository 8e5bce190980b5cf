"""What a kernel for tensor cores is compiled for, and the sizes that the hardware fixes."""

import math
from dataclasses import dataclass, replace

import numpy as np

WARP, WARPGROUP = 32, 128   # threads
BOX = 64                # columns of a box with the 128-byte swizzle: boxes of a tile lie behind one another
ITEM = 2                # bytes of an element
LOG2_E = math.log2(math.e)
KEY_STEP = 16           # d is rounded up to the depth of one product's instruction
VALUE_STEP = 16         # and d_v to the columns of a packed fragment
SMALLEST_FACTOR, LARGEST_FACTOR = 1e-30, 1e30


def round_up(x, step):
    """The next multiple of `step`."""
    return -(-x // step) * step


@dataclass(frozen=True)
class Spec:
    """What a kernel is compiled for, besides its tile shape.

    Attributes
    ----------
    dtype : numpy.dtype
    d, d_v : int
        Rounded up; copies fill tiles up with zeros.
    hook : bool
        Whether scores pass the score hook; else `scale` is all that happens to them, and joins the exponent's factor.
    softcap, alibi, sinks : bool
    """

    dtype: np.dtype
    d: int
    d_v: int
    hook: bool = False
    softcap: bool = False
    alibi: bool = False
    sinks: bool = False

    @classmethod
    def of(cls, problem):
        """The spec of a kernel for this problem.

        A factor of the exponent must be a positive float32, or ``max(s) * factor`` is not the maximum: else, hook.
        """
        softcap = problem.softcap is not None
        hook = softcap or problem.alibi or not SMALLEST_FACTOR < problem.scale < LARGEST_FACTOR
        return cls(problem.dtype, round_up(problem.d, KEY_STEP), round_up(problem.d_v, VALUE_STEP), hook, softcap,
                   problem.alibi, problem.sinks)

    @classmethod
    def of_backward(cls, problem):
        """The same for backward kernels, which need not know of sinks: they are in lse."""
        return replace(cls.of(problem), sinks=False)


def heads_together(problem, processors):
    """How many heads' last query tiles come first, before any head's last but one: see `schedule`."""
    causal = problem.right < problem.n_k and problem.left >= problem.n_k
    return max(1, processors // 4) if causal else 1
