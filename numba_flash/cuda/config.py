"""Tile shapes of `flash1` and `flash2`: what a shape must satisfy, what it keeps in shared memory, when it is used.

`FLOAT32_SHAPES` and `FLOAT64_SHAPES` list shapes from the fastest to the smallest for each kernel; `choose` takes the
first one for which a GPU has the shared memory. Experiments are recorded beside the rows.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np

from ..problem import FLOAT64
from . import SIMULATOR

PADDING = 4         # elements at the end of each row of a tile that is read down its rows: see `tiles`


@dataclass(frozen=True)
class TileConfig:
    """How a block cuts up its part of the scores.

    Attributes
    ----------
    block_m, block_n : int
        Rows of a query tile, rows of a K/V tile.
    threads_m, threads_n : int
        The block's threads, as laid over the rows and the columns of a tile. Powers of two.
    """

    block_m: int
    block_n: int
    threads_m: int
    threads_n: int

    def __post_init__(self):
        for name in ("threads_m", "threads_n"):
            n = getattr(self, name)
            if n < 4 or n & (n - 1):
                raise ValueError(f"{name} must be a power of two and at least 4, got {n}")
        warps = max(1, self.threads // 32)
        for name in ("block_m", "block_n"):
            n = getattr(self, name)
            if n < 1 or n % 4 or n % warps or n % max(self.threads_m, self.threads_n):
                raise ValueError(f"{name} must be a multiple of 4, of threads_m, of threads_n and of the {warps} "
                                 f"warps, got {n} in {self}")

    @property
    def threads(self):
        return self.threads_m * self.threads_n

    def padded(self, d):
        """A head dim rounded up to what the threads of a row own in groups of four columns."""
        group = 4 * self.threads_n
        return -(-d // group) * group


@dataclass(frozen=True)
class Spec:
    """What a kernel is compiled for, besides its tile shape: all that its code depends on, and nothing else.

    Attributes
    ----------
    dtype : numpy.dtype
    d, d_v : int
        Rounded up by `TileConfig.padded`: tiles are filled up with zeros.
    softcap, alibi, bias, mask, sinks : bool
    """

    dtype: np.dtype
    d: int
    d_v: int
    softcap: bool = False
    alibi: bool = False
    bias: bool = False
    mask: bool = False
    sinks: bool = False

    @classmethod
    def of(cls, problem, tile):
        """The spec of a kernel with this tile shape for this problem."""
        return cls(problem.dtype, tile.padded(problem.d), tile.padded(problem.d_v), problem.softcap is not None,
                   problem.alibi, problem.bias, problem.mask, problem.sinks)

    @property
    def real_size(self):
        """Bytes of one number in shared memory: 16-bit arrays are held in float32."""
        return 8 if self.dtype == FLOAT64 else 4


def forward_tiles(tile, spec):
    """Shapes of the forward kernel's shared memory: Q_i, K_j, V_j, P, and a strip of partial row maxima or sums."""
    m, n = tile.block_m, tile.block_n
    return [(m, spec.d), (n, spec.d + PADDING), (n, spec.d_v), (m, n), (m, tile.threads_n)]


def dkdv_tiles(tile, spec):
    """Shapes of the dK/dV kernel's shared memory: K_j, V_j, Q_i, dO_i, one for Pᵀ and then dSᵀ, and lse_i, delta_i."""
    m, n = tile.block_m, tile.block_n
    return [(n, spec.d), (n, spec.d_v), (m, spec.d + PADDING), (m, spec.d_v + PADDING), (n, m), (m,), (m,)]


def dq_tiles(tile, spec):
    """Shapes of the dQ kernel's shared memory: Q_i, dO_i, K_j, V_j, dS, and lse_i, delta_i."""
    m, n = tile.block_m, tile.block_n
    return [(m, spec.d), (m, spec.d_v), (n, spec.d + PADDING), (n, spec.d_v + PADDING), (m, n), (m,), (m,)]


def dbias_tiles(tile, spec):
    """Shapes of the dbias kernel's shared memory: Q_i, dO_i, K_j, V_j, the tile of dbias, and lse_i, delta_i."""
    m, n = tile.block_m, tile.block_n
    return [(m, spec.d), (m, spec.d_v), (n, spec.d + PADDING), (n, spec.d_v + PADDING), (m, n), (m,), (m,)]


def flash1_forward_tiles(tile, spec):
    """Shapes of flash1's forward kernel's: K_j, V_j, Q_i, P, and two strips of partial row maxima and sums."""
    m, n = tile.block_m, tile.block_n
    return [(n, spec.d + PADDING), (n, spec.d_v), (m, spec.d), (m, n), (m, tile.threads_n), (m, tile.threads_n)]


def flash1_backward_tiles(tile, spec):
    """Shapes of flash1's backward kernel's: K_j, V_j, Q_i, dO_i, dS, one for Pᵀ and then dSᵀ, and lse_i, delta_i."""
    m, n = tile.block_m, tile.block_n
    return [(n, spec.d + PADDING), (n, spec.d_v + PADDING), (m, spec.d), (m, spec.d_v), (m, n), (n, m), (m,), (m,)]


def elements(shapes):
    """Elements of shared memory that tiles of these shapes take together."""
    return sum(prod(shape) for shape in shapes)


# name: (factory, see `cache`; shapes of its tiles in shared memory)
KERNELS = {
    "forward": ("flash2_forward:make_forward", forward_tiles),
    "dkdv": ("flash2_backward:make_dkdv", dkdv_tiles),
    "dq": ("flash2_backward:make_dq", dq_tiles),
    "dbias": ("backward_parts:make_dbias", dbias_tiles),
    "flash1_forward": ("flash1_forward:make_forward", flash1_forward_tiles),
    "flash1_backward": ("flash1_backward:make_backward", flash1_backward_tiles),
}

# What the score hook of a call needs, in rising order of registers: nothing, arithmetic (softcap, ALiBi), or reads of
# global memory (a bias, a mask) with an address for each pair.
PLAIN, SCORE, PAIRS = range(3)

# Rows of (largest head dim, largest need, (block_m, block_n, threads_m, threads_n)), in order of preference: the first
# row is taken that a call fits and for which a GPU has the shared memory. A thread's share of the outputs grows with
# the head dim, and a thread has 255 registers: `tests/cuda/test_compile.py` makes sure that no row spills.
#
# Measured on an H200, float32, (batch, heads, n, d) = (4, 32, 4096, 64) and (4, 16, 4096, 128), no options; TFLOP/s
# that a kernel really computes, median of 3 rounds in one run with PyTorch's memory-efficient attention (forward 35.6
# and 45.8, backward 35.0 and 36.7, where flash2's two backward kernels together reach 24.4 of the 2.5 x forward that is
# counted for them):
#
# forward d64   128x128x16x16 33.2, 64x64x8x16 32.9, 128x64x16x8 32.5, 128x32x16x8 29.6, 128x64x16x16 29.4
# forward d128  128x64x16x16 32.5, 64x32x8x16 27.5, 128x32x16x16 26.5, 64x64x16x16 26.4, 64x64x8x16 20.9
# dkdv d64      128x128x16x16 34.7, 64x64x8x16 33.5, 64x128x16x16 32.9, 64x64x16x8 29.1, 64x64x16x16 24.5
# dkdv d128     64x128x16x16 33.8, 32x64x8x16 29.5, 64x64x16x16 28.4, 32x64x16x16 23.8
# dq d64        128x128x16x16 36.2, 64x64x8x16 34.1, 128x64x16x16 33.2, 64x64x16x16 29.7
# dq d128       128x64x16x16 35.1, 64x32x8x16 29.1, 64x64x16x16 28.4, 128x32x16x16 28.1, 64x64x8x16 24.7
FLOAT32_SHAPES = {
    "forward": ((64, SCORE, (128, 64, 16, 8)), (128, SCORE, (128, 64, 16, 16)), (128, PAIRS, (64, 64, 16, 16)),
                (128, PAIRS, (64, 32, 8, 16)), (256, PAIRS, (64, 64, 16, 16)), (256, PAIRS, (32, 32, 16, 16)),
                (512, PAIRS, (32, 32, 16, 16)), (512, PAIRS, (16, 16, 16, 16))),
    "dkdv": ((64, PLAIN, (128, 128, 16, 16)), (64, SCORE, (64, 128, 16, 16)), (128, PLAIN, (64, 128, 16, 16)),
             (64, PAIRS, (64, 64, 16, 16)), (128, PAIRS, (32, 64, 16, 16)), (128, PAIRS, (32, 32, 16, 16)),
             (256, PAIRS, (32, 32, 16, 16)), (512, PAIRS, (16, 16, 16, 16))),
    "dq": ((64, PLAIN, (128, 128, 16, 16)), (128, SCORE, (128, 64, 16, 16)), (128, PAIRS, (64, 64, 16, 16)),
           (128, PAIRS, (32, 32, 16, 16)), (256, PAIRS, (32, 32, 16, 16)), (512, PAIRS, (16, 16, 16, 16))),
    "dbias": ((256, PAIRS, (32, 32, 16, 16)), (512, PAIRS, (16, 16, 16, 16))),
    "flash1_forward": ((128, PAIRS, (64, 64, 16, 16)), (256, PAIRS, (32, 32, 16, 16)), (512, PAIRS, (16, 16, 16, 16))),
    "flash1_backward": ((128, PAIRS, (32, 32, 16, 16)), (256, PLAIN, (32, 32, 16, 16)), (256, PAIRS, (16, 16, 16, 16))),
}
FLOAT64_SHAPES = {
    "forward": ((64, SCORE, (64, 64, 16, 16)), (128, PAIRS, (64, 32, 16, 16)), (256, PAIRS, (32, 32, 16, 16)),
                (512, PAIRS, (16, 16, 16, 16))),
    "dkdv": ((128, PAIRS, (32, 32, 16, 16)), (256, PAIRS, (16, 16, 16, 16))),
    "dq": ((64, PAIRS, (64, 32, 16, 16)), (128, PAIRS, (32, 32, 16, 16)), (256, PAIRS, (16, 16, 16, 16))),
    "dbias": ((128, PAIRS, (32, 32, 16, 16)), (256, PAIRS, (16, 16, 16, 16))),
    "flash1_forward": ((256, PAIRS, (32, 32, 16, 16)), (512, PAIRS, (16, 16, 16, 16))),
    "flash1_backward": ((64, PAIRS, (32, 32, 16, 16)), (256, PAIRS, (16, 16, 16, 16))),
}
SIMULATED_SHAPES = ((1 << 30, PAIRS, (8, 8, 4, 4)),)     # small, and yet of several micro-tiles


@dataclass(frozen=True)
class Choice:
    """A tile shape for a call, what makes a kernel of it, for what, and the shared memory of a block in bytes."""

    factory: str
    tile: TileConfig
    spec: Spec
    shared_bytes: int

    @property
    def block(self):
        """Threads (x, y) of a block."""
        return self.tile.threads_n, self.tile.threads_m


def choices(kernel, problem):
    """All tile shapes that a kernel may take for a problem, in order of preference, whatever shared memory they need.

    Parameters
    ----------
    kernel : str
        A name in `KERNELS`.
    problem : Problem
    """
    factory, shared_shapes = KERNELS[kernel]
    table = FLOAT64_SHAPES if problem.dtype == FLOAT64 else FLOAT32_SHAPES
    need = PAIRS if problem.bias or problem.mask else SCORE if problem.softcap is not None or problem.alibi else PLAIN
    for largest, largest_need, shape in SIMULATED_SHAPES if SIMULATOR else table[kernel]:
        if max(problem.d, problem.d_v) <= largest and need <= largest_need:
            tile = TileConfig(*shape)
            spec = Spec.of(problem, tile)
            yield Choice(factory, tile, spec, elements(shared_shapes(tile, spec)) * spec.real_size)


@lru_cache(maxsize=4096)
def choose(kernel, problem, limit):
    """The first of `choices` that takes at most `limit` bytes of shared memory; None if none does."""
    return next((c for c in choices(kernel, problem) if c.shared_bytes <= limit), None)


@lru_cache(maxsize=4096)
def why_too_large(kernel, problem, limit):
    """Why there is no choice, in words; None if there is one."""
    if choose(kernel, problem, limit):
        return None
    smallest = min((c.shared_bytes for c in choices(kernel, problem)), default=None)
    if smallest is None:
        table = FLOAT64_SHAPES if problem.dtype == FLOAT64 else FLOAT32_SHAPES
        return (f"head dim {max(problem.d, problem.d_v)} is larger than {table[kernel][-1][0]}, the largest that the "
                f"{kernel} kernel has registers and shared memory for in {problem.dtype}")
    return (f"head dims {problem.d} and {problem.d_v} need {smallest} bytes of shared memory a block in the {kernel} "
            f"kernel, and this GPU has {limit}")
