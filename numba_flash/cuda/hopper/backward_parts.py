"""What the two backward kernels have in common: the block's place, the producer, dQ in global memory, the epilogue.

If bits are to repeat, blocks add to a tile of dQ in the order of their keys, the last ones first, as under a causal
mask these come by first. Two more warps of the producer see to it, one for each consumer: they wait for the block's
turn, say so to the consumer, and pass the turn on when it has added.
"""

from functools import lru_cache
from typing import Any, NamedTuple

from ...scores import seeing_queries, seen_keys
from ..compile import cuda, device
from ..ptx.arithmetic import uniform
from ..ptx.assembly import float32, int32
from ..ptx.barriers import (barrier_arrive, barrier_sync, fence_mbarrier_init, mbarrier_arrive, mbarrier_expect,
                            mbarrier_init, mbarrier_wait, mbarrier_wait_or_trap)
from ..ptx.copies import copy_boxes, element_address, load_acquire, store_release, tensor_map
from ..ptx.exchange import make_add_fragment
from ..ptx.fragments import first_row, make_pack16, store_rows
from ..ptx.wgmma import Operand, make_product_of_registers, make_product_of_shared
from ..signatures import array_type, counters, int64, none, real_array
from ..tensor_cores.schedule import divide, following, thread_of_warpgroup, tile_and_head
from ..tensor_cores.softmax import scaled
from ..tensor_cores.spec import WARP, WARPGROUP
from .config import ROWS, BackwardLayout

ADDED = 1               # and the one after, one for each consumer: the block's barriers
CONSUMERS_OWN = 3       # and those after are free for the consumers

seeing_queries, seen_keys, first_row = device(seeing_queries), device(seen_keys), device(first_row)


class Parts(NamedTuple):
    """Device functions, as `make_parts` builds them."""

    wait_for: Any
    set_barriers: Any
    own_place: Any
    produce: Any
    following_step: Any
    add_dq: Any


def signature_of(spec, ordered):
    """Types of the parameters of a backward kernel: see `hopper.engine.backward`."""
    return ((tensor_map,) * 5
            + (real_array(spec.dtype, 4), counters if ordered else none, array_type(spec.dtype, 4),
               array_type(spec.dtype, 4), real_array(spec.dtype, 4), real_array(spec.dtype, 4),
               real_array(spec.dtype, 2) if spec.alibi else none, *[int64] * 5, *[float32] * 3, *[int64] * 3))


@lru_cache(maxsize=None)
def make_parts(tile, spec, ordered):
    """Build the `Parts` of a kernel. `ordered`: whether blocks add to dQ in turn."""
    layout = BackwardLayout(tile, spec)
    block_m, block_n, stages, wide = tile.block_m, tile.block_n, tile.stages, tile.wide
    k_bytes, v_bytes, q_bytes, do_bytes, _, number_bytes = layout.sizes[:6]
    k_tile, v_tile, q_tiles, do_tiles, _, number_tiles = layout.offsets[:6]
    k_full, v_full, q_full, q_empty, do_full, do_empty, may_add, ds_full = layout.barriers
    k_boxes, q_boxes, v_boxes, number_rows = layout.k_boxes, layout.q_boxes, layout.v_boxes, layout.number_rows
    wait_for = mbarrier_wait_or_trap if tile.debug else mbarrier_wait
    add_fragment = make_add_fragment(WARPGROUP, layout.dq_parts.by_four)

    @device
    def set_barriers(shared):
        """Set the block's mbarriers up."""
        if cuda.threadIdx.x == 0:
            mbarrier_init(shared + k_full, 1)
            mbarrier_init(shared + v_full, 1)
            for stage in range(stages):
                mbarrier_init(shared + q_full + 8 * stage, 1)
                mbarrier_init(shared + do_full + 8 * stage, 1)
                mbarrier_init(shared + q_empty + 8 * stage, 2)
                mbarrier_init(shared + do_empty + 8 * stage, 2)
            if wide:
                mbarrier_init(shared + ds_full, WARPGROUP)
            if ordered:
                mbarrier_init(shared + may_add, 1)
                mbarrier_init(shared + may_add + 8, 1)
            fence_mbarrier_init()
        cuda.syncthreads()      # or a thread waits on a barrier that isn't set up yet

    @device
    def own_place(n_q, group, shares, together, kv_heads, band):
        """The block's batch, key head, its query heads and its first key, and the queries that see its keys."""
        n_k, offset, left, right = band
        tiles_n = int32((n_k + block_n - 1) // block_n)
        walks, _ = divide(cuda.gridDim.x, tiles_n)
        tile_n, walk = tile_and_head(cuda.blockIdx.x, tiles_n, walks, together)
        if ordered:             # a block waits for those with later keys, so that these must start before
            tile_n = int32(tiles_n - 1 - tile_n)
        bh, share = divide(walk, shares)
        b, kv_h = divide(bh, kv_heads)
        heads, _ = divide(group, shares)
        h_first, j_first = int32(kv_h * group + share * heads), int32(tile_n * block_n)
        i_first, i_stop = seeing_queries(j_first, min(j_first + block_n, n_k), offset, left, right, n_q)
        if i_first >= i_stop:
            i_stop = int32(0)                       # nobody sees these keys
        i_first = int32(i_first // block_m * block_m)
        return (uniform(b), uniform(kv_h), uniform(h_first), uniform(h_first + heads), uniform(j_first),
                uniform(i_first), uniform(int32(i_stop)))

    # ---- the producer ------------------------------------------------------------------------------------------------

    @device
    def load_tiles(shared, own_map, walked_map, own, own_full, own_bytes, own_boxes, tiles, full, empty, size, boxes,
                   numbers_map, place):
        """Load the block's K, and Q_i of all query tiles that see it, with lse and delta; or its V, and dO_i."""
        b, kv_h, h_first, h_stop, j_first, i_first, i_stop = place
        leader = cuda.threadIdx.x % WARP == 0
        if leader:
            mbarrier_expect(shared + own_full, own_bytes)
            copy_boxes(shared + own, own_map, shared + own_full, own_boxes, block_n, j_first, kv_h, b)
        stage, phase, h = int32(0), int32(1), int32(h_first)
        while h < h_stop:
            i = int32(i_first)
            while i < i_stop:
                wait_for(shared + empty + 8 * stage, phase)
                if leader:
                    if numbers_map is None:
                        mbarrier_expect(shared + full + 8 * stage, size)
                    else:
                        mbarrier_expect(shared + full + 8 * stage, size + number_bytes)
                        copy_boxes(shared + number_tiles + stage * number_bytes, numbers_map, shared + full + 8 * stage,
                                   1, number_rows, int32(i // block_m * number_rows), h, b)
                    copy_boxes(shared + tiles + stage * size, walked_map, shared + full + 8 * stage, boxes, block_m, i,
                               h, b)
                stage, phase = following(stage, phase, stages)
                i = uniform(i + int32(block_m))             # so that the loop is not unrolled, which takes registers
            h = uniform(h + int32(1))

    @device
    def keep_order(shared, turns, consumer, n_q, band, place):
        """Tell a consumer when it may add to dQ_i, and the next block when it has."""
        b, kv_h, h_first, h_stop, j_first, i_first, i_stop = place
        n_k, offset, left, right = band
        leader = cuda.threadIdx.x % WARP == 0
        h = int32(h_first)
        while h < h_stop:
            i = int32(i_first)
            while i < i_stop:
                _, stop = seen_keys(i, min(i + block_m, n_q), offset, left, right, n_k)
                blocks_before = int32((stop - 1) // block_n - j_first // block_n)
                turn = element_address(turns, b, h, int32(i // block_m * 2 + consumer))
                while load_acquire(turn) != blocks_before:
                    pass
                if leader:
                    mbarrier_arrive(shared + may_add + 8 * consumer)
                barrier_sync(ADDED + consumer, WARPGROUP + WARP)
                if leader:
                    store_release(turn, int32(blocks_before + 1))
                i = uniform(i + int32(block_m))
            h = uniform(h + int32(1))

    @device
    def produce(shared, q_map, k_map, v_map, do_map, numbers_map, turns, n_q, band, place):
        """The producer's warps."""
        warp = uniform(int32(cuda.threadIdx.x) // WARP)
        if warp == 0:
            load_tiles(shared, k_map, q_map, k_tile, k_full, k_bytes, k_boxes, q_tiles, q_full, q_empty, q_bytes,
                       q_boxes, numbers_map, place)
        elif warp == 1:
            load_tiles(shared, v_map, do_map, v_tile, v_full, v_bytes, v_boxes, do_tiles, do_full, do_empty, do_bytes,
                       v_boxes, None, place)
        elif ordered:
            keep_order(shared, turns, int32(warp - 2), n_q, band, place)

    # ---- the consumers -----------------------------------------------------------------------------------------------

    @device
    def following_step(i, h, place):
        """The next step's first query and head, and whether there is one."""
        _, _, _, h_stop, _, i_first, i_stop = place
        next_i, next_h = int32(i + block_m), h
        if next_i >= i_stop:
            next_i, next_h = int32(i_first), int32(h + 1)
        return next_i, next_h, next_h < h_stop

    @device
    def add_dq(shared, dq, sums, consumer, i, h, b, phase):
        """Add this consumer's part of dQ_i: its half of the rows, or of the columns."""
        if ordered:
            wait_for(shared + may_add + 8 * consumer, phase)
        part = int32(i // block_m * 2 + consumer)
        add_fragment(dq, element_address(sums, b, h, part), thread_of_warpgroup())
        if ordered:
            barrier_arrive(ADDED + consumer, WARPGROUP + WARP)

    return Parts(wait_for, set_barriers, own_place, produce, following_step, add_dq)


def make_products(tile, spec):
    """Build the products S^T = K Q^T, dP^T = V dO^T, dV += P^T dO, dK += dS^T Q, and a consumer's part of dQ = dS K."""
    block_m, block_n, d, d_v, dtype = tile.block_m, tile.block_n, spec.d, spec.d_v, spec.dtype
    keys, queries = Operand(block_n, depth_down=False), Operand(block_m, depth_down=False)
    keys_down, queries_down = Operand(block_n, depth_down=True), Operand(block_m, depth_down=True)
    return (make_product_of_shared(block_m, d, dtype, keys, queries),
            make_product_of_shared(block_m, d_v, dtype, keys, queries),
            make_product_of_registers(d_v, block_m, dtype, queries_down),
            make_product_of_registers(d, block_m, dtype, queries_down),
            make_product_of_shared(BackwardLayout(tile, spec).dq_columns, block_n, dtype, queries, keys_down))


@lru_cache(maxsize=None)
def make_store_keys(dtype):
    """Build ``store_keys(x, scale, array, sums, shares, b, h, j, n_k)``: the epilogue, 64 rows of dK or dV go out.

    To `array`, or if several blocks share them, to `sums`, as `SumParts` lie.
    """
    pack16, add_fragment = make_pack16(dtype), make_add_fragment(WARPGROUP, by_four=True)

    @device
    def store_keys(x, scale, array, sums, shares, b, h, j, n_k):
        if shares > 1:
            add_fragment(x, element_address(sums, b, h, int32(j // ROWS)), thread_of_warpgroup())
            return
        row = int32(j + first_row(thread_of_warpgroup()))
        store_rows(pack16(scaled(x, (scale, scale))), element_address(array, b, h, row), array.strides[2],
                   int32(n_k - row), int32(array.shape[3]))

    return store_keys
