"""Tile shapes of the engine `mma`, and what lies where in a block's shared memory."""

from dataclasses import dataclass

from ..tensor_cores.spec import BOX, ITEM, WARP, Spec, round_up

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


# (Largest head dim, tile), in order of preference: the first that a call fits, and a GPU has the shared memory for. A
# thread has parts * block_n / 2 registers for S, parts * d_v / 2 for O, and needs some 50 more of 255.
TILES = ((64, Tile(4, 2, 128)), (128, Tile(4, 2, 64)), (256, Tile(8, 1, 64)), (256, Tile(4, 1, 64)))
# Where a multiprocessor has 100 KB of shared memory (8.6, 8.9, 12.x): tiles of which two blocks have room there.
SMALL_TILES = ((64, Tile(4, 2, 64)), (128, Tile(4, 2, 32)), (256, Tile(4, 1, 64)))
SMALL = 128 * 1024


def choose(spec, limit):
    """The tile shape for a spec on a GPU whose blocks may have `limit` bytes of shared memory; None if there is none.
    """
    return next((tile for largest, tile in (SMALL_TILES if limit < SMALL else TILES)
                 if max(spec.d, spec.d_v) <= largest and Layout(tile, spec).total <= limit), None)


@dataclass(frozen=True)
class Layout:
    """Offsets and sizes in bytes of what is in the forward kernel's shared memory: Q_i, K_j, V_j, as boxes."""

    tile: Tile
    spec: Spec

    @property
    def q_boxes(self):
        return round_up(self.spec.d, BOX) // BOX

    @property
    def v_boxes(self):
        return round_up(self.spec.d_v, BOX) // BOX

    @property
    def k(self):
        return self.tile.block_m * self.q_boxes * BOX * ITEM

    @property
    def v(self):
        return self.k + self.tile.block_n * self.q_boxes * BOX * ITEM

    @property
    def total(self):
        return self.v + self.tile.block_n * self.v_boxes * BOX * ITEM
