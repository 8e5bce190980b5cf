"""Tile shapes of the engine `mma`, and what lies where in a block's shared memory.

The first shape of a table is taken that a call fits and for which a GPU has the shared memory. So it is, in rows of
queries x keys (and stages of what walks past, 1 where it isn't said):

===================  ===========  ==================  ================
compute capability   8.0          8.6, 8.9, 12.x      9.0, 10.x
a block's KB         163          99                  227
===================  ===========  ==================  ================
forward, d to 64     128 x 128    128 x 64            128 x 128
forward, d to 128    128 x 64     128 x 32            128 x 64
forward, d to 256    128 x 64     64 x 64             64 x 64
dK, dV, d to 64      64 x 128, 2  64 x 128, 2         64 x 128, 2
dK, dV, d to 128     64 x 128, 2  64 x 64             64 x 128, 2
dK, dV, d to 256     64 x 64      32 x 32             64 x 64, 2
dQ alone, d to 64    128 x 64     128 x 64            128 x 64
dQ alone, d to 128   128 x 32, 2  128 x 32, 2         128 x 32, 2
dQ alone, d to 256   64 x 64      64 x 32             64 x 64, 2
===================  ===========  ==================  ================

and in float32, whose numbers are twice as long:

===================  ===========  ==================  ================
forward, d to 64     128 x 64     128 x 32            128 x 64
forward, d to 128    128 x 32     128 x 32            128 x 32
forward, d to 256    64 x 32      64 x 16             128 x 32
dK, dV, d to 64      32 x 64, 2   32 x 64, 2          32 x 64, 2
dK, dV, d to 128     32 x 64      32 x 32             32 x 64
dK, dV, d to 256     32 x 32      16 x 16             32 x 64
dQ alone, d to 64    128 x 32, 2  128 x 32, 2         128 x 32, 2
dQ alone, d to 128   128 x 32     64 x 32             128 x 32
dQ alone, d to 256   64 x 16      32 x 16             64 x 16, 2
===================  ===========  ==================  ================

and in float64, where an instruction takes so long that few tiles keep it busy:

===================  ===========  ==================  ========="""

from dataclasses import dataclass

from ...problem import FLOAT32, FLOAT64
from ..tensor_cores.spec import BOX_BYTES, WARP, SumParts, Spec

PART = 16               # rows of a part of a fragment, which is what one instruction multiplies


@dataclass(frozen=True)
class Tile:
    """How the forward kernel cuts up the scores, and how its warps share the work.

    Attributes
    ----------
    warps : int
    parts : int
        A warp owns 16 query rows, or 32 in two parts: then what it loads of K and V serves twice.
    block_n : int
        Rows of a K/V tile: a multiple of 16, and of the rows that a block copies at once, 4 for each warp.
    """

    warps: int
    parts: int
    block_n: int

    @property
    def warp_rows(self):
        return self.parts * PART

    @property
    def block_m(self):
        return self.warps * self.warp_rows

    @property
    def threads(self):
        return self.warps * WARP


# (Largest head dim, tile), in order of preference. A thread has parts * block_n / 2 registers for S and parts * d_v / 2
# for O, and needs some 50 more of 255.
TILES = ((64, Tile(4, 2, 128)), (128, Tile(4, 2, 64)), (256, Tile(4, 1, 64)))
# On 8.0 only one block of the last one has room, and eight warps do more than four.
MEDIUM_TILES = (*TILES[:2], (256, Tile(8, 1, 64)))
# Where a multiprocessor has 100 KB of shared memory (8.6, 8.9, 12.x): tiles of which two blocks have room there,
# up to head dim 128.
SMALL_TILES = ((64, Tile(4, 2, 64)), (128, Tile(4, 2, 32)), (256, Tile(4, 1, 64)))
# In float32 it needs some 80 more than that, for numbers that are taken apart and for sums before they are added.
FLOAT32_TILES = ((64, Tile(4, 2, 64)), (128, Tile(4, 2, 32)), (256, Tile(8, 1, 32)), (256, Tile(4, 1, 32)))
SMALL_FLOAT32_TILES = ((128, Tile(4, 2, 32)), (256, Tile(4, 1, 16)))
# In float64 numbers are two registers, so 16 rows of O have room, or 32 to d 64: wider ones are cut, see `sides_of`.
FLOAT64_TILES = ((64, Tile(4, 2, 32)), (128, Tile(8, 1, 32)), (128, Tile(4, 1, 32)), (128, Tile(4, 1, 16)),
                 (256, Tile(4, 1, 16)), (256, Tile(2, 1, 16)), (256, Tile(1, 1, 16)))
SMALL, LARGE = 128 * 1024, 200 * 1024


def choose(spec, limit):
    """The tile shape for a spec on a GPU whose blocks may have `limit` bytes of shared memory; None if there is none.
    """
    small, large = {FLOAT32: (SMALL_FLOAT32_TILES, FLOAT32_TILES), FLOAT64: (FLOAT64_TILES, FLOAT64_TILES)}.get(
        spec.dtype, (SMALL_TILES, TILES if limit > LARGE else MEDIUM_TILES))
    return next((tile for largest, tile in (small if limit < SMALL else large)
                 if max(spec.d, spec.d_v) <= largest and Layout(tile, spec).total <= limit), None)


@dataclass(frozen=True)
class Layout:
    """Offsets and sizes in bytes of what is in the forward kernel's shared memory: Q_i, K_j, V_j, as boxes."""

    tile: Tile
    spec: Spec

    @property
    def k(self):
        return self.tile.block_m * self.spec.q_boxes * BOX_BYTES

    @property
    def v(self):
        return self.k + self.tile.block_n * self.spec.q_boxes * BOX_BYTES

    @property
    def total(self):
        return self.v + self.tile.block_n * self.spec.v_boxes * BOX_BYTES


@dataclass(frozen=True)
class BackwardTile:
    """How the kernel for dK and dV cuts up the scores, and how its warps share the work.

    Attributes
    ----------
    pairs : int
        Pairs of warps; a step is 16 queries for each, or less.
    parts : int
        A pair owns 16 keys, or 32 in two parts.
    stages : int
        Tiles of Q, of dO, and of P and dS, that fit into shared memory at once: 1 or 2.
    sharing : int
        How many pairs share 16 queries of a step when dQ is computed: then a step has that many times fewer.
    keys_in_registers : bool
        Whether a warp keeps its rows of K or V in registers; only with two stages, as K and V come first then.
    """

    pairs: int
    parts: int
    stages: int
    sharing: int = 1
    keys_in_registers: bool = False

    @property
    def pair_rows(self):
        return self.parts * PART

    @property
    def block_m(self):
        return self.pairs // self.sharing * PART

    @property
    def block_n(self):
        return self.pairs * self.pair_rows

    @property
    def threads(self):
        return 2 * self.pairs * WARP


# As TILES. A warp of a pair has parts * d / 2 registers of a thread for dV or dK, and parts * block_m / 2 for S or dP.
# The derivative of a softcap needs S longer, and with ALiBi distances, too: then only one part has room from d 64 on,
# and in float64 16 queries.
#
# Tried on an H200 in bfloat16, n 16384, no mask: TFLOP/s at d 64, 128, 256 (FlashAttention-2: 283, 304, 257).
#   kept
#     K or V in registers at d 64                                                           258 -> 265
#     positions as 32-bit numbers, lse and delta copied as Q is: a step's first 150 instructions -> 90
#                                                                       265, 309, 245 -> 270, 311, 245
#     the next step's copies start behind the products of S and dP       270, 311, 245 -> 277, 320, 250
#     ... and dV's warp first passes P on                                277, 320, 250 -> 289, 330, 254
#     dQ alone, 32 rows for a warp: `deterministic` takes 1.31, 1.25 times the time -> 1.16, 1.15
#   not kept
#     dQ in two pieces at d 256, dP - delta before the wait for P: the same
BACKWARD_TILES = ((64, BackwardTile(4, 2, 2, keys_in_registers=True)), (128, BackwardTile(4, 2, 2)),
                  (128, BackwardTile(4, 1, 2)), (128, BackwardTile(4, 1, 1)), (256, BackwardTile(4, 1, 2)),
                  (256, BackwardTile(4, 1, 1)), (256, BackwardTile(2, 1, 1)))
# A row of dS, one number for each query of a step, must fit into one box: 32 queries at the most.
# Tried on an H200, n 4096, without and with a causal mask, TFLOP/s at d 64: instructions once for both warps of a pair
# 58, 41 -> 60, 58, as 70 KB of them had no room in the cache and two blocks of a multiprocessor want others at a time;
# with that, at d 128, 32 rows for a warp instead of 16: 54 -> 63.
FLOAT32_BACKWARD_TILES = ((64, BackwardTile(2, 2, 2)), (128, BackwardTile(2, 2, 1)), (128, BackwardTile(4, 1, 1, 2)),
                          (128, BackwardTile(2, 1, 1)), (256, BackwardTile(4, 1, 1, 2)), (256, BackwardTile(2, 1, 1)),
                          (256, BackwardTile(1, 1, 1)))
# In float64 a row of dS has a box for each 16 queries.
FLOAT64_BACKWARD_TILES = ((64, BackwardTile(2, 2, 2, 2)), (64, BackwardTile(2, 2, 1, 2)),
                          (128, BackwardTile(4, 1, 1, 2)), (128, BackwardTile(2, 1, 1)),
                          (128, BackwardTile(2, 1, 1, 2)), (256, BackwardTile(1, 1, 1)))


def choose_backward(spec, limit):
    """As `choose`, for the kernel of dK and dV."""
    size = max(spec.d, spec.d_v)
    crowded = size > 64 and spec.softcap and spec.alibi
    tables = {FLOAT32: FLOAT32_BACKWARD_TILES, FLOAT64: FLOAT64_BACKWARD_TILES}
    return next((tile for largest, tile in tables.get(spec.dtype, BACKWARD_TILES)
                 if size <= largest and BackwardLayout(tile, spec).total <= limit
                 and not (crowded and (tile.parts > 1 or spec.dtype == FLOAT64 and tile.block_m > PART))), None)


@dataclass(frozen=True)
class BackwardLayout:
    """Offsets and sizes in bytes of what is in the shared memory of the kernel for dK and dV.

    K_j, V_j; stages of Q_i, of dO_i, of boxes for P and dS, a row for each key, and of lse_i and delta_i.
    """

    tile: BackwardTile
    spec: Spec

    @property
    def number_bytes(self):
        """Of lse, delta, and sums for dQ."""
        return max(4, self.spec.item)

    @property
    def dq_across(self):
        """How many warps, of one block or two, share the columns of 16 rows of dQ."""
        return 2 * self.tile.sharing * self.spec.sides

    @property
    def dq_columns(self):
        """Columns of a warp's part of dQ; what is past the last box comes to nothing."""
        box, boxes = self.spec.box, self.spec.q_boxes
        return box // 2 if boxes == 1 and box > PART else -(-boxes // self.dq_across) * box

    def dq_parts(self, by_four):
        """How dQ lies while it is added up: a part for each warp, 16 rows and its columns."""
        return SumParts(WARP, self.tile.block_m, PART, self.dq_columns, self.dq_across, by_four)

    @property
    def sizes(self):
        """Bytes of k, v, a stage of q, of do, of ds, of lse and delta."""
        tile, q_row, v_row = self.tile, self.spec.q_boxes * BOX_BYTES, self.spec.v_boxes * BOX_BYTES
        ds_boxes = -(-tile.block_m // self.spec.box)
        return (tile.block_n * q_row, tile.block_n * v_row, tile.block_m * q_row, tile.block_m * v_row,
                tile.block_n * ds_boxes * BOX_BYTES, 2 * tile.block_m * self.number_bytes)

    @property
    def offsets(self):
        """Offsets of k, v, q, do, ds, of lse and delta, and of the end."""
        k, v, q, do, ds, rows = self.sizes
        stages = self.tile.stages
        sizes = k, v, stages * q, stages * do, stages * ds, stages * rows
        return tuple(sum(sizes[:n]) for n in range(len(sizes) + 1))

    @property
    def total(self):
        return self.offsets[-1]


@dataclass(frozen=True)
class DqTile(Tile):
    """`Tile` of the kernel for dQ, and `stages` as in `BackwardTile`."""

    stages: int = 1


# As TILES. A thread has parts * block_n / 2 registers for S, as many for dP, and parts * d / 2 for dQ.
DQ_TILES = ((64, DqTile(4, 2, 64, 1)), (128, DqTile(4, 2, 32, 2)), (256, DqTile(4, 1, 64, 2)),
            (256, DqTile(4, 1, 64, 1)), (256, DqTile(4, 1, 32, 1)))
FLOAT32_DQ_TILES = ((64, DqTile(4, 2, 32, 2)), (128, DqTile(8, 1, 32, 1)), (128, DqTile(4, 1, 32, 2)),
                    (128, DqTile(4, 1, 32, 1)), (256, DqTile(4, 1, 16, 2)), (256, DqTile(4, 1, 16, 1)),
                    (256, DqTile(2, 1, 16, 1)))
FLOAT64_DQ_TILES = ((64, DqTile(8, 1, 32, 2)), (64, DqTile(4, 1, 32, 1)), (128, DqTile(4, 1, 32, 1)),
                    (128, DqTile(4, 1, 16, 1)), (256, DqTile(2, 1, 16, 1)), (256, DqTile(1, 1, 16, 1)))


def choose_dq(spec, limit):
    """As `choose`, for the kernel of dQ."""
    tables = {FLOAT32: FLOAT32_DQ_TILES, FLOAT64: FLOAT64_DQ_TILES}
    return next((tile for largest, tile in tables.get(spec.dtype, DQ_TILES)
                 if max(spec.d, spec.d_v) <= largest and DqLayout(tile, spec).total <= limit), None)


@dataclass(frozen=True)
class DqLayout:
    """Offsets and sizes in bytes of what is in the shared memory of the kernel for dQ: Q_i, dO_i; stages of K_j, V_j.
    """

    tile: DqTile
    spec: Spec

    @property
    def sizes(self):
        """Bytes of q, do, and a stage of k and of v."""
        return tuple(boxes * rows * BOX_BYTES for rows in (self.tile.block_m, self.tile.block_n)
                     for boxes in (self.spec.q_boxes, self.spec.v_boxes))

    @property
    def offsets(self):
        """Offsets of q, do, k, v, and of the end."""
        q, do, k, v = self.sizes
        sizes = q, do, self.tile.stages * k, self.tile.stages * v
        return tuple(sum(sizes[:n]) for n in range(len(sizes) + 1))

    @property
    def total(self):
        return self.offsets[-1]
