"""Tile shapes of the forward kernel, and what lies where in a block's shared memory."""

from dataclasses import dataclass

from ..tensor_cores.spec import BOX, BOX_BYTES, ITEM, WARPGROUP, SumParts, Spec, round_up

ROWS = 64               # rows of a matrix that one warpgroup multiplies
BARRIER, NOTE, COLUMN = 8, 32, 32   # bytes, the last for a column's number, 16 times
NUMBERS = BOX_BYTES // 4    # in float32 in a row of a box
TARGET = 9, 0, "a"      # wgmma and setmaxnreg are Hopper's own
MANY = 8192             # keys, which repay query tiles that are less even
FEW = 2 * ROWS          # queries, which have no use for a third consumer, that is, for MANY's tile: see `keys_of`


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
    q_stages : int
        Query tiles that fit into shared memory at once.
    q_in_registers : bool
        Whether a consumer keeps its rows of Q in registers.
    turns : bool
        Whether consumers hand work to the tensor cores in turn.
    debug : bool
        Whether a wait that takes seconds ends the kernel with an error.
    """

    block_n: int
    stages: int = 2
    consumers: int = 2
    producer_registers: int = 40
    consumer_registers: int = 232
    q_stages: int = 1
    q_in_registers: bool = False
    turns: bool = False
    debug: bool = False

    @property
    def block_m(self):
        return self.consumers * ROWS

    @property
    def threads(self):
        return (self.consumers + 1) * WARPGROUP


# (Largest head dim, fewest keys, tile), in order of preference. A consumer's thread has block_n / 2 registers for S,
# d_v / 2 for O, block_n / 4 for P, perhaps d / 4 for Q, and needs some 30 more; `tests/cuda/test_hopper_compile.py`
# makes sure that none spills. K and V of two stages and Q share 227 KB.
#
# Tried on an H200 in bfloat16; speed relative to cuDNN 9.19 in the same run, at n 1024, 4096, 16384, without a mask if
# not said. Single figures scatter by 5 %.
#   kept
#     addresses that the compiler knows to be uniform (see `schedule`):
#       d 64 .81 .94 .99 -> .94 1.10 1.19   d 128 .97 .99 1.01 -> .94 1.03 1.05   d 256 .97 1.02 1.08 -> 1.05 1.15 1.13
#     O += P V runs during the softmax (the wait for V behind it keeps the compiler from waiting for O first):
#       d 64, two consumers .85 .86 .83 -> .86 .91 .94      d 256 .95 .99 .99 -> .97 1.02 1.08
#     under a causal mask, rounds of tiles of equal length (`heads_together`), instead of 40 MB of K and V together:
#       d 128 .90 1.04 1.22 -> 1.02 1.32 1.18      d 256 .87 1.01 1.28 -> .99 1.33 1.28
#     S of the next query tile starts before this one's epilogue: d 128 at n 1024 1.00 -> 1.04, causal 1.02 -> 1.06
#     consumers without rows let K and V by: d 64 at n 1024 .93 -> 1.02
#     three consumers at d 64: .96 .97 .93 -> 1.02 1.15 1.22; causal .91 .95 .97 -> .88 1.05 1.17
#     Q in registers at d 128: 1.06 .99 .98 -> 1.02 1.04 1.06; causal 1.12 1.29 1.11 -> 1.15 1.26 1.18
#     relative to plain attention at d 128: four of a softcap's scores share a reciprocal .52 -> .63; a polynomial in
#     its place where scores are small (`steps.near_weights`) .69 -> .77, d 64 276 -> 360 TFLOP/s; a bit for each column
#     of a mask, window of 1024 at n 16384 .74 -> .76
#     ALiBi, likewise, by one multiply-add a score .81 -> .88; in place of that, by 16 columns more of the product (see
#     `alibi`), .88 -> .93, causal .88 -> .92, d 64 .85 -> .89, d 256 the same
#     consumers hand work to the tensor cores in turn, TFLOP/s at n 1024, 4096, 16384 with and without a causal mask:
#       d 128 540 580 614, 427 491 580 -> 562 606 617, 432 504 595; not for d 64, 256, nor, with the next, for d 192
#       softcap, n 4096, 415 -> 430
#     O multiplied by alpha only where m has passed the row's ceiling (`softmax.ceiling_of`), which most tiles of random
#       scores don't reach: d 128 1.01 1.02 1.12, causal 1.08 1.09 1.20 -> 1.03 1.07 1.13, 1.12 1.17 1.15
#       d 256 1.06 1.08 1.05, causal 1.05 1.12 1.18 -> 1.08 1.08 1.12, 1.07 1.16 1.24
#       d 64, TFLOP/s, 434 508 540, causal 340 464 478 -> 444 520 538, 340 460 493
#     with that, no maximum of a row, but where some row of the warp passes its ceiling, which is then set anew:
#       d 64 454 539 566, causal 345 487 536 -> 457 552 584, 345 500 549; d 128 610 683, causal 468 619 -> 619 678, 476
#       625, n 16384 732, causal 721 -> 778, 747; window 461 -> 467, but 2 % less where the ceiling is m after that
#       not for ALiBi, causal 540 -> 525, nor, for tiles after the diagonal alone, d 64 436 -> 416
#     with the one before, three consumers at d 128 from n 8192 on, TFLOP/s at n 8192, 16384: 625 629, causal 572 611
#       -> 665 681, 600 645; GQA 64/8 616 634, causal 621 636 -> 702 680, 627 647; but at n 4096, causal, 558 -> 493
#   not kept
#     one loop over the K/V tiles of all query tiles: d 64 .94 1.10 1.19 -> .89 1.05 1.10, d 128 the same or less
#     every eighth exponential as a polynomial on the multiply-add units: d 64 1.00 1.11 1.16 -> .92 1.01 1.03
#     three or four stages: the same or less; at d 64 block_n 64: .81 .80 .77, 96: .85 .88 .89, 112: .75 .93 1.01
#     m that lags by 2^8 in all rows: 4 % faster than with a ceiling, but on large scores 1.22 times the error; m that
#     never lags, and O left alone where no row of the warp has grown: d 64 500 -> 480, d 128 the same
#     ALiBi's multiply-adds among the exponentials where no row passes its ceiling, 594 -> 549; no exponentials where
#       ALiBi leaves no weight above 0, 605 -> 565, causal 520 -> 453
#     the question whether some m is huge (`steps.make_online_softmax`) in each tile, not only where a row has grown:
#       d 64 450 541 569, causal 343 487 542 -> 435 527 555, 334 474 534, d 128 2 to 4 % less; its answer only, 1 to 2 %
#     other shapes for options at d 128, TFLOP/s: softcap 514, without turns 507, Q in shared memory 495, block_n 80 and
#     three consumers 473, its polynomial apart from the exponentials 476; ALiBi 626, 626, 614, 584, at n 16384 624,
#     632, 627, 607; window 502, block_n 176 424, 112 430, 80 and three consumers 459, 64 429
#     two consumers at d 64, n 1024, block_n 128, 176, 208: 437 -> 387, 371, 380
THREE = {"consumers": 3, "producer_registers": 32, "consumer_registers": 160}
TILES = ((64, 0, Tile(128, q_stages=2, **THREE)), (128, MANY, Tile(80, **THREE)),
         (128, 0, Tile(128, q_in_registers=True, turns=True)), (192, 0, Tile(112)), (256, 0, Tile(80)))
TILES_FOR_OPTIONS = TILES[0], *TILES[2:]       # MANY's is slower for these


def keys_of(problem):
    """How many keys a query sees, as far as tile shapes are chosen by it; decoding 8192 keys, 1624 -> 1924 GB/s."""
    return min(problem.n_k, problem.left + problem.right + 1) if problem.n_q > FEW else 0


def choose(spec, keys):
    """The tile shape for a spec, where a query sees so many keys."""
    return next(tile for largest, fewest, tile in (TILES_FOR_OPTIONS if spec.softcap or spec.alibi else TILES)
                if max(spec.d, spec.d_v) <= largest and keys >= fewest)


@dataclass(frozen=True)
class Layout:
    """Offsets and sizes in bytes of what is in shared memory.

    Each consumer has places of its own for its rows of Q, with a note of which rows they are. Barriers are those of
    `forward`: two for each place of Q, of K and of V.
    """

    tile: Tile
    spec: Spec

    @property
    def q_bytes(self):
        return ROWS * round_up(self.spec.d, BOX) * ITEM

    @property
    def k_bytes(self):
        return self.tile.block_n * round_up(self.spec.d, BOX) * ITEM

    @property
    def v_bytes(self):
        return self.tile.block_n * round_up(self.spec.d_v, BOX) * ITEM

    @property
    def k(self):
        return self.tile.q_stages * self.tile.consumers * self.q_bytes

    @property
    def v(self):
        return self.k + self.tile.stages * self.k_bytes

    @property
    def slants(self):
        """Whether products add ALiBi's term (see `alibi`), as they can where nothing else is done to their scores."""
        return self.spec.alibi and not self.spec.hook

    @property
    def columns(self):
        return self.v + self.tile.stages * self.v_bytes

    @property
    def barriers(self):
        """Offsets of the first q_full, q_empty, k_full, k_empty, v_full, v_empty."""
        counts = [self.tile.q_stages * self.tile.consumers] * 2 + [self.tile.stages] * 4
        start = self.columns + (self.tile.block_n * COLUMN if self.slants else 0)
        return tuple(start + BARRIER * sum(counts[:n]) for n in range(6))

    @property
    def notes(self):
        return self.barriers[-1] + BARRIER * self.tile.stages

    @property
    def total(self):
        return self.notes + NOTE * self.tile.q_stages * self.tile.consumers


@dataclass(frozen=True)
class BackwardTile:
    """How the backward kernel cuts up the scores.

    Attributes
    ----------
    block_m : int
        Rows of a tile of Q and dO: 64 or 128.
    stages : int
        Tiles of Q, and of dO, that fit into shared memory at once.
    wide : bool
        Whether both consumers own all 64 rows of a K/V tile (`backward_wide`), or 64 each (`backward`).
    debug : bool
        As in `Tile`.
    """

    block_m: int
    stages: int
    wide: bool = False
    debug: bool = False

    consumers, producer_registers, consumer_registers = 2, 24, 240

    @property
    def block_n(self):
        return ROWS if self.wide else self.consumers * ROWS

    @property
    def dq_by_rows(self):
        """Whether a consumer computes a half of the rows of dQ, or else of its columns."""
        return self.block_m == self.consumers * ROWS

    @property
    def ds_slots(self):
        """How many tiles of dS shared memory has room for."""
        return 2 if self.wide else 3

    @property
    def threads(self):
        return (self.consumers + 1) * WARPGROUP


# Largest head dim to tile shape of the backward kernels. In `backward` dK and dV take (d + d_v) / 2 registers of a
# thread, S and dP block_m / 2 each, dQ 32, P and dS in 16 bits block_m / 4 each; in `backward_wide` dK or dV d / 2, and
# dQ d / 4.
#
# Tried on an H200 in bfloat16; speed relative to cuDNN 9.19 in the same run, at n 1024, 4096, 16384, without a mask.
#   kept
#     lse and delta copied by TMA with Q, three stages of Q and dO, dQ added from registers, 16 bytes a thread in the
#     kernels before and after:             d 64 .56 .73 .90 -> .93 .92 .97      d 128 .61 .78 .79 -> .85 .83 .84
#     dQ added as the threads hold it, so that a warp adds 512 bytes in a row; dS stored before the consumer's turn, in
#     the third place; dQ before dK:        d 64 -> 1.09 1.20 1.27               d 128 -> 1.04 1.03 1.05
#     in the turn, waits for Q and dO, and the fence behind dS, while products run:
#                                           d 64 -> 1.14 1.27 1.39               d 128 -> .99 1.06 1.09
#     d 256, consumers that share keys:     1.23 1.18 1.30, causal 1.11 1.11 1.24      d 192 1.18 1.08 1.30
#     tiles of several heads in turn (`key_heads_together`): adding in order, for repeatable bits, takes 1.16 times the
#     time instead of 1.50 at d 64, n 4096; GQA 64/8, causal, n 4096: .80 -> 1.15, together with the next
#     blocks that share a group (`shares_of_group`): GQA 64/8, causal, n 2048 .80 -> 1.16, n 16384 1.05 -> 1.09
#   not kept
#     products in the order dQ, dV, dK: d 64 .94 1.04 for .90 .97 (n 1024, 16384), d 128 .80 .77 for .85 .86
#     S of the next step only after dK: the same
#     to wait for S alone, and for dP after the exponentials: the assembler serialises all products (C7514)
#     dQ added after dP of the next step has been started: registers don't suffice (C7512)
BACKWARD_TILES = {64: BackwardTile(128, stages=2), 128: BackwardTile(64, stages=3),
                  256: BackwardTile(64, stages=2, wide=True)}


def choose_backward(spec):
    """The tile shape of the backward kernel for a spec."""
    return next(tile for largest, tile in BACKWARD_TILES.items() if max(spec.d, spec.d_v) <= largest)


@dataclass(frozen=True)
class BackwardLayout:
    """Offsets and sizes in bytes of what is in the backward kernel's shared memory."""

    tile: BackwardTile
    spec: Spec

    def _boxes(self, columns):
        return round_up(columns, BOX) // BOX

    @property
    def q_boxes(self):
        return self._boxes(self.spec.d)

    @property
    def k_boxes(self):
        """As many as the consumers' parts of dQ have; what is past d is zero."""
        return self._boxes(self.dq_columns * (1 if self.tile.dq_by_rows else self.tile.consumers))

    @property
    def v_boxes(self):
        return self._boxes(self.spec.d_v)

    @property
    def number_rows(self):
        """Rows of the box that lse and delta of a query tile are copied as."""
        return 2 * self.tile.block_m // NUMBERS

    @property
    def dq_columns(self):
        """Columns of a consumer's part of dQ."""
        return self.spec.d if self.tile.dq_by_rows else round_up(self.spec.d, 2 * BOX) // 2

    @property
    def dq_parts(self):
        """How dQ lies in float32: a part for each consumer."""
        return SumParts(WARPGROUP, self.tile.block_m, ROWS, self.dq_columns, 1 if self.tile.dq_by_rows else 2)

    @property
    def key_parts(self):
        """How dK and dV lie in float32 where blocks share them."""
        return tuple(SumParts(WARPGROUP, self.tile.block_n, ROWS, columns, 1)
                     for columns in (self.spec.d, self.spec.d_v))

    @property
    def sizes(self):
        """Bytes of k, v, a place of q, of do, of ds, of lse and delta, and of p in float32."""
        row, tile = BOX * ITEM, self.tile
        return (self.k_boxes * tile.block_n * row, self.v_boxes * tile.block_n * row, self.q_boxes * tile.block_m * row,
                self.v_boxes * tile.block_m * row, tile.block_n // BOX * tile.block_m * row,
                2 * tile.block_m * 4, tile.block_m * tile.block_n * 4 if tile.wide else 0)

    @property
    def offsets(self):
        """Offsets of k, v, q, do, ds, of lse and delta, of p, and of the barriers."""
        k, v, q, do, ds, numbers, p = self.sizes
        stages = self.tile.stages
        sizes = k, v, stages * q, stages * do, self.tile.ds_slots * ds, stages * numbers, p
        return tuple(sum(sizes[:n]) for n in range(len(sizes) + 1))

    @property
    def barriers(self):
        """Offsets of k_full, v_full, the first q_full, q_empty, do_full, do_empty, may_add, and of ds_full."""
        counts = [1, 1] + [self.tile.stages] * 4 + [self.tile.consumers]
        return tuple(self.offsets[-1] + BARRIER * sum(counts[:n]) for n in range(len(counts) + 1))

    @property
    def total(self):
        return self.barriers[-1] + BARRIER
