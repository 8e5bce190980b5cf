r"""FlashAttention's backward pass on Hopper: dK and dV in registers, dQ added up in global memory.

A block owns 128 rows of K and V, its two consumers 64 each, and walks along the queries that see them. S and dP are
computed transposed, keys down and queries across: P^T and dS^T are then where the products for dV and dK want them::

    S^T = K Q^T        P^T = exp(S^T - lse)          dV += P^T dO
    dP^T = V dO^T      dS^T = P^T (dP^T - delta)     dK += dS^T Q         dQ += dS K

dQ needs both consumers' dS: they leave it in shared memory, and dQ of a step is computed in the next one. Each consumer
computes a half of it, which TMA adds to global memory in float32. A step::

    consumer 0    exp, dS   (turn) [dV | dK | dQ of the step before | S, dP of the next]   exp, dS   ...
    consumer 1                      exp, dS             (turn) [dV | dK | dQ | S, dP]   ...

The turns do two things: one consumer's exponentials run while the other's products do, and who gives the turn says
"my dS is written, and I have read that of the step before", so that two places for dS are enough.

Query heads that share keys are walked one after another: dK and dV of a group add up in the same registers.

Reads and writes of global memory: as `flash2_backward` with tiles of 128 keys, each of which adds to all of dQ once.
"""

from functools import lru_cache
from math import inf

from ...scores import make_score, seeing_queries
from ..compile import cuda, device
from ..memory import make_conversions
from ..ptx.arithmetic import exp2, fma, uniform
from ..ptx.assembly import float32, int32
from ..ptx.barriers import (barrier_arrive, barrier_sync, fence_async, fence_mbarrier_init, make_set_registers,
                            mbarrier_arrive, mbarrier_expect, mbarrier_init, mbarrier_wait, mbarrier_wait_or_trap)
from ..ptx.copies import (BOX_ROW, add_to_global, commit_copies, copy_boxes, element_address, make_parameter_address,
                          shared_memory, store_shared_float, swizzled, tensor_map, wait_copies_read)
from ..ptx.fragments import (columnwise, elementwise, first_column, first_row, make_filled, make_pack16, store_floats,
                             store_floats_transposed, store_rows, store_transposed)
from ..ptx.wgmma import Operand, make_product_of_registers, make_product_of_shared, make_wait
from ..signatures import array_type, int64, none, real_array
from ..tensor_cores.schedule import divide, following, thread_of_warpgroup
from ..tensor_cores.softmax import hide, scaled
from ..tensor_cores.spec import BOX, LOG2_E, WARP, WARPGROUP
from .config import ROWS, BackwardLayout

TURN, OWN = 1, 3            # the block's barriers: the consumers' turns, and their own
HALF_BOX = 32               # columns of a box of float32

seeing_queries = device(seeing_queries)
first_row, first_column = device(first_row), device(first_column)


@columnwise
def probability(s, factor, lse):
    """exp(s - lse), lse in base 2."""
    return exp2(fma(s, factor, -lse))


@columnwise
def score_gradient(dp, p, delta):
    """dS = P (dP - delta)."""
    return p * (dp - delta)


@lru_cache(maxsize=None)
def make_backward(tile, spec):
    """Build the backward kernel.

    Grid: one block for each K/V tile of each key head. Block: one producer warpgroup and two consumers. Shared memory:
    `BackwardLayout`. A consumer's thread owns two keys, and every fourth pair of queries or columns.
    """
    layout = BackwardLayout(tile, spec)
    block_m, block_n, stages, by_rows = tile.block_m, tile.block_n, tile.stages, tile.dq_by_rows
    d, d_v, q_boxes, v_boxes = spec.d, spec.d_v, layout.q_boxes, layout.v_boxes
    hook, alibi = spec.hook, spec.alibi
    k_bytes, v_bytes, q_bytes, do_bytes, ds_bytes, dq_bytes, row_bytes = layout.sizes
    k_tile, v_tile, q_tiles, do_tiles, ds_tiles, dq_tiles, row_tiles, _ = layout.offsets
    k_full, v_full, q_full, q_empty, do_full, do_empty = layout.barriers

    q_map_address, k_map_address, v_map_address, do_map_address, dq_map_address = map(make_parameter_address, range(5))
    give_registers = make_set_registers("dec", tile.producer_registers)
    take_registers = make_set_registers("inc", tile.consumer_registers)
    wait_for = mbarrier_wait_or_trap if tile.debug else mbarrier_wait
    keys, queries = Operand(block_n, depth_down=False), Operand(block_m, depth_down=False)
    keys_down, queries_down = Operand(block_n, depth_down=True), Operand(block_m, depth_down=True)
    multiply_kq = make_product_of_shared(block_m, d, spec.dtype, keys, queries)
    multiply_vdo = make_product_of_shared(block_m, d_v, spec.dtype, keys, queries)
    multiply_pdo = make_product_of_registers(d_v, block_m, spec.dtype, queries_down)
    multiply_dsq = make_product_of_registers(d, block_m, spec.dtype, queries_down)
    multiply_dsk = (make_product_of_shared(d, block_n, spec.dtype, queries, keys_down) if by_rows
                    else make_product_of_shared(block_m, block_n, spec.dtype, keys_down, queries))
    wait_all, wait_all_but_one = make_wait(0), make_wait(1)
    undefined_s, undefined_dq = make_filled(block_m, None), make_filled(d if by_rows else block_m, None)
    zero_dk, zero_dv = make_filled(d, 0.0), make_filled(d_v, 0.0)
    pack16 = make_pack16(spec.dtype)
    score = device(make_score(False, alibi, False, None)[0])

    @elementwise
    def score_of(s, column, distance, slope, scale, cap):
        return score(scale * s, cap, slope, abs(distance + column), float32(0))

    # ---- the producer's warps ----------------------------------------------------------------------------------------

    @device
    def load_tiles(shared, own_map, walked_map, own, own_full, own_bytes, tiles, full, empty, size, boxes, place):
        """Load the block's K, and Q_i of all query tiles that see it; or its V, and dO_i."""
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
                    mbarrier_expect(shared + full + 8 * stage, size)
                    copy_boxes(shared + tiles + stage * size, walked_map, shared + full + 8 * stage, boxes, block_m, i,
                               h, b)
                stage, phase = following(stage, phase, stages)
                i = uniform(i + int32(block_m))             # so that the loop is not unrolled, which takes registers
            h = uniform(h + int32(1))

    @device
    def load_rows(shared, lse, delta, place):
        """Load lse, in base 2, and delta of all query tiles; exp(s - inf) is 0 where there is nothing to learn."""
        b, kv_h, group, _, i_first, i_stop = place
        n_q, lane = int32(lse.shape[2]), int32(cuda.threadIdx.x % WARP)
        stage, phase, h = int32(0), int32(1), int32(kv_h * group)
        while h < (kv_h + 1) * group:
            its_lse, its_delta = lse[b, h], delta[b, h]
            i = int32(i_first)
            while i < i_stop:
                wait_for(shared + q_empty + 8 * stage, phase)
                rows = shared + row_tiles + stage * row_bytes
                column = lane
                while column < block_m:
                    inside = i + column < n_q
                    x = its_lse[i + column] if inside else float32(-inf)
                    store_shared_float(rows + 4 * column, x * float32(LOG2_E) if x != float32(-inf) else float32(inf))
                    store_shared_float(rows + 4 * (block_m + column), its_delta[i + column] if inside else float32(0))
                    column += int32(WARP)
                mbarrier_arrive(shared + q_full + 8 * stage)
                stage, phase = following(stage, phase, stages)
                i = uniform(i + int32(block_m))
            h = uniform(h + int32(1))

    # ---- the consumers' steps ----------------------------------------------------------------------------------------

    @device
    def score_tile(s, i, j, slope, scale, cap, band, all_first, all_stop):
        """From ``k·q`` to scores, hidden ones -inf; `i` is the tile's first query, `j` the consumer's first key."""
        n_k, offset, left, right = band
        if hook:
            thread = thread_of_warpgroup()
            distance = float32(int32(i + first_column(thread) + offset - j - first_row(thread)))
            s = score_of(s, float32(0), (distance, distance - float32(8)), slope, scale, cap)
        if i < all_first or i + block_m > all_stop:
            thread = thread_of_warpgroup()
            key = int32(j + first_row(thread))
            position = int32(key - offset - i)          # of the query at this key
            first = int32(position - right), int32(position + 8 - right)
            stop = (int32(position + left + 1) if key < n_k else int32(0),
                    int32(position + left + 9) if key + 8 < n_k else int32(0))
            s = hide(s, int32(first_column(thread)), first, stop)
        return s

    @device
    def put_dq(dq, staging):
        """Leave a consumer's part of a tile of dQ in shared memory."""
        thread = thread_of_warpgroup()
        row, column = first_row(thread), first_column(thread)
        if by_rows:
            store_floats(dq, swizzled(staging, row, column // 4) + 4 * (column % 4))
        else:       # rows of the fragment are columns of dQ
            at = staging + row // HALF_BOX * (block_m * BOX_ROW) + row % 4 * 4
            unit = row % HALF_BOX // 4
            store_floats_transposed(dq, (swizzled(at, column, unit), swizzled(at, column + 1, unit),
                                         swizzled(at, column, unit + 2), swizzled(at, column + 1, unit + 2)))

    @device
    def add_dq(shared, dq_map, consumer, i, h, b):
        """Have TMA add the part to dQ in global memory."""
        staging = shared + dq_tiles + consumer * dq_bytes
        fence_async()
        barrier_sync(OWN + consumer, WARPGROUP)     # or a number isn't there yet that is added
        if thread_of_warpgroup() == 0:
            if by_rows:
                for box in range((d + HALF_BOX - 1) // HALF_BOX):
                    add_to_global(dq_map, staging + box * ROWS * BOX_ROW, box * HALF_BOX, i + consumer * ROWS, h, b)
            else:
                for box in range(2):
                    add_to_global(dq_map, staging + box * block_m * BOX_ROW, consumer * BOX + box * HALF_BOX, i, h, b)
            commit_copies()

    def hopper_backward(q_map, k_map, v_map, do_map, dq_map, lse, delta, dk_array, dv_array, slopes, n_k, group, scale,
                        factor, cap, offset, left, right):
        n_q, kv_heads = int32(lse.shape[2]), int32(dk_array.shape[1])
        n_k, group = int32(n_k), int32(group)
        band = n_k, int32(offset), int32(left), int32(right)
        tiles_n = int32((n_k + block_n - 1) // block_n)
        bh, tile_n = divide(cuda.blockIdx.x, tiles_n)
        b, kv_h = divide(bh, kv_heads)
        j_first = int32(tile_n * block_n)
        i_first, i_stop = seeing_queries(j_first, min(j_first + block_n, n_k), band[1], band[2], band[3], n_q)
        i_first = int32(i_first // block_m * block_m)
        place = uniform(b), uniform(kv_h), group, uniform(j_first), uniform(i_first), uniform(int32(i_stop))

        shared = shared_memory()
        thread = int32(cuda.threadIdx.x)
        if thread == 0:
            mbarrier_init(shared + k_full, 1)
            mbarrier_init(shared + v_full, 1)
            for stage in range(stages):
                mbarrier_init(shared + q_full + 8 * stage, 1 + WARP)
                mbarrier_init(shared + do_full + 8 * stage, 1)
                mbarrier_init(shared + q_empty + 8 * stage, 2)
                mbarrier_init(shared + do_empty + 8 * stage, 2)
            fence_mbarrier_init()
        cuda.syncthreads()      # or a thread waits on a barrier that isn't set up yet

        # ---- the producer --------------------------------------------------------------------------------------------
        if thread < WARPGROUP:
            give_registers()
            warp = uniform(thread // WARP)
            if warp == 0:
                load_tiles(shared, k_map_address(), q_map_address(), k_tile, k_full, k_bytes, q_tiles, q_full, q_empty,
                           q_bytes, q_boxes, place)
            elif warp == 1:
                load_tiles(shared, v_map_address(), do_map_address(), v_tile, v_full, v_bytes, do_tiles, do_full,
                           do_empty, do_bytes, v_boxes, place)
            elif warp == 2:
                load_rows(shared, lse, delta, place)

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
            dq_of_k = shared + k_tile if by_rows else shared + k_tile + consumer * block_n * BOX_ROW
            own_ds = shared + ds_tiles + consumer * block_m * BOX_ROW
            own_q = consumer * ROWS * BOX_ROW if by_rows else int32(0)              # rows of dS for this one's dQ
            dk, dv = zero_dk(), zero_dv()
            stage, phase, i, h, step = int32(0), int32(0), int32(i_first), int32(kv_h * group), int32(0)
            last_i, last_h = i, h
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
                    rows = shared + row_tiles + stage * row_bytes + 4 * first_column(thread_of_warpgroup())
                    # P^T = exp(S^T - lse)
                    s, dp = wait_all(s), wait_all(dp)       # the assembler does not keep only one in flight here
                    s = score_tile(s, i, j, slope, scale, cap, band, all_first, all_stop)
                    p = probability(s, factor, rows)

                    # dS^T = P^T (dP^T - delta)
                    ds = score_gradient(dp, p, rows + 4 * block_m)
                    p16, ds16 = pack16(p), pack16(ds)
                    if leader:
                        wait_copies_read()
                    barrier_sync(TURN + consumer, 2 * WARPGROUP)

                    # dV += P^T dO, dK += dS^T Q
                    dv = multiply_pdo(dv, p16, shared + do_tiles + stage * do_bytes)
                    lane, warp = thread_of_warpgroup() & 31, thread_of_warpgroup() >> 5
                    store_transposed(ds16, swizzled(own_ds + stage * ds_bytes, (lane & 7) + (lane >> 4) * 8,
                                                    2 * warp + (lane >> 3 & 1)))
                    dk = multiply_dsq(dk, ds16, shared + q_tiles + stage * q_bytes)

                    # dQ += dS K, of the step before
                    last_ds = shared + ds_tiles + (stage ^ 1) * ds_bytes + own_q
                    if by_rows:
                        dq = multiply_dsk(undefined_dq(), last_ds, dq_of_k)
                    else:
                        dq = multiply_dsk(undefined_dq(), dq_of_k, last_ds)
                    fence_async()               # dS is for both consumers' products of the next step
                    dk = wait_all_but_one(dk)
                    dv = wait_all_but_one(dv)
                    if leader:
                        mbarrier_arrive(shared + q_empty + 8 * stage)
                        mbarrier_arrive(shared + do_empty + 8 * stage)

                    # S^T and dP^T of the next step; after the last one, of nothing that anybody reads
                    next_i, next_h = int32(i + block_m), h
                    if next_i >= i_stop:
                        next_i, next_h = int32(i_first), int32(h + 1)
                    more = next_h < (kv_h + 1) * group
                    stage, phase = following(stage, phase, stages)
                    if more:
                        wait_for(shared + q_full + 8 * stage, phase)
                    s = multiply_kq(undefined_s(), own_k, shared + q_tiles + stage * q_bytes)
                    dq = wait_all_but_one(dq)
                    put_dq(dq, shared + dq_tiles + consumer * dq_bytes)
                    if more:
                        wait_for(shared + do_full + 8 * stage, phase)
                    dp = multiply_vdo(undefined_s(), own_v, shared + do_tiles + stage * do_bytes)
                    barrier_arrive(TURN + 1 - consumer, 2 * WARPGROUP)
                    if step > 0:
                        add_dq(shared, dq_map_address(), consumer, last_i, last_h, b)
                    last_i, last_h, i, h, step = i, h, next_i, next_h, int32(1)
                    if alibi and more:
                        slope = slopes[b, h]

                # dQ of the last step
                s, dp = wait_all(s), wait_all(dp)
                if leader:
                    wait_copies_read()
                if consumer == 0:
                    barrier_sync(TURN, 2 * WARPGROUP)
                barrier_sync(OWN + consumer, WARPGROUP)     # or the place of dQ is still being read
                last_ds = shared + ds_tiles + (stage ^ 1) * ds_bytes + own_q
                if by_rows:
                    dq = wait_all(multiply_dsk(undefined_dq(), last_ds, dq_of_k))
                else:
                    dq = wait_all(multiply_dsk(undefined_dq(), dq_of_k, last_ds))
                put_dq(dq, shared + dq_tiles + consumer * dq_bytes)
                add_dq(shared, dq_map_address(), consumer, last_i, last_h, b)

            thread = thread_of_warpgroup()
            row = int32(j + first_row(thread))
            store_rows(pack16(dv), element_address(dv_array, b, kv_h, row), dv_array.strides[2], int32(n_k - row),
                       int32(dv_array.shape[3]))
            store_rows(pack16(scaled(dk, (scale, scale))), element_address(dk_array, b, kv_h, row),
                       dk_array.strides[2], int32(n_k - row), int32(dk_array.shape[3]))
            if leader:
                wait_copies_read()              # or the block ends, and its shared memory is another's

    signature = ((tensor_map,) * 5
                 + (real_array(spec.dtype, 3), real_array(spec.dtype, 3), array_type(spec.dtype, 4),
                    array_type(spec.dtype, 4), real_array(spec.dtype, 2) if alibi else none, int64, int64, float32,
                    float32, float32, int64, int64, int64))
    return hopper_backward, signature


@lru_cache(maxsize=None)
def make_round(threads, dtype):
    """Build the kernel for ``target = scale * sums`` in 16 bits. Grid: a thread for each number, `threads` a block."""
    _, from_real = make_conversions(dtype)

    def round_kernel(sums, target, scale):
        index = cuda.blockIdx.x * threads + cuda.threadIdx.x
        if index < sums.size:
            target[index] = from_real(sums[index] * scale)

    return round_kernel, (real_array(dtype, 1), array_type(dtype, 1), float32)
