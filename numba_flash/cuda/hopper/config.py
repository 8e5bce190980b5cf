"""Tile shapes of the forward kernel, and what lies where in a block's shared memory."""

import math
from dataclasses import dataclass

import numpy as np

WARPGROUP = 128         # threads
ROWS = 64               # rows of a matrix that one warpgroup multiplies
BOX = 64                # columns of a box of TMA with the 128-byte swizzle: boxes of a tile lie behind one another
ITEM = 2                # bytes
LOG2_E = math.log2(math.e)
KEY_STEP = 16           # d is rounded up to the depth of one wgmma
VALUE_STEP = 16         # and d_v to the columns of a packed fragment
SMALLEST_FACTOR = 1e-30


def round_up(x, step):
    """The next multiple of `step`."""
    return -(-x // step) * step


@dataclass(frozen=True)
class Tile:
    """How the kernel cuts up the scores, and how its warpgroups share the work.

    Attributes
    ----------
    block_n : int
        Rows of a K/V tile, a multiple of 16.
    stages : int
        K tiles, and V tiles, that fit into shared memory at once.
    consumers : int
        Warpgroups that compute, 64 query rows each. One more loads.
    producer_registers, consumer_registers : int
        Registers of a thread: 65536 are to be shared out, in steps of 8.
    take_turns : bool
        Whether two consumers hand work to the tensor cores in turn.
    debug : bool
        Whether a wait that takes seconds ends the kernel with an error.
    """

    block_n: int
    stages: int = 2
    consumers: int = 2
    producer_registers: int = 24
    consumer_registers: int = 240
    take_turns: bool = True
    debug: bool = False

    @property
    def block_m(self):
        return self.consumers * ROWS

    @property
    def threads(self):
        return (self.consumers + 1) * WARPGROUP


@dataclass(frozen=True)
class Spec:
    """What a kernel is compiled for, besides its tile shape.

    Attributes
    ----------
    dtype : numpy.dtype
    d, d_v : int
        Rounded up; TMA fills tiles up with zeros.
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
        hook = softcap or problem.alibi or not problem.scale > SMALLEST_FACTOR
        return cls(problem.dtype, round_up(problem.d, KEY_STEP), round_up(problem.d_v, VALUE_STEP), hook, softcap,
                   problem.alibi, problem.sinks)


# Largest head dim to rows of a K/V tile. A consumer's thread has block_n / 2 registers for S, d_v / 2 for O and
# block_n / 4 for P, and a few for the score hook; K and V of two stages and Q share 227 KB.
# `tests/cuda/test_hopper_compile.py` makes sure that none spills.
#
# Tried on an H200 in bfloat16, speed relative to cuDNN 9.19 in the same run, n 1024, 4096, 16384:
#   d 64 full      128: .83 .93 .97   three consumers: .75 .96 1.10   128, 3 stages: .83 .91 .97   192: .71 .88 .99
#   d 64 causal    128: .76 .92 1.00  three consumers: .61 .86 1.03   128, 3 stages: .76 .91 1.00  192: .68 .88 1.00
#   d 128 full     128: .91 .98 1.01  144: .76 .98 1.04  160: .84 .97 1.03  176: .79 .96 1.03
#   d 128 causal   128: .91 1.01 1.14 144: .79 1.00 1.15 160: .84 1.00 1.14 176: .81 .99 1.14
#   d 256 full      80: 1.07 1.12 1.13  64: .92 1.03 .92      causal  80: .98 1.11 1.33  64: .92 .98 1.11
# Consumers that take no turns lose 1 to 3 % at n 1024 and at d 64, and nothing elsewhere.
BLOCK_N = {64: 128, 128: 128, 192: 112, 256: 80}
BLOCK_N_WITH_HOOK = {64: 128, 128: 128, 192: 96, 256: 64}


def choose(spec):
    """The tile shape for a spec."""
    table = BLOCK_N_WITH_HOOK if spec.hook else BLOCK_N
    return Tile(next(rows for largest, rows in table.items() if max(spec.d, spec.d_v) <= largest))


@dataclass(frozen=True)
class Layout:
    """Offsets and sizes in bytes of what is in shared memory.

    Each consumer has a tile for its rows of Q, in which it leaves its rows of O at the end. The barriers, 8 bytes each,
    are those of `forward`: Q's, and four for each stage.
    """

    tile: Tile
    spec: Spec

    @property
    def q_bytes(self):
        return ROWS * round_up(self.spec.d, BOX) * ITEM

    @property
    def qo_bytes(self):
        return ROWS * round_up(max(self.spec.d, self.spec.d_v), BOX) * ITEM

    @property
    def k_bytes(self):
        return self.tile.block_n * round_up(self.spec.d, BOX) * ITEM

    @property
    def v_bytes(self):
        return self.tile.block_n * round_up(self.spec.d_v, BOX) * ITEM

    @property
    def k(self):
        return self.tile.consumers * self.qo_bytes

    @property
    def v(self):
        return self.k + self.tile.stages * self.k_bytes

    @property
    def barriers(self):
        return self.v + self.tile.stages * self.v_bytes

    @property
    def total(self):
        return self.barriers + 8 * (1 + 4 * self.tile.stages)
