r"""FlashAttention's backward pass on Hopper: dK and dV in registers, dQ added up in global memory.

A block owns 128 rows of K and V, its two consumers 64 each, and walks along the queries that see them. S and dP are
computed transposed, keys down and queries across: P^T and dS^T are then where the products for dV and dK want them::

    S^T = K Q^T        P^T = exp(S^T - lse)          dV += P^T dO
    dP^T = V dO^T      dS^T = P^T (dP^T - delta)     dK += dS^T Q         dQ += dS K

dQ needs both consumers' dS: they leave it in shared memory, and dQ of a step is computed in the next one. Each consumer
computes a half of it, and adds it to global memory in float32. A step::

    consumer 0    exp, dS   (turn) [dV | dK | dQ of the step before | S, dP of the next]   exp, dS   ...
    consumer 1                      exp, dS             (turn) [dV | dK | dQ | S, dP]   ...

The turns do two things: one consumer's exponentials run while the other's products do, and who gives the turn says
"my dS is written, and I have read that of the step before", so that two places for dS are enough.

If bits are to repeat, blocks add to a tile of dQ in the order of their keys, the last ones first, as under a causal
mask these come by first. Two more warps see to it, one for each consumer: they wait for the block's turn, say so to the
consumer, and pass the turn on when it has added.

Query heads that share keys are walked one after another: dK and dV of a group add up in the same registers.

Reads and writes of global memory: as `flash2_backward` with tiles of 128 keys, each of which adds to all of dQ once.
"""

from functools import lru_cache

from ...scores import seeing_queries, seen_keys
from ..compile import cuda, device
from ..ptx.arithmetic import uniform
from ..ptx.assembly import float32, int32, uint64
from ..ptx.barriers import (barrier_arrive, barrier_sync, fence_async, fence_mbarrier_init, make_set_registers,
                            mbarrier_arrive, mbarrier_expect, mbarrier_init, mbarrier_wait, mbarrier_wait_or_trap)
from ..ptx.copies import (BOX_ROW, copy_boxes, copy_bytes, element_address, load_acquire, make_parameter_address,
                          shared_memory, store_release, swizzled, tensor_map)
from ..ptx.fragments import (add_fragment, columnwise, first_column, first_row, make_filled, make_load_sums,
                             make_pack16, store_rows, store_transposed)
from ..ptx.wgmma import Operand, make_product_of_registers, make_product_of_shared, make_wait
from ..signatures import array_type, counters, int64, none, real_array
from ..tensor_cores.gradients import (less_delta, make_damped, make_transposed_score_tile, probability,
                                      score_gradient)
from ..tensor_cores.schedule import divide, following, thread_of_warpgroup
from ..tensor_cores.softmax import scaled
from ..tensor_cores.spec import ITEM, WARP, WARPGROUP
from .config import ROWS, BackwardLayout

TURN, ADDED = 1, 3      # and those after, one for each consumer: the block's barriers

seeing_queries, seen_keys = device(seeing_queries), device(seen_keys)
first_row, first_column = device(first_row), device(first_column)
probability, score_gradient, less_delta = map(columnwise, (probability, score_gradient, less_delta))


@lru_cache(maxsize=None)
def make_backward(tile, spec, ordered):
    """Build the backward kernel.

    Grid: one block for each K/V tile of each key head. Block: one producer warpgroup and two consumers. Shared memory:
    `BackwardLayout`. A consumer's thread owns two keys, and every fourth pair of queries or columns. `ordered`: whether
    blocks add to dQ in turn; a block must not wait for one that starts later, so that the last keys' starts first.
    """
    layout = BackwardLayout(tile, spec)
    block_m, block_n, stages = tile.block_m, tile.block_n, tile.stages
    d, d_v, q_boxes, v_boxes = spec.d, spec.d_v, layout.q_boxes, layout.v_boxes
    by_rows, dq_columns, alibi, softcap = tile.dq_by_rows, layout.dq_columns, spec.alibi, spec.softcap
    k_bytes, v_bytes, q_bytes, do_bytes, ds_bytes, number_bytes = layout.sizes
    k_tile, v_tile, q_tiles, do_tiles, ds_tiles, number_tiles, _ = layout.offsets
    k_full, v_full, q_full, q_empty, do_full, do_empty, may_add = layout.barriers

    q_map_address, k_map_address, v_map_address, do_map_address = map(make_parameter_address, range(4))
    give_registers = make_set_registers("dec", tile.producer_registers)
    take_registers = make_set_registers("inc", tile.consumer_registers)
    wait_for = mbarrier_wait_or_trap if tile.debug else mbarrier_wait
    keys, queries = Operand(block_n, depth_down=False), Operand(block_m, depth_down=False)
    keys_down, queries_down = Operand(block_n, depth_down=True), Operand(block_m, depth_down=True)
    multiply_kq = make_product_of_shared(block_m, d, spec.dtype, keys, queries)
    multiply_vdo = make_product_of_shared(block_m, d_v, spec.dtype, keys, queries)
    multiply_pdo = make_product_of_registers(d_v, block_m, spec.dtype, queries_down)
    multiply_dsq = make_product_of_registers(d, block_m, spec.dtype, queries_down)
    multiply_dsk = make_product_of_shared(dq_columns, block_n, spec.dtype, queries, keys_down)
    wait_all, wait_all_but_one = make_wait(0), make_wait(1)
    undefined_s, undefined_dq = make_filled(block_m, None), make_filled(dq_columns, None)
    zero_dk, zero_dv = make_filled(d, 0.0), make_filled(d_v, 0.0)
    pack16 = make_pack16(spec.dtype)
    score_tile = make_transposed_score_tile(spec, block_m, 1, thread_of_warpgroup)
    damped = make_damped(alibi)

    # ---- the producer's warps ----------------------------------------------------------------------------------------

    @device
    def load_tiles(shared, own_map, walked_map, own, own_full, own_bytes, tiles, full, empty, size, boxes, numbers,
                   place):
        """Load the block's K, and Q_i of all query tiles that see it, with lse and delta; or its V, and dO_i."""
        b, kv_h, group, j_first, i_first, i_stop = place
        leader = cuda.threadIdx.x % WARP == 0
        if leader:
            mbarrier_expect(shared + own_full, own_bytes)
            copy_boxes(shared + own, own_map, shared + own_full, boxes, block_n, j_first, kv_h, b)
        stage, phase, h = int32(0), int32(1), int32(kv_h * group)
        while h < (kv_h + 1) * group:
            i = int32(i_first)
            while i < i_stop:
                wait_for(shared + empty + 8 * stage, phase)
                if leader:
                    if numbers is None:
                        mbarrier_expect(shared + full + 8 * stage, size)
                    else:
                        mbarrier_expect(shared + full + 8 * stage, size + number_bytes)
                        copy_bytes(shared + number_tiles + stage * number_bytes,
                                   element_address(numbers, b, h, int32(i // block_m)), number_bytes,
                                   shared + full + 8 * stage)
                    copy_boxes(shared + tiles + stage * size, walked_map, shared + full + 8 * stage, boxes, block_m, i,
                               h, b)
                stage, phase = following(stage, phase, stages)
                i = uniform(i + int32(block_m))             # so that the loop is not unrolled, which takes registers
            h = uniform(h + int32(1))

    @device
    def keep_order(shared, turns, consumer, tile_n, n_q, band, place):
        """Tell a consumer when it may add to dQ_i, and the next block when it has."""
        b, kv_h, group, _, i_first, i_stop = place
        n_k, offset, left, right = band
        leader = cuda.threadIdx.x % WARP == 0
        h = int32(kv_h * group)
        while h < (kv_h + 1) * group:
            i = int32(i_first)
            while i < i_stop:
                _, stop = seen_keys(i, min(i + block_m, n_q), offset, left, right, n_k)
                blocks_before = int32((stop - 1) // block_n - tile_n)
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

    # ---- the consumers' steps ----------------------------------------------------------------------------------------

    @device
    def damp(dp, s, deltas, i, j, slope, cap, band):
        """dP - delta times the derivative of the scores under a softcap."""
        thread = thread_of_warpgroup()
        its_first = float32(int32(j + first_row(thread) - band[1] - i - first_column(thread)))
        return damped(less_delta(dp, deltas), float32(0), s, (its_first, its_first + float32(8)), slope, cap)

    @device
    def add_dq(shared, dq, sums, consumer, i, h, b, phase):
        """Add this consumer's part of dQ_i: its half of the rows, or of the columns."""
        part = int32(i // block_m * 2 + consumer)
        if ordered:
            wait_for(shared + may_add + 8 * consumer, phase)
        add_fragment(dq, element_address(sums, b, h, part) + uint64(16 * thread_of_warpgroup()))
        if ordered:
            barrier_arrive(ADDED + consumer, WARPGROUP + WARP)

    def hopper_backward(q_map, k_map, v_map, do_map, numbers, sums, turns, dk_array, dv_array, slopes, n_q, n_k, group,
                        scale, factor, cap, offset, left, right):
        n_q, n_k, group, kv_heads = int32(n_q), int32(n_k), int32(group), int32(dk_array.shape[1])
        band = n_k, int32(offset), int32(left), int32(right)
        tiles_n = int32((n_k + block_n - 1) // block_n)
        bh, tile_n = divide(cuda.blockIdx.x, tiles_n)
        if ordered:
            tile_n = int32(tiles_n - 1 - tile_n)
        b, kv_h = divide(bh, kv_heads)
        j_first = int32(tile_n * block_n)
        i_first, i_stop = seeing_queries(j_first, min(j_first + block_n, n_k), band[1], band[2], band[3], n_q)
        if i_first >= i_stop:
            i_stop = int32(0)                       # nobody sees these keys
        i_first = int32(i_first // block_m * block_m)
        place = uniform(b), uniform(kv_h), group, uniform(j_first), uniform(i_first), uniform(int32(i_stop))

        shared = shared_memory()
        thread = int32(cuda.threadIdx.x)
        if thread == 0:
            mbarrier_init(shared + k_full, 1)
            mbarrier_init(shared + v_full, 1)
            for stage in range(stages):
                mbarrier_init(shared + q_full + 8 * stage, 1)
                mbarrier_init(shared + do_full + 8 * stage, 1)
                mbarrier_init(shared + q_empty + 8 * stage, 2)
                mbarrier_init(shared + do_empty + 8 * stage, 2)
            if ordered:
                mbarrier_init(shared + may_add, 1)
                mbarrier_init(shared + may_add + 8, 1)
            fence_mbarrier_init()
        cuda.syncthreads()      # or a thread waits on a barrier that isn't set up yet

        # ---- the producer --------------------------------------------------------------------------------------------
        if thread < WARPGROUP:
            give_registers()
            warp = uniform(thread // WARP)
            if warp == 0:
                load_tiles(shared, k_map_address(), q_map_address(), k_tile, k_full, k_bytes, q_tiles, q_full, q_empty,
                           q_bytes, q_boxes, numbers, place)
            elif warp == 1:
                load_tiles(shared, v_map_address(), do_map_address(), v_tile, v_full, v_bytes, do_tiles, do_full,
                           do_empty, do_bytes, v_boxes, None, place)
            elif ordered:
                keep_order(shared, turns, int32(warp - 2), tile_n, n_q, band, place)

        # ---- the consumers -------------------------------------------------------------------------------------------
        else:
            take_registers()
            b, kv_h, _, j_first, i_first, i_stop = place
            consumer = uniform(thread // WARPGROUP - 1)
            leader = thread & (WARPGROUP - 1) == 0
            j = int32(j_first + consumer * ROWS)
            all_first = int32(j + ROWS - 1 - band[1] - band[3])                     # queries that see all keys
            all_stop = int32(j - band[1] + band[2] + 1) if j + ROWS <= n_k else int32(0)
            own_k, own_v = shared + k_tile + consumer * ROWS * BOX_ROW, shared + v_tile + consumer * ROWS * BOX_ROW
            own_ds = shared + ds_tiles + consumer * block_m * BOX_ROW
            dq_ds, dq_k = shared + ds_tiles, shared + k_tile        # what this one's part of dQ is the product of
            if by_rows:
                dq_ds += consumer * ROWS * BOX_ROW
            else:
                dq_k += consumer * block_n * BOX_ROW
            dk, dv = zero_dk(), zero_dv()
            stage, phase, i, h = int32(0), int32(0), int32(i_first), int32(kv_h * group)
            last_i, last_h, place, last_place, add_phase, first = i, h, int32(0), int32(0), int32(0), True
            slope = slopes[b, h] if alibi else float32(0)

            if i < i_stop:
                wait_for(shared + k_full, 0)
                wait_for(shared + v_full, 0)
                wait_for(shared + q_full, 0)
                s = multiply_kq(undefined_s(), own_k, shared + q_tiles)
                wait_for(shared + do_full, 0)
                dp = multiply_vdo(undefined_s(), own_v, shared + do_tiles)
                if consumer == 1:
                    barrier_arrive(TURN, 2 * WARPGROUP)             # the other begins

                while h < (kv_h + 1) * group:
                    its_numbers = shared + number_tiles + stage * number_bytes + 4 * first_column(thread_of_warpgroup())
                    # P^T = exp(S^T - lse)
                    s, dp = wait_all(s), wait_all(dp)       # the assembler does not keep only one in flight here
                    s = score_tile(s, i, j, slope, scale, cap, band, all_first, all_stop)
                    if softcap:         # before P, which takes the registers of S
                        dp = damp(dp, s, its_numbers + 4 * block_m, i, j, slope, cap, band)
                    p = probability(s, factor, its_numbers)

                    # dS^T = P^T (dP^T - delta)
                    if softcap:
                        ds = scaled(dp, p)
                    else:
                        ds = score_gradient(dp, p, its_numbers + 4 * block_m)
                    p16, ds16 = pack16(p), pack16(ds)
                    lane, warp = thread_of_warpgroup() & 31, thread_of_warpgroup() >> 5
                    store_transposed(ds16, swizzled(own_ds + place * ds_bytes, (lane & 7) + (lane >> 4) * 8,
                                                    2 * warp + (lane >> 3 & 1)))
                    barrier_sync(TURN + consumer, 2 * WARPGROUP)

                    # dV += P^T dO, dQ += dS K of the step before, dK += dS^T Q
                    dv = multiply_pdo(dv, p16, shared + do_tiles + stage * do_bytes)
                    dq = multiply_dsk(undefined_dq(), dq_ds + last_place * ds_bytes, dq_k)
                    dk = multiply_dsq(dk, ds16, shared + q_tiles + stage * q_bytes)
                    fence_async()               # dS is for both consumers' products of the next step

                    # S^T and dP^T of the next step; after the last one, of nothing that anybody reads
                    next_i, next_h = int32(i + block_m), h
                    if next_i >= i_stop:
                        next_i, next_h = int32(i_first), int32(h + 1)
                    more = next_h < (kv_h + 1) * group
                    next_stage, next_phase = following(stage, phase, stages)
                    if more:
                        wait_for(shared + q_full + 8 * next_stage, next_phase)
                        wait_for(shared + do_full + 8 * next_stage, next_phase)
                    dq = wait_all_but_one(dq)
                    if not first:
                        add_dq(shared, dq, sums, consumer, last_i, last_h, b, add_phase)
                        add_phase = int32(add_phase ^ 1)
                    s = multiply_kq(undefined_s(), own_k, shared + q_tiles + next_stage * q_bytes)
                    dk, dv = wait_all_but_one(dk), wait_all_but_one(dv)
                    if leader:
                        mbarrier_arrive(shared + q_empty + 8 * stage)
                        mbarrier_arrive(shared + do_empty + 8 * stage)
                    stage, phase = next_stage, next_phase
                    dp = multiply_vdo(undefined_s(), own_v, shared + do_tiles + stage * do_bytes)
                    barrier_arrive(TURN + 1 - consumer, 2 * WARPGROUP)
                    last_place, place = place, place + int32(1) if place < 2 else int32(0)
                    last_i, last_h, i, h, first = i, h, next_i, next_h, False
                    if alibi and more:
                        slope = slopes[b, h]

                # dQ of the last step
                s, dp = wait_all(s), wait_all(dp)
                if consumer == 0:
                    barrier_sync(TURN, 2 * WARPGROUP)
                dq = wait_all(multiply_dsk(undefined_dq(), dq_ds + last_place * ds_bytes, dq_k))
                add_dq(shared, dq, sums, consumer, last_i, last_h, b, add_phase)

            thread = thread_of_warpgroup()
            row = int32(j + first_row(thread))
            store_rows(pack16(dv), element_address(dv_array, b, kv_h, row), dv_array.strides[2], int32(n_k - row),
                       int32(dv_array.shape[3]))
            store_rows(pack16(scaled(dk, (scale, scale))), element_address(dk_array, b, kv_h, row),
                       dk_array.strides[2], int32(n_k - row), int32(dk_array.shape[3]))

    signature = ((tensor_map,) * 4
                 + (real_array(spec.dtype, 4), real_array(spec.dtype, 4), counters if ordered else none,
                    array_type(spec.dtype, 4), array_type(spec.dtype, 4), real_array(spec.dtype, 2) if alibi else none,
                    *[int64] * 3, *[float32] * 3, *[int64] * 3))
    return hopper_backward, signature


@lru_cache(maxsize=None)
def make_round(tile, spec):
    """Build the kernel for ``dq = scale * sums`` in 16 bits.

    Grid: one block for each consumer's part of a tile of dQ, of 128 threads, which hold it as the consumer's did.
    """
    layout = BackwardLayout(tile, spec)
    block_m, by_rows, dq_columns = tile.block_m, tile.dq_by_rows, layout.dq_columns
    load_sums, pack16 = make_load_sums(dq_columns), make_pack16(spec.dtype)

    def round_kernel(sums, dq_array, scale):
        bh, part = divide(cuda.blockIdx.x, sums.shape[2])
        b, h = divide(bh, sums.shape[1])
        tile_m, consumer = divide(part, 2)
        row, column = int32(tile_m * block_m + first_row(cuda.threadIdx.x)), int32(0)
        if by_rows:
            row += consumer * ROWS
        else:
            column += consumer * dq_columns
        dq = load_sums(element_address(sums, b, h, part) + uint64(16 * cuda.threadIdx.x))
        store_rows(pack16(scaled(dq, (scale, scale))), element_address(dq_array, b, h, row) + uint64(column * ITEM),
                   dq_array.strides[2], int32(dq_array.shape[2] - row), int32(dq_array.shape[3] - column))

    return round_kernel, (real_array(spec.dtype, 4), array_type(spec.dtype, 4), float32)
